"""Plans: the formula against its inverse, and against the pilots that it comes from."""

from __future__ import annotations

import dataclasses
import importlib
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import qdq
from qdq import Plan, plan
from qdq.plan import _default_designs

SCENARIO = qdq.Scenario(
    n_servers=4, arrivals=qdq.Poisson(0.6), control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)
)
PILOT = {"pilot_tasks": 2_000, "n_replications": 10, "seed": 3}


@pytest.fixture(scope="module")
def found():
    return plan(SCENARIO, effect=0.2, horizon=20, **PILOT)


@pytest.fixture(scope="module")
def log():
    return qdq.simulate(SCENARIO, qdq.Bernoulli(0.5), 5_000, seed=1)


def of(found, design, method):
    table = found.table
    (row,) = table[(table["design"] == design) & (table["method"] == method)].to_dict("records")
    return row


# --------------------------------------------------------------------------------------------------
# The formula
# --------------------------------------------------------------------------------------------------


def made(share, unit, effect=0.5, power=0.8, level=0.95):
    columns = {"share_found": share, "unit_error": unit}
    table = pd.DataFrame(columns | {"degrees_of_freedom": [8.0, math.inf, 32.0, 4.5][: len(share)]})
    return Plan(effect=effect, power=power, level=level, pilot_tasks=1000, table=table)


@pytest.mark.parametrize("effect", [0.5, -0.5])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.999])
def test_power_by_the_normal_law(level, effect):
    """The estimate is normal; it is compared with the quantile of its standard error."""
    plan = made([1.0, 0.5, -0.2, math.nan], [30.0, 7.0, 7.0, 20.0], effect, level=level)
    n = np.array([10.0, 1e3, 1e5])
    for row, (share, unit) in enumerate([(1.0, 30.0), (0.5, 7.0), (-0.2, 7.0), (1.0, 20.0)]):
        critical = stats.t.isf(0.5 * (1.0 - level), plan.table["degrees_of_freedom"][row])
        error = unit / np.sqrt(n)
        law = stats.norm(share * effect, error)
        # On the side of the effect: the other side would be a wrong conclusion.
        exact = law.sf(critical * error) if effect > 0.0 else law.cdf(-critical * error)
        assert plan.power_at(n)[row] == pytest.approx(exact, rel=1e-9)
        assert plan.power_at(1e3)[row] == pytest.approx(exact[1], rel=1e-9)
    assert plan.power_at(n).shape == (4, 3)
    assert plan.power_at(1e3).shape == (4,)


@pytest.mark.parametrize("effect", [0.3, -0.3])
@pytest.mark.parametrize("power", [0.3, 0.8, 0.99])
@pytest.mark.parametrize("level", [0.9, 0.99])
def test_the_tasks_needed_give_the_power_asked_for(log, effect, power, level):
    found = plan(log, effect, power, level=level, horizon=20)
    assert (found.effect, found.power, found.level) == (effect, power, level)
    needed = found.table["n_tasks"].to_numpy()
    assert (needed == np.ceil(needed)).all()
    reached = np.array([found.power_at(n)[row] for row, n in enumerate(needed)])
    fewer = np.array([found.power_at(n - 1.0)[row] for row, n in enumerate(needed)])
    assert (reached >= power - 1e-12).all()
    assert (fewer < power).all()


def quantiles(frame):
    return stats.t.ppf(0.975, frame["degrees_of_freedom"]) + stats.norm.ppf(0.8)


def test_tasks_needed_by_hand(log):
    found = plan(log, 0.3, horizon=20)
    methods = [qdq.naive(log)]
    methods += [getattr(qdq, name)(log, horizon=20) for name in ("dq_response", "dq_queue")]
    methods.append(qdq.dq_mixed(log, horizon=20))
    table = found.table
    assert table["method"].tolist() == [estimate.method for estimate in methods]
    for row, estimate in zip(table.to_dict("records"), methods, strict=True):
        variance = estimate.standard_error**2 * 5_000
        freedom = estimate.degrees_of_freedom
        assert row["degrees_of_freedom"] == freedom
        z = stats.t.ppf(0.975, freedom) + stats.norm.ppf(0.8)
        assert row["n_tasks"] == math.ceil(variance * z**2 / 0.09)
        assert row["unit_error"] ** 2 == pytest.approx(variance)
    rate = 4_999 / np.ptp(log.arrival)
    np.testing.assert_allclose(table["time"], table["n_tasks"] / rate)
    assert table[["share_found", "share_found_error"]].isna().all(axis=None)
    assert table["design"].tolist() == ["Bernoulli(propensity=0.5)"] * 4
    assert found.pilot_tasks == 5_000


def test_warnings_point_to_the_caller(log):
    bare = qdq.TaskLog(arrival=log.arrival, departure=log.departure, treated=log.treated)
    with pytest.warns(UserWarning, match="windows side by side") as seen:
        plan(bare, 0.3, horizon=100)
    assert {warning.filename for warning in seen} == {__file__}


def test_half_the_effect_takes_four_times_the_tasks(log):
    one, half, other = (plan(log, e, horizon=20).table["n_tasks"] for e in (0.3, 0.15, -0.3))
    np.testing.assert_allclose(half / one, 4.0, rtol=1e-2)
    assert one.equals(other)


def test_simulated_experiments_of_the_size_planned_see_the_effect():
    """Of 100 experiments of the size that naive needs for its effect, about 80 exclude zero."""
    pilot = plan(SCENARIO, designs=[qdq.Bernoulli(0.5)], horizon=20, **PILOT)
    needed = int(of(pilot, "Bernoulli(propensity=0.5)", "naive")["n_tasks"])
    assert 60 < needed < 2_000
    study = qdq.run_study(SCENARIO, needed, 100, 9, horizon=5, truth=0.0, progress=False)
    drawn = study.replications.query("method == 'naive'")
    seen = ((drawn["low"] > 0.0) | (drawn["high"] < 0.0)).sum()
    # 4.5 standard deviations, and what few tasks add: an experiment that starts in any state.
    assert abs(seen - 80) < 4.5 * math.sqrt(100 * 0.8 * 0.2)


# --------------------------------------------------------------------------------------------------
# Of a scenario
# --------------------------------------------------------------------------------------------------


def test_a_scenarios_rows_are_those_of_its_pilots(found):
    truth = qdq.true_effect(SCENARIO, seed=3)
    designs = _default_designs(SCENARIO, 2_000)
    assert [type(design) for design in designs] == [qdq.Bernoulli, qdq.Switchback, qdq.ServerSplit]
    study = qdq.run_study(
        *(SCENARIO, 2_000, 10, 3), designs=designs, truth=truth, horizon=20, progress=False
    )
    table = study.table
    assert found.table["method"].tolist() == table["method"].tolist()
    assert found.table["design"].tolist() == table["design"].tolist()
    np.testing.assert_allclose(found.table["share_found"], table["mean"] / truth.value)
    np.testing.assert_allclose(
        found.table["share_found_error"],
        np.hypot(table["mean_error"], table["mean"] / truth.value * truth.standard_error)
        / abs(truth.value),
    )
    for row, mine in zip(table.to_dict("records"), found.table.to_dict("records"), strict=True):
        drawn = study.replications
        drawn = drawn[(drawn["design"] == row["design"]) & (drawn["method"] == row["method"])]
        variance = np.mean(drawn["standard_error"] ** 2) * 2_000
        assert mine["unit_error"] ** 2 == pytest.approx(variance)
        assert mine["degrees_of_freedom"] == drawn["degrees_of_freedom"].median()
        needed = variance * quantiles(mine) ** 2 / (0.2 * mine["share_found"]) ** 2
        assert mine["n_tasks"] == np.ceil(needed)
        assert mine["time"] == pytest.approx(mine["n_tasks"] / SCENARIO.total_arrival_rate)
    assert found.pilot_tasks == 2_000


def test_the_effect_defaults_to_the_true_one(found):
    pilot = {"designs": [qdq.Bernoulli(0.5)], "horizon": 20, **PILOT}
    default = plan(SCENARIO, **pilot)
    truth = qdq.true_effect(SCENARIO, seed=3).value
    assert default.effect == truth
    same = plan(SCENARIO, truth, **pilot)
    pd.testing.assert_frame_equal(default.table, same.table)


def test_default_designs_fit_the_pilot():
    _, switchback, _ = _default_designs(SCENARIO, 10**7)
    assert switchback.period == 300.0 * SCENARIO.service.mean
    _, switchback, _ = _default_designs(SCENARIO, 2_000)
    assert switchback.period == pytest.approx(2_000 / SCENARIO.total_arrival_rate / 40.0)
    few = SCENARIO.replace(n_servers=3)  # no group of two servers is left for each arm
    assert [type(d) for d in _default_designs(few, 2_000)] == [qdq.Bernoulli, qdq.Switchback]


def test_unequal_groups_go_by_the_spread_of_the_pilots():
    scenario = SCENARIO.replace(service_rates=(0.8, 1.2, 0.8, 1.2))
    options = {"designs": [qdq.ServerSplit()], **PILOT}
    (row,) = plan(scenario, 0.2, **options).table.to_dict("records")
    study = qdq.run_study(
        *(scenario, 2_000, 10, 3), designs=qdq.ServerSplit(), truth=0.0, progress=False
    )
    assert row["unit_error"] == pytest.approx(study.table["sd"][0] * math.sqrt(2_000))
    assert math.isinf(row["degrees_of_freedom"])


def test_a_method_that_finds_the_opposite_never_sees_the_effect(monkeypatch):
    # With a true effect of the other sign than what every method finds.
    module = importlib.import_module("qdq.plan")
    truth = dataclasses.replace(qdq.true_effect(SCENARIO, seed=3), value=0.9)
    monkeypatch.setattr(module, "true_effect", lambda scenario, **options: truth)
    found = plan(SCENARIO, designs=[qdq.Bernoulli(0.5)], horizon=20, **PILOT)
    assert (found.table["share_found"] < 0.0).all()
    assert np.isinf(found.table["n_tasks"]).all()
    assert (found.power_at(1e6) < 0.025).all()


def test_two_policies_that_are_one():
    same = SCENARIO.replace(treatment=qdq.PowerOfD(1))
    options = {"designs": [qdq.Bernoulli(0.5)], "horizon": 20, **PILOT}
    with pytest.raises(ValueError, match="effect=None means 0 for this scenario"):
        plan(same, **options)
    found = plan(same, 0.2, **options)
    assert found.table["share_found"].isna().all()
    assert np.isfinite(found.table["n_tasks"]).all()
    # The share is not known and taken as 1.
    needed = np.ceil((quantiles(found.table) * found.table["unit_error"] / 0.2) ** 2)
    assert found.table["n_tasks"].tolist() == needed.tolist()


def test_neither_threads_nor_time_matter():
    options = {"designs": [qdq.Bernoulli(0.5)], "horizon": 20, **PILOT}
    one, two = (plan(SCENARIO, 0.2, n_jobs=n_jobs, **options) for n_jobs in (1, 2))
    pd.testing.assert_frame_equal(one.table, two.table)


# --------------------------------------------------------------------------------------------------
# Printing and refusals
# --------------------------------------------------------------------------------------------------


def test_printing(found, log):
    headline, heads, *rows = repr(found).splitlines()
    assert headline == "Tasks needed to see an effect of 0.2 with power 0.8, by 95 % intervals"
    assert heads.split() == ["design", "method", "share", "found", "tasks", "time"]
    assert len(rows) == len(found.table)
    page = found._repr_html_()
    assert "an effect of 0.2 with power 0.8" in page
    assert page.count("<tr") == 1 + len(rows)
    row = of(found, "Bernoulli(propensity=0.5)", "naive")
    (line,) = [line for line in rows if "naive" in line]
    assert f"{row['share_found']:.2f} ({row['share_found_error']:.2f})" in line
    assert "share found" not in repr(plan(log, 0.3, horizon=20))
    nothing = made([0.5], [7.0])
    nothing.table["design"], nothing.table["method"] = "a", "b"
    nothing.table["share_found_error"] = 0.1
    nothing.table["n_tasks"], nothing.table["time"] = math.inf, 1234.0
    assert repr(nothing).split()[-2:] == ["-", "1,200"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"what": 5}, TypeError, "what=5 is neither a Scenario nor a TaskLog"),
        ({"effect": 0.0}, ValueError, "effect=0.0 is not allowed: effect must be a difference"),
        ({"effect": "big"}, TypeError, "effect='big' is not a number"),
        ({"effect": math.nan}, ValueError, "effect=nan is not allowed"),
        ({"power": 1.0}, ValueError, "power=1.0 .* strictly between 1 - level = 0.05 and 1"),
        ({"power": 0.05}, ValueError, "power=0.05 is not allowed"),
        ({"level": 1.0}, ValueError, "level=1.0 is not allowed"),
        ({"pilot_tasks": 999}, ValueError, "pilot_tasks=999 .* an integer >= 1000"),
        ({"n_replications": 9}, ValueError, "n_replications=9 .* an integer >= 10"),
        ({"seed": -1}, ValueError, "seed=-1 is not allowed"),
        ({"horizon": 0}, ValueError, "horizon=0 is not allowed"),
        ({"queue": "all"}, ValueError, "queue='all' is not allowed"),
        ({"designs": [qdq.AllControl()]}, ValueError, r"AllControl\(\), which has one arm only"),
        ({"designs": []}, ValueError, r"designs=\[\] is empty"),
    ],
)
def test_refusals(options, kind, message):
    with pytest.raises(kind, match=message):
        plan(**{"what": SCENARIO, "effect": 0.2, **PILOT} | options)


def test_a_log_needs_an_effect(log):
    with pytest.raises(ValueError, match="effect=None needs a scenario: give the effect"):
        plan(log)
    with pytest.raises(ValueError, match="horizon=5000 is not allowed"):
        plan(log, 0.3, horizon=5_000)
