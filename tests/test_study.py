"""Studies: numbers against plain formulas, Monte Carlo errors against simulation, and the store."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest

import qdq
from qdq import study as module
from qdq.study import run_study

SCENARIO = qdq.Scenario(
    n_servers=4, arrivals=qdq.Poisson(0.6), control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)
)
DESIGNS = (qdq.Bernoulli(0.5), qdq.Switchback(10.0), qdq.ServerSplit(0.5))
VARIANTS = {
    "horizon": (10, 20),
    "normalise": ("group_means", "inverse_propensity"),
    "queue": ("in_system", "time_average"),
    "arrival_rate": ("estimated", 2.4),
}
TRUTH = -0.9
# Large enough for ten periods of each arm, in every replication of the seeds used here.
SMALL = {
    "scenario": SCENARIO,
    "n_tasks": 1000,
    "seed": 3,
    "designs": DESIGNS,
    "horizon": 10,
    "truth": TRUTH,
}
STATISTICS = ("mean", "bias", "sd", "rmse", "coverage")


def small(n_replications=12, **changes):
    return run_study(n_replications=n_replications, **SMALL | changes)


@pytest.fixture(scope="module")
def study():
    return small(30, **VARIANTS)


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --------------------------------------------------------------------------------------------------
# Replications
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("j", [0, 7])
def test_replications_are_those_of_simulate_and_estimate(study, j):
    def rows(frame, design):
        """Return the numbers of each row by its labels."""
        frame = frame.astype(object).where(frame.notna(), None)
        return {
            (design, row.method, row.horizon, row.normalise, row.queue, str(row.arrival_rate)): (
                *(row.value, row.standard_error, row.low, row.high, row.alpha, row.n_used),
            )
            for row in frame.itertuples()
        }

    expected = {}
    for design in DESIGNS:
        log = qdq.simulate(SCENARIO, design, 1000, (3, j))
        bernoulli = isinstance(design, qdq.Bernoulli)
        for variant in itertools.product(*VARIANTS.values()) if bernoulli else [(None,) * 4]:
            options = variant if bernoulli else (None, "group_means", "in_system", None)
            expected |= rows(qdq.estimate(log, None, *options), repr(design))
    found = {}
    mine = study.replications[study.replications["replication"] == j]
    for design, part in mine.groupby("design"):
        found |= rows(part, design)
    assert found == expected
    # Per (horizon, normalise): response, and queue and mixed of (in_system x 2, time_average).
    assert len(mine) == len(found) == 1 + 4 * (1 + 3 * 2) + 1 + 1


def test_replications_have_the_columns_and_order_documented(study):
    frame = study.replications
    assert list(frame.columns) == [
        *("replication", "design", "method", "rule", "horizon", "normalise", "queue"),
        *(
            "arrival_rate",
            "variance",
            "value",
            "standard_error",
            "degrees_of_freedom",
            "low",
            "high",
            "alpha",
            "n_used",
        ),
    ]
    assert len(frame) == 30 * len(study.table)
    assert (frame["replication"] == np.repeat(np.arange(30), len(study.table))).all()
    labels = list(frame.columns[1:9])
    for _, part in frame.groupby("replication"):
        pd.testing.assert_frame_equal(
            part[labels].reset_index(drop=True), study.table[labels], check_like=False
        )
    mixed = frame["method"] == "dq_mixed"
    assert frame["alpha"].notna().equals(mixed)
    assert frame["rule"].isna().all()
    assert (frame["variance"] == "hac").all()
    # Terms of the series: what the blocks' correlation leaves of 32, but for a switchback whose
    # few periods are taken one by one.
    assert frame["degrees_of_freedom"].between(1.0, 32.0).all()
    terms = frame.loc[frame["method"] != "switchback", "degrees_of_freedom"]
    assert terms.between(4.0, 32.0).all()
    assert (terms == 32.0).any()


@pytest.mark.parametrize("j", [0, 1])
def test_rules_and_variances_are_those_of_estimate(j):
    spans, kinds = ["rmse", 10, "coverage"], ["score", "jackknife"]
    found = small(2, horizon=spans, variance=kinds, n_tasks=2000, designs=DESIGNS[0])
    log = qdq.simulate(SCENARIO, DESIGNS[0], 2000, (3, j))
    table = found.table
    assert (table["horizon"].isna() == (table["rule"].notna() | table["method"].eq("naive"))).all()
    mine = found.replications[found.replications["replication"] == j]
    assert len(mine) == len(kinds) + len(spans) * len(kinds) * 3
    for kind in kinds:
        of_kind = mine[mine["variance"] == kind]
        naive = of_kind.set_index("method").loc["naive"]
        assert naive["standard_error"] == qdq.naive(log, variance=kind).standard_error
        for span in spans:
            rule = span if isinstance(span, str) else None
            rows = of_kind[of_kind["rule"] == span if rule else of_kind["horizon"].eq(span)]
            if rule is None:
                rows = rows[rows["rule"].isna()]
            expected = qdq.estimate(log, None, span, variance=kind)[1:]
            assert rows["method"].tolist() == expected["method"].tolist()
            for name in ("horizon", "value", "standard_error", "low", "high", "n_used"):
                assert rows[name].tolist() == expected[name].tolist()


def test_a_split_of_unequal_groups_has_no_coverage():
    scenario = SCENARIO.replace(service_rates=(0.8, 1.2, 0.8, 1.2))
    found = small(4, scenario=scenario, designs=qdq.ServerSplit())
    (row,) = found.table.to_dict("records")
    assert math.isfinite(row["mean"])
    assert math.isfinite(row["rmse_error"])
    for name in ("coverage", "coverage_error", "mean_standard_error"):
        assert math.isnan(row[name])
    assert found.replications[["standard_error", "low", "high"]].isna().all(axis=None)
    assert "nan" in repr(found)


def test_normalisations_compare_pairwise(study):
    frame = study.replications.query("method == 'dq_response' and horizon == 10")
    wide = frame.pivot(index="replication", columns="normalise", values="value")
    assert wide.shape == (30, 2)
    assert wide.notna().all(axis=None)


def test_waiting_has_no_mixture_when_rates_differ():
    scenario = SCENARIO.replace(service_rates=(0.8, 1.2, 0.8, 1.2))
    found = small(2, scenario=scenario, designs=qdq.Bernoulli(), queue=("in_system", "waiting"))
    rows = found.table[["method", "queue"]].fillna("").apply(tuple, axis=1).tolist()
    assert rows == [
        *(("naive", ""), ("dq_response", ""), ("dq_queue", "in_system")),
        *(("dq_mixed", "in_system"), ("dq_queue", "waiting")),
    ]
    same = small(2, designs=qdq.Bernoulli(), queue="waiting")
    assert "dq_mixed" in same.table["method"].tolist()


def test_periodic_arrivals_use_the_scenarios_rate_unless_told():
    scenario = SCENARIO.replace(arrivals=qdq.Periodic(0.6, 0.5, 20.0))
    found = small(2, scenario=scenario, designs=qdq.Bernoulli(), arrival_rate=(None, "estimated"))
    assert set(found.table["arrival_rate"].dropna()) == {"scenario", "estimated"}
    assert set(small(2).table["arrival_rate"].dropna()) == {"estimated"}


def test_a_rate_may_be_a_function():
    options = {"designs": qdq.Bernoulli(), "n_jobs": 1}
    found = small(2, arrival_rate=(2.4, lambda time: 2.4), **options)
    both = found.replications[found.replications["method"] == "dq_queue"]
    values = both.pivot(index="replication", columns="arrival_rate", values="value")
    np.testing.assert_allclose(values["function"], values["2.4"], rtol=1e-12)


def test_default_horizon_is_the_scenarios():
    assert small(2, designs=qdq.Bernoulli(), horizon=None).table["horizon"].dropna().eq(72).all()


def test_washout_is_passed_on():
    found = small(2, designs=qdq.Switchback(10.0), washout=3.0)
    log = qdq.simulate(SCENARIO, qdq.Switchback(10.0), 1000, (3, 1))
    assert found.replications["value"][1] == qdq.switchback(log, washout=3.0).value


def test_warm_up_is_passed_on():
    # Runs that start empty differ from others for a short while only, so this looks at several.
    found = small(6, designs=qdq.ServerSplit(), warm_up=0.0)
    logs = [qdq.simulate(SCENARIO, qdq.ServerSplit(), 1000, (3, j), warm_up=0.0) for j in range(6)]
    assert found.replications["value"].tolist() == [qdq.server_split(log).value for log in logs]
    default = small(6, designs=qdq.ServerSplit())
    assert (default.replications["value"] != found.replications["value"]).any()
    assert found.settings["warm_up"] == 0.0
    assert default.settings["warm_up"] == SCENARIO.default_warm_up


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def test_table_by_plain_pandas(study):
    table = study.table
    frame = study.replications
    assert list(table.columns[8:]) == [
        "n_replications",
        *(name for statistic in STATISTICS for name in (statistic, f"{statistic}_error")),
        "mean_standard_error",
    ]
    labels = list(table.columns[:8])
    groups = list(frame.groupby(labels, dropna=False, sort=False))
    assert len(groups) == len(table)
    for (key, part), (_, row) in zip(groups, table.iterrows(), strict=True):
        assert key[:2] == (row["design"], row["method"])
        x = part["value"]
        assert row["n_replications"] == len(x) == 30
        assert row["mean"] == pytest.approx(x.mean(), rel=1e-12)
        assert row["mean_error"] == pytest.approx(x.sem(), rel=1e-12)
        assert row["bias"] == pytest.approx(x.mean() - TRUTH, rel=1e-12, abs=1e-14)
        assert row["bias_error"] == pytest.approx(x.sem(), rel=1e-12)
        assert row["sd"] == pytest.approx(x.std(), rel=1e-12)
        assert row["rmse"] == pytest.approx(((x - TRUTH) ** 2).mean() ** 0.5, rel=1e-12)
        assert row["rmse_error"] == pytest.approx(
            ((x - TRUTH) ** 2).sem() / (2.0 * row["rmse"]), rel=1e-12
        )
        m2, m4 = ((x - x.mean()) ** 2).mean(), ((x - x.mean()) ** 4).mean()
        assert row["sd_error"] == pytest.approx(
            ((m4 - (m2 * 30 / 29) ** 2 * 27 / 29) / 30) ** 0.5 / (2.0 * row["sd"]), rel=1e-9
        )
        inside = ((part["low"] <= TRUTH) & (part["high"] >= TRUTH)).sum()
        assert row["coverage"] == inside / 30
        assert row["coverage_error"] == pytest.approx(
            (inside * (30 - inside) / 30 + 0.25) ** 0.5 / 31, rel=1e-12
        )
        assert row["mean_standard_error"] == pytest.approx(part["standard_error"].mean(), rel=1e-12)


def test_coverage_error_is_half_of_wilsons_interval():
    for inside in (0, 3, 30):
        # Wilson's interval of z = 1: the p with |p - k/n| = sqrt(p (1 - p) / n).
        n, share = 30, inside / 30
        ends = np.roots([1.0 + 1.0 / n, -2.0 * share - 1.0 / n, share**2])
        high = np.where(np.arange(n) < inside, 1.0, -1.0)
        row = module._statistics(np.arange(n * 1.0), np.full(n, -2.0), high, high, 0.0, 0.0)
        assert row["coverage"] == share
        assert row["coverage_error"] == pytest.approx(np.ptp(ends) / 2.0, rel=1e-9)
        assert row["coverage_error"] > 0.0


@pytest.mark.parametrize("truth_error", [0.0, 0.2])
def test_monte_carlo_errors_are_the_spread_of_their_statistics(truth_error):
    # Skewed estimates with a bias, whose intervals cover about three times in four.
    rng = np.random.default_rng(5)
    n, draws = 60, 2000
    statistics = []
    for _ in range(draws):
        value = rng.exponential(1.5, n)
        truth = 1.0 + truth_error * rng.standard_normal()
        row = module._statistics(value, value - 1.0, value + 1.0, value, truth, truth_error)
        statistics.append(row)
    frame = pd.DataFrame(statistics)
    spread = frame[list(STATISTICS)].std()
    claimed = frame[[f"{name}_error" for name in STATISTICS]].pow(2).mean() ** 0.5
    ratios = claimed.to_numpy() / spread.to_numpy()
    # The delta method's own error is of the order of the kurtosis over n; a formula for the normal
    # law would be too small by half here for sd, and one without the truth's error for the others.
    np.testing.assert_allclose(ratios, 1.0, atol=0.12)
    normal = (frame["sd"] / math.sqrt(2.0 * (n - 1))).mean()
    assert normal < 0.7 * spread["sd"]
    if truth_error:
        ignored = frame["mean_error"].mean()
        assert ignored < 0.7 * spread["bias"]


def test_known_expectations_are_within_their_errors():
    scenario = qdq.Scenario(
        n_servers=2, arrivals=qdq.Poisson(0.6), control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)
    )
    found = run_study(scenario, 4000, 60, 11, horizon=10)
    assert found.truth.method == "exact"
    assert found.truth.value == pytest.approx(-0.81822, abs=5e-6)
    table = found.table.set_index("method")
    # From the chain's stationary law, see the tests of the exact values.
    expected = {"naive": -0.48797, "dq_response": -0.51132, "dq_queue": -0.42530}
    for method, value in expected.items():
        row = table.loc[method]
        assert abs(row["mean"] - value) < 4.0 * row["mean_error"]
        assert row["bias"] == pytest.approx(row["mean"] - found.truth.value, rel=1e-12)
    assert table.loc["naive", "mean_error"] < 0.02
    assert table.loc["naive", "bias"] > 10.0 * table.loc["naive", "bias_error"]


def test_standard_errors_are_the_spread_of_the_estimates():
    """Of every method; those by scores leave out how the queues that all tasks meet vary."""
    scenario = SCENARIO.replace(arrivals=qdq.Poisson(0.8))
    designs = (qdq.Bernoulli(0.5), qdq.Switchback(20.0), qdq.ServerSplit())
    options = {"horizon": 96, "variance": ["hac", "score"], "truth": 0.0, "progress": False}
    drawn = run_study(scenario, 15_000, 160, 5, designs=designs, **options).replications
    groups = drawn.groupby(["method", "variance"])
    ratio = groups["standard_error"].apply(lambda x: np.mean(x**2)) / groups["value"].var()
    ratio = ratio.unstack()
    assert len(ratio) == 6
    # A variance of 160 values is known to 11 %, of which these are 4.5; some 15 % are allowed for
    # the bias of either sign that the choice of the terms brings.
    assert (ratio["hac"] > (1.0 - 0.15) * (1.0 - 4.5 * 0.11)).all()
    assert (ratio["hac"] < (1.0 + 0.15) * (1.0 + 4.5 * 0.11)).all()
    assert ratio.loc["naive", "score"] < 0.6 * ratio.loc["naive", "hac"]
    assert ratio.loc["server_split", "score"] < 0.1


def test_the_truths_error_enters(study):
    truth = qdq.TrueEffect(
        **dict.fromkeys(("mean_response_control", "mean_response_treatment"), 0.0),
        **dict.fromkeys(("standard_error_control", "standard_error_treatment"), 0.0),
        **{"value": TRUTH, "standard_error": 0.4, "method": "simulation"},
        **{"n_replications": 16, "n_tasks": 1000, "scenario": SCENARIO},
    )
    table = replace(study, truth=truth).table
    np.testing.assert_allclose(table["bias"], study.table["bias"], rtol=1e-12)
    np.testing.assert_allclose(
        table["bias_error"], np.hypot(study.table["mean_error"], 0.4), rtol=1e-12
    )
    assert (table["rmse_error"] > study.table["rmse_error"]).all()
    assert (table["coverage_error"] >= study.table["coverage_error"]).all()
    assert small(2, truth=truth).truth is truth


def test_level_sets_the_intervals():
    wide, narrow = (small(2, level=level).replications for level in (0.99, 0.5))
    assert (wide["low"] < narrow["low"]).all()
    assert wide["value"].equals(narrow["value"])


def test_replications_without_an_estimate_are_counted_out():
    # Five whole periods: by the draw, an arm has less than two of them in 12 of 32 replications.
    with pytest.warns(UserWarning, match="whole periods of an arm") as caught:
        found = small(20, designs=(qdq.Bernoulli(), qdq.Switchback(75.0)))
    missing = int(found.replications["value"].isna().sum())
    assert 1 <= missing <= 18
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "has about 2.5 whole periods of an arm" in texts[0]
    assert texts[1].startswith(f"{missing} of 20 replications of Switchback(period=75.0")
    assert {Path(warning.filename).name for warning in caught} == {"test_study.py"}
    row = found.table.set_index("method").loc["switchback"]
    assert row["n_replications"] == 20 - missing
    values = found.replications.query("method == 'switchback'")["value"].dropna()
    assert row["sd"] == pytest.approx(values.std(), rel=1e-12)
    assert found.replications.query("method == 'switchback'")["n_used"].isna().sum() == missing
    assert found.table.set_index("method").loc["naive", "n_replications"] == 20
    assert "n_replications" in repr(found)


# --------------------------------------------------------------------------------------------------
# How a study shows
# --------------------------------------------------------------------------------------------------


def test_repr_and_html(study):
    text = repr(study)
    headline, *lines = text.splitlines()
    assert (
        headline == "Study: 30 replications of 1000 tasks, seed 3, true effect -0.9, variance hac"
    )
    assert len(lines) == 1 + len(study.table)
    row = study.table.iloc[0]
    assert f"{row['bias']:.3f} ± {row['bias_error']:.3f}" in lines[1]
    assert "horizon" in lines[0]
    assert "None" not in text
    assert "<NA>" not in text
    page = study._repr_html_()
    assert page.count("<tr") == len(lines)
    assert "Study: 30 replications" in page
    assert "horizon 10" in repr(small(2))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.35701, 0.00231, "-0.3570 ± 0.0023"),
        (12.3, 4.56, "12.3 ± 4.6"),
        (1234.5, 321.0, "1234 ± 321"),
        (0.5, 0.0, "0.5"),
        (math.nan, math.nan, "nan"),
    ],
)
def test_numbers_are_written_with_two_digits_of_their_error(value, error, text):
    assert module._with_error(value, error) == text


def test_to_dict_is_json_native_and_complete(study):
    spec = study.to_dict()
    assert json.loads(json.dumps(spec, allow_nan=False)) == spec
    assert qdq.Scenario.from_dict(spec["scenario"]) == SCENARIO
    assert spec["n_replications"] == 30
    assert spec["truth"] == {"value": TRUTH, "standard_error": 0.0, "method": "given"}
    assert len(spec["source"]) == 64


# --------------------------------------------------------------------------------------------------
# Threads, progress, failures
# --------------------------------------------------------------------------------------------------


def test_workers_do_not_matter(tmp_path):
    kept = {}
    for n_jobs in (1, 2, 3, -1):
        found = small(13, n_jobs=n_jobs, store=tmp_path / str(n_jobs), truth=None, **VARIANTS)
        kept[n_jobs] = files(tmp_path / str(n_jobs))
        assert len(found.replications) == 13 * len(found.table)
    assert sorted(kept[1]) == [
        *("chunks/00000000.json", "chunks/00000010.json"),
        *("replications.parquet", "study.json", "truth.json"),
    ]
    assert kept[1] == kept[2] == kept[3] == kept[-1]


def test_joblib_decides_where_it_is_asked_to():
    jobs = []

    class Counted(joblib._parallel_backends.ThreadingBackend):
        def configure(self, n_jobs=1, **options):
            jobs.append(n_jobs)
            return super().configure(n_jobs, **options)

    joblib.register_parallel_backend("counted", Counted)
    try:
        with joblib.parallel_config("counted", n_jobs=3):
            one, two = small(4, n_jobs=None), small(4, n_jobs=2)
    finally:
        joblib.parallel.BACKENDS.pop("counted")
    assert jobs == [3, 2]
    pd.testing.assert_frame_equal(one.replications, two.replications, check_exact=True)


def test_a_replication_can_be_sent_to_another_process():
    plan = small_plan()
    there = pickle.loads(pickle.dumps(plan))
    assert there.replicate(5) == plan.replicate(5)
    assert plan.replicate(5) != plan.replicate(6)


def small_plan():
    return module._checked_plan(
        SCENARIO, 1000, 3, DESIGNS, 10, "group_means", "in_system", None, None, 0.0, None
    )


def test_progress(capsys):
    small(3)
    assert capsys.readouterr().err == ""  # not a terminal
    small(3, progress=True)
    out, err = capsys.readouterr()
    assert "study: 100%" in err
    assert "3/3" in err
    assert out == ""
    small(3, progress=False)
    assert capsys.readouterr().err == ""


@pytest.fixture
def simulated(monkeypatch):
    """Count the replications simulated; `fails_at` makes one fail."""

    class Counting:
        def __init__(self):
            self.calls = []
            self.fails_at = None

        def __call__(self, scenario, design, n_tasks, seed, *others, **options):
            if seed[1] == self.fails_at:
                raise RuntimeError("no more")
            self.calls.append(seed[1])
            return stream(scenario, design, n_tasks, seed, *others, **options)

        def take(self):
            taken, self.calls = sorted(set(self.calls)), []
            return taken

    stream = module.stream
    counting = Counting()
    monkeypatch.setattr(module, "stream", counting)
    return counting


def test_a_failure_names_its_replication_and_keeps_what_was_finished(tmp_path, simulated):
    simulated.fails_at = 15
    with pytest.raises(RuntimeError, match="no more") as caught:
        small(30, store=tmp_path / "store")
    assert "replication 15 of the study, seed=(3, 15)" in str(caught.value.__notes__)
    assert list(files(tmp_path / "store")) == ["study.json", "chunks/00000000.json"]
    simulated.take()
    simulated.fails_at = None
    small(30, store=tmp_path / "store")
    assert simulated.take() == list(range(10, 30))


# --------------------------------------------------------------------------------------------------
# The store
# --------------------------------------------------------------------------------------------------


def test_store_ends_with_all_replications_in_order(tmp_path):
    found = small(13, store=tmp_path / "deep" / "store", **VARIANTS)
    path = tmp_path / "deep" / "store" / "replications.parquet"
    pd.testing.assert_frame_equal(pd.read_parquet(path), found.replications, check_exact=True)
    import pyarrow.parquet as pq

    spec = json.loads(pq.read_schema(path).metadata[b"qdq"])
    assert spec == json.loads((path.parent / "study.json").read_text()) == found.settings
    assert str(tmp_path).encode() not in b"".join(files(tmp_path).values())
    plain = small(13, **VARIANTS)
    pd.testing.assert_frame_equal(plain.replications, found.replications, check_exact=True)


def test_finished_replications_are_not_run_again(tmp_path, simulated):
    first = small(13, store=tmp_path)
    assert simulated.take() == list(range(13))
    before = files(tmp_path)
    again = small(13, store=tmp_path, n_jobs=1)
    assert simulated.take() == []
    assert files(tmp_path) == before
    pd.testing.assert_frame_equal(first.replications, again.replications, check_exact=True)


def test_more_and_fewer_replications(tmp_path, simulated):
    small(13, store=tmp_path / "grown")
    simulated.take()
    small(27, store=tmp_path / "grown")
    assert simulated.take() == list(range(13, 27))
    small(27, store=tmp_path / "at once")
    assert files(tmp_path / "grown") == files(tmp_path / "at once")
    simulated.take()
    fewer = small(5, store=tmp_path / "grown")
    assert simulated.take() == []
    at_once = small(5).replications
    pd.testing.assert_frame_equal(fewer.replications, at_once, check_exact=True)
    simulated.take()
    # The chunks keep what is more than asked for.
    small(27, store=tmp_path / "grown")
    assert simulated.take() == []
    assert files(tmp_path / "grown") == files(tmp_path / "at once")


KILLED = """
import sys, time
from qdq import study
from small import SMALL

stream = study.stream
def stalling(scenario, design, n_tasks, seed, *others, **options):
    if seed[1] >= 24:
        time.sleep(300.0)
    return stream(scenario, design, n_tasks, seed, *others, **options)
study.stream = stalling
study.run_study(n_replications=40, store=sys.argv[1], n_jobs=2, **SMALL)
"""


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(tmp_path, simulated):
    (tmp_path / "run.py").write_text(KILLED)
    (tmp_path / "small.py").write_text(f"from qdq import *\nSMALL = {SMALL!r}\n")
    store = tmp_path / "killed"
    command = [sys.executable, str(tmp_path / "run.py"), str(store)]
    root = str(Path(module.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240.0
        while not (store / "chunks" / "00000010.json").exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()  # SIGKILL, in the middle of the third chunk
        process.wait()
        process.stderr.close()
    assert process.returncode == -9 or sys.platform == "win32"
    assert sorted(files(store)) == ["chunks/00000000.json", "chunks/00000010.json", "study.json"]

    small(40, store=store, n_jobs=1)
    assert simulated.take() == list(range(20, 40))
    small(40, store=tmp_path / "whole", n_jobs=2)
    assert files(store) == files(tmp_path / "whole")


def test_what_a_kill_in_the_middle_of_writing_leaves_is_overwritten(tmp_path):
    small(13, store=tmp_path / "whole")
    torn = tmp_path / "torn"
    (torn / "chunks").mkdir(parents=True)
    for name in ("study.json", "chunks/00000000.json", "replications.parquet"):
        (torn / f"{name}.part").write_bytes(b"{")
    (torn / "chunks" / "00000000.json.part").rename(torn / "chunks" / "00000010.json.part")
    (torn / "chunks").rename(tmp_path / "chunks")
    (torn / "study.json.part").unlink()
    small(2, store=torn)
    (tmp_path / "chunks" / "00000010.json.part").rename(torn / "chunks" / "00000010.json.part")
    small(13, store=torn)
    assert files(torn) == files(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "other study", "other chunk", "shape"])
def test_damaged_chunks_are_found_and_made_again(tmp_path, simulated, damage):
    small(23, store=tmp_path / "store")
    before = files(tmp_path / "store")
    path = tmp_path / "store" / "chunks" / "00000010.json"
    content = path.read_bytes()
    if damage == "other study":
        small(23, store=tmp_path / "other", seed=4)
        content = (tmp_path / "other" / "chunks" / "00000010.json").read_bytes()
    digit = content.rindex(b"5")
    bad = {
        "cut": content[:-100],
        "empty": b"",
        "flip": content[:digit] + b"6" + content[digit + 1 :],
        "other study": content,
        "other chunk": before["chunks/00000000.json"],
        "shape": b"[1, 2]",
    }
    path.write_bytes(bad[damage])
    simulated.take()
    with pytest.warns(UserWarning, match="00000010.json is damaged, or of another study: it is"):
        small(23, store=tmp_path / "store")
    assert simulated.take() == list(range(10, 20))
    assert files(tmp_path / "store") == before


def test_the_truth_is_computed_once(tmp_path, monkeypatch):
    seeds = []

    def counted(scenario, **options):
        seeds.append(options["seed"])
        return qdq.true_effect(scenario, **options)

    monkeypatch.setattr(module, "true_effect", counted)
    options = {"truth": None, "store": tmp_path, "designs": qdq.Bernoulli()}
    first = small(2, **options)
    assert first.truth == small(3, **options).truth == qdq.true_effect(SCENARIO, seed=3)
    assert seeds == [3]
    (tmp_path / "truth.json").write_text("{}")
    with pytest.warns(UserWarning, match="truth.json is damaged"):
        assert small(3, **options).truth == first.truth
    assert seeds == [3, 3]
    assert small(3, **options | {"truth": 0.5}).truth == 0.5


CHANGES = {
    "scenario.arrivals.rate is 0.6 there and 0.5 here": {
        "scenario": SCENARIO.replace(arrivals=qdq.Poisson(0.5))
    },
    'scenario.service.type is "Exponential" there and "Pareto" here': {
        "scenario": SCENARIO.replace(service=qdq.Pareto(3.0))
    },
    "n_tasks is 1000 there and 1001 here": {"n_tasks": 1001},
    "seed is 3 there and 4 here": {"seed": 4},
    "designs[1].period is 10.0 there and 12.0 here": {
        "designs": (qdq.Bernoulli(0.5), qdq.Switchback(12.0), qdq.ServerSplit(0.5))
    },
    "designs is [{": {"designs": qdq.Bernoulli(0.5)},
    "horizon[0] is 10 there and 11 here": {"horizon": 11},
    "normalise[0] is": {"normalise": "inverse_propensity"},
    "queue[0] is": {"queue": "time_average"},
    'arrival_rate[0] is "estimated" there and 2.5 here': {"arrival_rate": 2.5},
    "washout is 0.0 there and 1.0 here": {"washout": 1.0},
    "variance[0] is": {"variance": "score"},
    "warm_up is": {"warm_up": 1.0},
}


def test_the_store_of_another_study_is_refused(tmp_path, monkeypatch):
    small(2, store=tmp_path)
    before = files(tmp_path)
    for difference, changes in CHANGES.items():
        with pytest.raises(ValueError, match="holds another study: ") as caught:
            small(2, store=tmp_path, **changes)
        assert difference in str(caught.value)
        assert "use another folder, or delete this one" in str(caught.value)
    monkeypatch.setattr(module, "source_hash", lambda: "changed")
    with pytest.raises(
        ValueError, match=r'study: source is "[0-9a-f]{64}" there and "changed" here'
    ):
        small(2, store=tmp_path)
    assert files(tmp_path) == before


def test_store_must_be_a_folder_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file' is a file: it must be a folder"):
        small(2, store=tmp_path / "file")
    with pytest.raises(ValueError, match=r"holds files but no study\.json"):
        small(2, store=tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"has a study\.json that can't be read"):
        small(2, store=tmp_path / "bad")
    assert sorted(files(tmp_path)) == ["bad/study.json", "file"]


# --------------------------------------------------------------------------------------------------
# Bad arguments
# --------------------------------------------------------------------------------------------------

BAD = [
    ({"scenario": 1}, TypeError, "scenario=1 is not a Scenario"),
    ({"n_tasks": 1}, ValueError, "n_tasks=1 is not allowed: n_tasks must be an integer >= 2"),
    ({"n_tasks": 10.5}, ValueError, "n_tasks=10.5"),
    ({"n_replications": 1}, ValueError, "n_replications must be an integer >= 2"),
    ({"n_replications": "5"}, TypeError, "n_replications='5' is not an integer"),
    ({"seed": -1}, ValueError, "seed=-1 is not allowed: seed must be an integer >= 0"),
    ({"seed": (1, 2)}, TypeError, r"seed=\(1, 2\) is not an integer"),
    ({"n_jobs": 0}, ValueError, "n_jobs=0 is not allowed: n_jobs must be a number of threads"),
    ({"n_jobs": 1.5}, ValueError, "n_jobs=1.5"),
    ({"designs": ()}, ValueError, r"designs=\(\) is empty"),
    ({"designs": "Bernoulli"}, TypeError, "designs holds 'Bernoulli': it must hold designs"),
    ({"designs": qdq.AllControl()}, ValueError, r"AllControl\(\), which has one arm only"),
    (
        {"designs": (qdq.Bernoulli(), qdq.Bernoulli(0.5))},
        ValueError,
        r"designs holds Bernoulli\(propensity=0.5\) twice",
    ),
    (
        {"designs": qdq.Switchback(110.0)},
        ValueError,
        r"^Switchback\(period=110.0, propensity=0.5\) has about 3 whole periods in n_tasks=1000",
    ),
    ({"horizon": 0}, ValueError, "horizon=0 .* a number of arrivals >= 1, or one of 'rmse', 'cov"),
    ({"horizon": 1000}, ValueError, "horizon=1000 is not allowed.* below n_tasks=1000"),
    ({"horizon": "best"}, ValueError, "horizon='best' is not allowed"),
    ({"horizon": ("rmse", 10, "rmse")}, ValueError, "horizon holds 'rmse' twice"),
    ({"variance": "plain"}, ValueError, "variance='plain' is not allowed: variance must be one of"),
    ({"variance": ("hac", "hac")}, ValueError, "variance holds 'hac' twice"),
    ({"horizon": (10, 10)}, ValueError, "horizon holds 10 twice"),
    ({"horizon": (72, None)}, ValueError, "horizon holds 72 twice"),
    ({"horizon": []}, ValueError, r"horizon=\[\] is empty"),
    (
        {"horizon": None, "n_tasks": 72, "designs": qdq.Bernoulli()},
        ValueError,
        "horizon=None means 72 for this scenario",
    ),
    ({"normalise": "ipw"}, ValueError, "normalise='ipw' is not allowed: normalise must be one of"),
    ({"normalise": ("group_means",) * 2}, ValueError, "normalise holds 'group_means' twice"),
    ({"queue": ("in_system", 3)}, ValueError, "queue=3 is not allowed: queue must be one of"),
    ({"arrival_rate": "mean"}, ValueError, "arrival_rate='mean' is not allowed"),
    ({"arrival_rate": -1.0}, ValueError, "arrival_rate=-1.0 is not allowed"),
    ({"arrival_rate": (None, "estimated")}, ValueError, "arrival_rate holds 'estimated' twice"),
    ({"arrival_rate": (2, 2.0)}, ValueError, "arrival_rate holds '2.0' twice"),
    ({"washout": -1.0}, ValueError, "washout=-1.0 is not allowed: washout must be a time >= 0"),
    ({"washout": 10.0}, ValueError, "washout must be below the period of Switchback"),
    (
        {"level": 1.0},
        ValueError,
        "level=1.0 is not allowed: level must be strictly between 0 and 1",
    ),
    ({"level": "95 %"}, TypeError, "level='95 %' is not a number"),
    ({"warm_up": -2.0}, ValueError, "warm_up=-2.0 is not allowed: warm_up must be a time >= 0"),
    ({"truth": math.nan}, ValueError, "truth=nan is not allowed"),
    ({"truth": "exact"}, TypeError, "truth='exact' is not a number: truth must be a TrueEffect"),
    ({"progress": "yes"}, TypeError, "progress='yes' is not allowed"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD, ids=lambda part: str(part)[:40])
def test_bad_arguments_are_refused_before_anything_runs(
    changes, kind, message, simulated, tmp_path
):
    with pytest.raises(kind, match=message):
        small(**{"n_replications": 2, "store": tmp_path / "store"} | changes)
    assert simulated.take() == []
    assert not (tmp_path / "store").exists()


def test_truth_of_another_scenario_is_refused():
    other = qdq.true_effect(SCENARIO.replace(treatment=qdq.PowerOfD(1)))
    with pytest.raises(ValueError, match="truth is of another scenario"):
        small(2, truth=other)


def test_functions_cannot_be_stored(tmp_path):
    with pytest.raises(TypeError, match="arrival_rate is a function, which cannot be written"):
        small(2, arrival_rate=lambda time: 2.4, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_rates_of_a_trace_are_refused_at_once(simulated):
    times = np.cumsum(np.random.default_rng(1).exponential(1.0 / 2.4, 1200))
    scenario = SCENARIO.replace(arrivals=qdq.ArrivalTrace(times))
    with pytest.raises(ValueError, match="an ArrivalTrace has no rate in its scenario"):
        small(2, scenario=scenario, designs=qdq.Bernoulli(), arrival_rate="scenario")
    found = small(2, scenario=scenario, designs=qdq.Bernoulli())
    assert found.settings["warm_up"] == 0.0


def test_bytes_have_no_time_in_them(tmp_path):
    small(2, store=tmp_path / "now")
    time.sleep(1.1)
    small(2, store=tmp_path / "later")
    assert files(tmp_path / "now") == files(tmp_path / "later")
    assert pd.read_parquet(io.BytesIO(files(tmp_path / "now")["replications.parquet"])).shape[0] > 0
