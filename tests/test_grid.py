"""The grid of scenarios: comparisons of methods and their errors, and what a grid consists of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from scipy import stats

import qdq
from qdq import grid as module
from qdq.exact import small_chain
from qdq.grid import COMPARISONS, VARIANT, bias_cut, compare, rmse_ratio, run_grid, sd_ratio
from qdq.grid import share_found as share

# --------------------------------------------------------------------------------------------------
# Comparisons of methods
# --------------------------------------------------------------------------------------------------

X, Y = np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 7.0])


def test_comparisons_by_hand():
    # Means 2 and 3, sums of squares about them 2 and 26; paired differences 1, 0, -4.
    value, error = share(X, -4.0, 0.0)
    assert (value, error) == (-0.5, pytest.approx(1.0 / math.sqrt(3.0) / 4.0))
    assert share(X, -4.0, 0.2)[1] == pytest.approx(math.hypot(1.0 / math.sqrt(3.0), 0.1) / 4.0)

    # Below a truth of 4: biases -2 and -1.
    value, error = bias_cut(X, Y, 4.0, 0.0)
    assert value == -0.25
    assert error == pytest.approx(math.sqrt(7.0) / math.sqrt(3.0) / 4.0)
    # About a truth of 2 it is 1, less 0: whether the sum of the biases is above 0 is less certain
    # than whether their difference is, and than the paired differences say.
    value, error = bias_cut(X, Y, 2.0, 0.0)
    assert value == 0.5
    assert error == pytest.approx(0.5 * np.std(X + Y, ddof=1) / math.sqrt(3.0))
    assert error > np.std(Y - X, ddof=1) / math.sqrt(3.0) / 2.0
    assert bias_cut(X, Y, 2.0, 0.3)[1] == pytest.approx(0.5 * math.hypot(math.sqrt(7.0), 0.6))
    # On both sides of a truth of 2.5: biases -0.5 and 0.5.
    value, error = bias_cut(X, Y, 2.5, 0.0)
    assert value == 0.0
    assert error == pytest.approx(np.std(X + Y, ddof=1) / math.sqrt(3.0) / 2.5)
    assert bias_cut(X, Y, 2.5, 0.3)[1] == pytest.approx(math.hypot(error, 2.0 * 0.3 / 2.5))

    assert sd_ratio(X, Y)[0] == pytest.approx(math.sqrt(2.0 / 26.0))
    # Mean squared errors about 2: 2/3 and 29/3.
    assert rmse_ratio(X, Y, 2.0, 0.0)[0] == pytest.approx(math.sqrt(2.0 / 29.0))


def test_no_spread_and_no_error():
    same = np.array([2.0, 2.0, 2.0])
    assert sd_ratio(same, Y) == (0.0, 0.0)
    assert all(map(math.isnan, sd_ratio(Y, same)))
    assert rmse_ratio(same, Y, 2.0, 0.0) == (0.0, 0.0)
    assert sd_ratio(Y, Y) == rmse_ratio(Y, Y, 1.0, 0.1) == (1.0, 0.0)
    assert bias_cut(Y, Y, 1.0, 0.0) == (0.0, 0.0)


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((3, n))


def skewed(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.gamma(4.0, 0.5, (3, n)) - 2.0


def estimates(law: Callable[..., np.ndarray], rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Two methods that share noise, of means 0.9 and 0.4."""
    common, one, other = law(rng, n)
    return [0.9 + 0.3 * common + 0.2 * one, 0.4 + 0.25 * common + 0.1 * other]


CALLS = {
    "share_found": lambda x, y, truth, error: share(x, truth, error),
    "bias_cut": bias_cut,
    "sd_ratio": lambda x, y, truth, error: sd_ratio(x, y),
    "rmse_ratio": rmse_ratio,
}


@pytest.mark.parametrize("law", [normal, skewed])
@pytest.mark.parametrize(
    ("truth", "truth_error"),
    # Both biases of one sign, of two in the last; nearer to them in the second and third, so that
    # the sum of the biases is less certain than their difference.
    [(2.5, 0.0), (2.5, 0.06), (1.2, 0.0), (1.2, 0.06), (0.65, 0.06)],
)
def test_errors_are_the_spread_over_replications(truth, truth_error, law):
    rng = np.random.default_rng(8)
    found = []
    for _ in range(800):
        about = truth + truth_error * rng.standard_normal()
        sample = estimates(law, rng, 120)
        found.append([call(*sample, about, truth_error) for call in CALLS.values()])
    values, errors = np.moveaxis(found, 2, 0)
    ratio = np.sqrt(np.mean(errors**2, axis=0)) / np.std(values, axis=0, ddof=1)
    # The spread of 800 values is known to 2.5 % (3.5 % if skewed): the tolerance is 3.5 of that.
    exact = np.array([truth != 1.2 or name != "bias_cut" for name in CALLS])
    np.testing.assert_allclose(ratio[exact], 1.0, atol=0.12, err_msg=", ".join(CALLS))
    assert (ratio >= 1.0 - 0.12).all()
    assert (ratio[~exact] > 1.12).all()  # then it says how certain the sign is, and not the spread


def test_the_sign_of_a_bias_cut_is_as_certain_as_its_error_says():
    """Both biases are near zero: no method is better, and one error rarely tells one."""
    rng = np.random.default_rng(13)
    far = 0
    for _ in range(2000):
        x, y = 1.0 + rng.standard_normal((2, 40))
        value, error = bias_cut(x, y, 1.0, 0.0)
        far += abs(value) > 1.96 * error
    # At most 5 % and 4.5 standard deviations of a binomial number.
    assert far <= 100 + 4.5 * math.sqrt(95)


@pytest.mark.parametrize("law", [normal, skewed])
@pytest.mark.parametrize("truth", [2.5, 0.65])
@pytest.mark.parametrize("name", CALLS)
def test_errors_are_the_jackknifes(name, truth, law):
    x, y = estimates(law, np.random.default_rng(9), 400)
    _, error = CALLS[name](x, y, truth, 0.0)
    left_out = [CALLS[name](np.delete(x, j), np.delete(y, j), truth, 0.0)[0] for j in range(x.size)]
    jackknife = math.sqrt((x.size - 1) * np.var(left_out))
    # Means have the same error by both; of the others the difference is of the order 1/n.
    exact = name in ("share_found", "bias_cut")
    assert error == pytest.approx(jackknife, rel=1e-9 if exact else 0.02)


@pytest.mark.parametrize("truth", [1.2, 0.65])
@pytest.mark.parametrize("name", CALLS)
def test_signs_do_not_matter(name, truth):
    # Effects are mostly negative.
    x, y = estimates(skewed, np.random.default_rng(12), 50)
    assert CALLS[name](-x, -y, -truth, 0.3) == CALLS[name](x, y, truth, 0.3)


def test_pairs_matter():
    x, y = estimates(normal, np.random.default_rng(10), 400)
    for function in (bias_cut, rmse_ratio):
        paired, apart = (
            function(x, z, 1.2, 0.0)[1] for z in (y, np.random.default_rng(1).permutation(y))
        )
        assert paired < 0.9 * apart


def test_compare_leaves_out_what_is_missing():
    rng = np.random.default_rng(11)
    x, y = estimates(skewed, rng, 50)
    z = rng.standard_normal(50)
    x[[3, 7]] = math.nan
    y[[7, 9, 20]] = math.nan
    wanted = [
        ("bias_cut", "dq_mixed", "naive"),
        ("sd_ratio", "naive", "dq_mixed"),
        ("rmse_ratio", "dq_mixed", "switchback"),
        ("rmse_ratio", "dq_mixed", "server_split"),
    ]
    rows = compare({"dq_mixed": x, "naive": y, "switchback": z}, 1.2, 0.1, wanted)
    # The split is not there.
    assert [tuple(row.values())[:3] for row in rows] == [
        *(("share_found", method, "") for method in ("dq_mixed", "naive", "switchback")),
        *wanted[:3],
    ]
    of_x, of_y = np.delete(x, [3, 7]), np.delete(y, [7, 9, 20])
    both = np.delete(np.arange(50), [3, 7, 9, 20])
    expected = [
        *(share(part, 1.2, 0.1) for part in (of_x, of_y, z)),
        bias_cut(x[both], y[both], 1.2, 0.1),
        sd_ratio(y[both], x[both]),
        rmse_ratio(of_x, np.delete(z, [3, 7]), 1.2, 0.1),
    ]
    assert [(row["value"], row["error"]) for row in rows] == expected
    assert np.isfinite(expected).all()


def test_default_comparisons():
    assert len(set(COMPARISONS)) == len(COMPARISONS)
    methods = ("dq_response", "dq_queue", "dq_mixed")
    for method in methods:
        assert ("bias_cut", method, "naive") in COMPARISONS
        assert ("sd_ratio", method, "naive") in COMPARISONS
    against = {row[2] for row in COMPARISONS if row[:2] == ("rmse_ratio", "dq_mixed")}
    assert against == {"naive", "server_split", "switchback", "dq_queue", "dq_response"}


# --------------------------------------------------------------------------------------------------
# A grid
# --------------------------------------------------------------------------------------------------

SYSTEM = qdq.Scenario(
    n_servers=2,
    arrivals=qdq.Poisson(0.6),
    control=qdq.PowerOfD(1),
    treatment=qdq.JoinShortestQueue(),
)
CELLS = {
    (0.4, "equal"): SYSTEM.replace(arrivals=qdq.Poisson(0.4)),
    (0.6, "unequal"): SYSTEM.replace(service_rates=(0.9, 1.1)),
}
OPTIONS = {
    "normalise": ("group_means", "inverse_propensity"),
    "queue": ("in_system", "time_average"),
    "arrival_rate": ("estimated", "window"),
    "horizon": (10, 40),
}
SIZES = {"n_tasks": 1_500, "switchback_period": 40.0, "seed": 5, "propensity": 0.4}
SIZES |= {"n_mirrored": 0}
COORDINATES = ("load", "rates")


def small_grid(**changes: object) -> module.Grid:
    arguments = SIZES | {"n_replications": 24, "max_replications": 24, "progress": False} | OPTIONS
    return run_grid(CELLS, COORDINATES, **(arguments | changes))


@pytest.fixture(scope="module")
def grid() -> module.Grid:
    return small_grid()


DESIGNS = [(qdq.Bernoulli(0.4),), (qdq.Switchback(40.0), qdq.ServerSplit())]


@pytest.fixture(scope="module")
def studies() -> dict[tuple[float, str], list[qdq.Study]]:
    """The same experiments by `run_study`."""
    return {
        cell: [
            qdq.run_study(
                *(scenario, SIZES["n_tasks"], 24, 5),
                designs=designs,
                truth=qdq.true_effect(scenario, seed=5),
                progress=False,
                **OPTIONS,
            )
            for designs in DESIGNS
        ]
        for cell, scenario in CELLS.items()
    }


def of_cell(frame: pd.DataFrame, cell: tuple[float, str]) -> pd.DataFrame:
    inside = (frame["load"] == cell[0]) & (frame["rates"] == cell[1])
    return frame[inside].drop(columns=list(COORDINATES)).reset_index(drop=True)


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Assert that all values are the same, whatever the types of columns say of missing ones."""
    assert list(found.columns) == list(expected.columns)
    plain = [frame.astype(object).where(frame.notna(), None) for frame in (found, expected)]
    assert plain[0].to_numpy().tolist() == plain[1].to_numpy().tolist()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_results_are_those_of_studies(cell, grid, studies):
    expected = pd.concat([study.table for study in studies[cell]], ignore_index=True)
    found = of_cell(grid.results, cell)
    assert_same(found[list(expected.columns)], expected)
    # naive; for each horizon and normalisation wDQ, and qDQ and mixed with two rates and in time;
    # switchback and split.
    assert len(found) == 1 + 4 * (1 + 2 * 3) + 2
    truth = grid.truths[cell]
    assert truth.method == "exact"
    assert (found["gte"] == truth.value).all()
    assert (found["control"] == truth.mean_response_control).all()
    assert (found["gte_error"] == 0.0).all()
    assert (found["n_tasks"] == SIZES["n_tasks"]).all()
    np.testing.assert_allclose(found["relative_bias"] * abs(truth.value), found["bias"])
    np.testing.assert_allclose(found["relative_rmse_error"] * abs(truth.value), found["rmse_error"])

    drawn = pd.concat([study.replications for study in studies[cell]], ignore_index=True)
    assert_same(of_cell(grid.replications, cell), drawn)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_quantities_compare_what_was_drawn(cell, grid, studies):
    frame = of_cell(grid.quantities, cell)
    values = {}
    for study in studies[cell]:
        for labels, part in study.replications.groupby(["method", *VARIANT], dropna=False):
            key = tuple(None if pd.isna(label) else label for label in labels)
            values[key] = part.sort_values("replication")["value"].to_numpy()

    def drawn(method: str, row: pd.Series) -> np.ndarray:
        """The estimates of a method in the variant of a row, as far as it has one."""
        variant = [None if pd.isna(row[name]) else row[name] for name in VARIANT]
        if not method.startswith("dq_"):
            variant = [None] * 4
        elif method == "dq_response":
            variant[2:] = None, None
        return values[method, *variant]

    truth = grid.truths[cell].value
    compared = frame[frame["horizon"].notna()]
    for _, row in compared.iterrows():
        x = drawn(row["method"], row)
        y = drawn(row["against"], row) if row["against"] else x
        expected = {
            "share_found": x.mean() / truth,
            "bias_cut": (abs(y.mean() - truth) - abs(x.mean() - truth)) / abs(truth),
            "sd_ratio": x.std() / y.std(),
            "rmse_ratio": math.sqrt(np.mean((x - truth) ** 2) / np.mean((y - truth) ** 2)),
        }
        assert row["value"] == pytest.approx(expected[row["quantity"]], rel=1e-9)
        assert row["error"] > 0.0
    # Each variant has all comparisons, and the share of each of six methods.
    variants = list(compared[list(VARIANT)].itertuples(index=False, name=None))
    readings = [("in_system", "estimated"), ("in_system", "window"), ("time_average", None)]
    expected = [
        (horizon, normalise, *reading)
        for horizon, normalise, reading in itertools.product(
            (10, 40), OPTIONS["normalise"], readings
        )
    ]
    variants = [tuple(None if pd.isna(part) else part for part in row) for row in variants]
    assert list(dict.fromkeys(variants)) == expected
    assert all(variants.count(row) == 6 + len(COMPARISONS) for row in expected)
    assert len(frame) == len(compared) + 6


def test_rows_that_no_variant_has(grid):
    rows = grid.quantities[grid.quantities["horizon"].isna()]
    named = ["direct", "slope", "gte_w", "gte_q", "gap", "gte"]
    for cell in CELLS:
        mine = of_cell(rows, cell)
        assert mine["quantity"].tolist() == named
        naive = of_cell(grid.results, cell).query("method == 'naive'").iloc[0]
        direct = mine.set_index("quantity").loc["direct"]
        assert (direct["value"], direct["error"]) == (naive["mean"], naive["mean_error"])
        gte = mine.set_index("quantity").loc["gte"]
        assert (gte["value"], gte["error"]) == (grid.truths[cell].value, 0.0)
    assert rows[list(VARIANT)].isna().all(axis=None)


# Of twenty replications: by Student's law with 19 degrees of freedom, 1e-6 each.
FAR = float(stats.t.isf(5e-7, 19))
TWENTY = {"n_replications": 160, "max_replications": 160, "progress": False}


def test_estimands_agree_with_the_chain():
    found = run_grid(CELLS, COORDINATES, **(SIZES | TWENTY | {"n_tasks": 4_000, "horizon": 1}))
    for cell, scenario in CELLS.items():
        rows = of_cell(found.quantities, cell).set_index("quantity")
        chain = small_chain(scenario, 0.4)
        slope = (chain.mean_response(0.5) - chain.mean_response(0.3)) / 0.2
        effect = chain.global_effect
        expected = {"slope": slope, "gte_w": effect, "gte_q": effect, "gap": 0.0, "gte": effect}
        for name, exact in expected.items():
            row = rows.loc[name]
            assert abs(row["value"] - exact) <= FAR * row["error"] + 1e-8, name
        direct = rows.loc["direct"]
        assert abs(direct["value"] - chain.direct_effect()) < 5.0 * direct["error"]
        # Small enough to tell them from one another, or from nothing.
        for name in ("slope", "gte_w", "gte_q"):
            assert FAR * rows.loc[name, "error"] < 0.35 * abs(effect)
        assert 5.0 * direct["error"] < abs(direct["value"] - effect)
        assert FAR * rows.loc["gap", "error"] < 0.15


def test_the_gap_under_a_periodic_rate():
    scenario = SYSTEM.replace(arrivals=qdq.Periodic(0.6, 0.9, 200.0))
    truths = {(1,): qdq.true_effect(scenario, relative_error=0.2)}
    options = SIZES | TWENTY | {"n_tasks": 4_800, "horizon": 1, "truths": truths}
    found = run_grid({(1,): scenario}, ["cell"], **options)
    rows = found.quantities.drop_duplicates("quantity").set_index("quantity")
    assert abs(rows.loc["gap", "value"]) < FAR * rows.loc["gap", "error"] < 0.1
    assert set(found.results["arrival_rate"].dropna()) == {"scenario"}
    # Divided by the mean rate, in place of that at each arrival, the reading is far off.
    effects = []
    for j in range(20):
        control, treatment = (
            qdq.simulate(scenario, design, 4_800, (5, 2, j), record=["in_system"])
            for design in (qdq.AllControl(), qdq.AllTreatment())
        )
        effects.append((treatment.in_system.mean() - control.in_system.mean()) / 1.2)
    assert np.mean(effects) / rows.loc["gte_w", "value"] > 1.2


def test_neither_threads_nor_known_truths_matter(grid):
    other = small_grid(n_jobs=1, truths=grid.truths)
    for name in ("results", "quantities", "replications"):
        assert_frame_equal(getattr(other, name), getattr(grid, name))


def test_cells_do_not_depend_on_each_other(grid):
    cell = (0.6, "unequal")
    arguments = SIZES | {"n_replications": 24, "max_replications": 24} | OPTIONS
    alone = run_grid(
        {cell: CELLS[cell]}, COORDINATES, truths=grid.truths, progress=False, **arguments
    )
    for name in ("results", "quantities", "replications"):
        assert_same(of_cell(getattr(alone, name), cell), of_cell(getattr(grid, name), cell))


def test_main_is_one_row_a_cell_and_method(grid):
    methods = ["naive", "dq_response", "dq_queue", "dq_mixed", "switchback", "server_split"]
    main = grid.main()
    assert main["method"].tolist() == methods * 2
    dq = main[main["method"].str.startswith("dq_")]
    assert (dq["normalise"] == "group_means").all()
    assert (dq["horizon"] == 10).all()
    assert dq["queue"].dropna().tolist() == ["in_system"] * 4
    assert dq["arrival_rate"].dropna().tolist() == ["estimated"] * 4
    other = grid.main(normalise="inverse_propensity", queue="time_average", horizon=40)
    assert other["method"].tolist() == methods * 2
    dq = other[other["method"].str.startswith("dq_")]
    assert (dq["normalise"] == "inverse_propensity").all()
    assert (dq["horizon"] == 40).all()
    assert dq["queue"].dropna().tolist() == ["time_average"] * 4
    assert dq["arrival_rate"].isna().all()
    assert other.query("method == 'naive'")["mean"].equals(main.query("method == 'naive'")["mean"])


# --------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------


def test_replications_go_on_until_precise(monkeypatch):
    monkeypatch.setattr(module, "_SD_PRECISION", 0.1)
    monkeypatch.setattr(module, "_BIAS_PRECISION", 0.15)
    truth = qdq.true_effect(SYSTEM)
    arguments = {"designs": [qdq.Bernoulli(0.5)], "truth": truth, "horizon": 40}
    counts = {"n_replications": 8, "max_replications": 2_000}
    study = module.precise_study(SYSTEM, 1_000, 6, **arguments, **counts)
    assert 50 < study.n_replications < 2_000
    assert (study.table["sd_error"] <= 0.1 * study.table["sd"]).all()
    assert (study.table["mean_error"] <= 0.15 * abs(truth.value)).all()
    plain = qdq.run_study(SYSTEM, 1_000, study.n_replications, 6, **arguments)
    assert_frame_equal(study.table, plain.table)
    # With half as many it is not.
    fewer = qdq.run_study(SYSTEM, 1_000, study.n_replications // 2, 6, **arguments).table
    assert (fewer["sd_error"] > 0.1 * fewer["sd"]).any() or (
        fewer["mean_error"] > 0.15 * abs(truth.value)
    ).any()


@pytest.mark.parametrize(
    ("precisions", "most"), [((1e-9, 1e9), 20), ((1e9, 1e-9), 20), ((1e9, 1e9), 8)]
)
def test_both_precisions_count_and_the_budget_holds(precisions, most, monkeypatch):
    monkeypatch.setattr(module, "_SD_PRECISION", precisions[0])
    monkeypatch.setattr(module, "_BIAS_PRECISION", precisions[1])
    options = {"designs": [qdq.Bernoulli(0.5)], "truth": qdq.true_effect(SYSTEM), "horizon": 20}
    counts = {"n_replications": 8, "max_replications": 20}
    assert module.precise_study(SYSTEM, 500, 6, **options, **counts).n_replications == most


def test_the_bias_of_inverse_propensity_need_not_be_precise(monkeypatch):
    monkeypatch.setattr(module, "_SD_PRECISION", 1e9)
    monkeypatch.setattr(module, "_BIAS_PRECISION", 1e9)
    counts = {"n_replications": 8, "max_replications": 30}
    options = {"designs": [qdq.Bernoulli(0.5)], "truth": qdq.true_effect(SYSTEM), "horizon": 20}
    options |= {"normalise": ["group_means", "inverse_propensity"]}
    study = module.precise_study(SYSTEM, 500, 6, **options, **counts)
    inverse = study.table["normalise"].eq("inverse_propensity").fillna(False).astype(bool)
    errors = study.table["mean_error"] / abs(study.truth.value)
    means, others = errors[~inverse].max(), errors[inverse].max()
    assert others > 1.5 * means
    for precision, enough in ((1.01 * means, True), (0.99 * means, False)):
        monkeypatch.setattr(module, "_BIAS_PRECISION", precision)
        again = module.precise_study(SYSTEM, 500, 6, **options, **counts)
        assert (again.n_replications == 8) == enough


def test_what_is_said_of_precision(grid):
    text = grid.precision()
    assert "replicated 24 times" in text
    main = grid.main()
    size = np.maximum(main["gte"].abs(), 0.01 * main["control"])
    precise = int((main["sd_error"] < 0.04 * main["sd"]).sum())
    known = main["bias_error"] < 0.1 * size
    assert f"in {precise} of 12 rows" in text
    assert f"in {int(known.sum())}." in text
    assert 0 < known.sum() < 12
    cells = main[~known].drop_duplicates("load")
    assert f"in {len(cells)} of 2 cells" in text


def test_mirrored_pairs_give_the_bias_where_they_are_more_precise():
    cell, scenario = next(iter(CELLS.items()))
    found = run_grid(
        {cell: scenario},
        COORDINATES,
        **(SIZES | {"n_mirrored": 12}),
        n_replications=24,
        max_replications=24,
        horizon=40,
        progress=False,
    )
    options = {"truth": 0.0, "horizon": 40, "progress": False}
    study = qdq.run_study(scenario, 1_500, 12, 5, designs=qdq.Bernoulli(0.4), **options)
    swapped = scenario.replace(control=scenario.treatment, treatment=scenario.control)
    mirror = qdq.run_study(swapped, 1_500, 12, 5, designs=qdq.Bernoulli(0.6), **options)
    truth = found.truths[cell].value
    results = found.results.set_index("method")
    shares = found.quantities[found.quantities["quantity"] == "share_found"].set_index("method")
    used = 0
    for method in ("naive", "dq_response", "dq_queue", "dq_mixed"):
        frames = (study.replications, mirror.replications)
        here, there = (x.loc[x["method"] == method, "value"].to_numpy() for x in frames)
        half = 0.5 * (here - there)
        error = half.std(ddof=1) / math.sqrt(12)
        row = results.loc[method]
        plain = row["mean"] - truth
        if row["n_mirrored"]:
            used += 1
            assert row["n_mirrored"] == 12
            assert row["bias"] == pytest.approx(half.mean() - truth, rel=1e-12)
            assert row["bias_error"] == pytest.approx(error, rel=1e-12)
            assert error < row["mean_error"]
            assert shares.at[method, "value"] == pytest.approx(half.mean() / truth, rel=1e-12)
        else:
            assert row["bias"] == pytest.approx(plain, rel=1e-12)
            assert error >= row["mean_error"]
        # The same mean, at 4 standard errors.
        assert abs(row["bias"] - plain) < 4.0 * math.hypot(error, row["mean_error"])
    assert used >= 2
    assert (results.loc[["switchback", "server_split"], "n_mirrored"] == 0).all()
    with pytest.raises(
        ValueError, match="n_mirrored must be 0, or an integer from 2 to n_replications=4"
    ):
        run_grid(
            CELLS, COORDINATES, **(SIZES | {"n_mirrored": 1}), n_replications=4, max_replications=4
        )
