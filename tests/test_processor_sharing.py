"""Servers that share: against the definition, the reference simulator, queueing theory and FCFS."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

import qdq
from qdq.exact import pollaczek_khinchine, processor_sharing_response, small_chain
from qdq.simulate import RECORDABLE, tie_uniforms
from reference_sim import Draws, simulate_reference

Z = 4.5
SHARING = {"discipline": "processor_sharing"}
COLUMNS = (
    *("arrival", "departure", "treated", "server", "service_time", "in_system", "candidates"),
    *("choice_control", "choice_treatment", "queue_lengths", "period", "carried_over"),
)


def sharing(**fields: object) -> qdq.Scenario:
    return qdq.Scenario(**(SHARING | fields))


def same_columns(one: qdq.TaskLog, two: qdq.TaskLog, names: Sequence[str] = COLUMNS) -> None:
    for name in names:
        left, right = getattr(one, name), getattr(two, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right, err_msg=name)


def batch_error(values: np.ndarray, n_batches: int = 24) -> float:
    size = len(values) // n_batches
    means = values[: n_batches * size].reshape(n_batches, size).mean(axis=1)
    return float(np.std(means, ddof=1) / math.sqrt(n_batches))


# --- the definition -------------------------------------------------------------------------------


def service_had(log: qdq.TaskLog, delay: float = 0.0) -> np.ndarray:
    """Integral of dt / q over each task's stay, q the tasks at its server: its service time.

    Right for tasks that leave before the last arrival, who comes after not being logged.
    """
    had = np.empty(log.n_tasks)
    carried = log.carried_over
    for server in range(log.n_servers):
        mine = np.flatnonzero(log.server == server)
        others = carried[carried[:, 0] == server]
        joins = np.concatenate((log.arrival[mine] + delay, others[:, 1]))
        leaves = np.concatenate((log.departure[mine], others[:, 2]))
        times = np.concatenate((joins, leaves))
        steps = np.repeat([1, -1], joins.size)
        order = np.argsort(times, kind="stable")
        times, present = times[order], np.cumsum(steps[order])
        pace = np.divide(1.0, present[:-1], out=np.zeros(times.size - 1), where=present[:-1] > 0)
        progress = np.concatenate(([0.0], np.cumsum(np.diff(times) * pace)))
        at = np.interp(np.concatenate((joins, leaves)), times, progress)
        had[mine] = (at[joins.size :] - at[: joins.size])[: mine.size]
    return had


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_servers=st.integers(1, 6),
    lam=st.floats(0.1, 0.95),
    delay=st.sampled_from([0.0, 0.7]),
    warm_up=st.sampled_from([0.0, 30.0]),
)
def test_every_task_gets_its_share_until_it_has_its_service(seed, n_servers, lam, delay, warm_up):
    scenario = sharing(
        n_servers=n_servers,
        arrivals=qdq.Poisson(lam),
        service=qdq.LogNormal(1.5),
        dispatch_delay=delay,
        control=qdq.PowerOfD(1),
        treatment=qdq.JoinShortestQueue(),
    )
    log = qdq.simulate(
        scenario, qdq.Bernoulli(0.5), 300, seed, warm_up=warm_up, record=["service_time"]
    )
    whole = log.departure < log.arrival[-1]
    # Of the warm-up only those who stay are known: a server's first moments may lack somebody who
    # was there before time 0, but he had left by then.
    np.testing.assert_allclose(
        service_had(log, delay)[whole], log.service_time[whole], rtol=1e-9, atol=1e-9
    )
    assert np.all(log.departure >= log.arrival + delay + log.service_time * (1 - 1e-12) - 1e-9)


@pytest.mark.parametrize("n", [1, 7, 5000])
def test_a_burst_at_one_server_is_served_in_order_of_requirement(n):
    # With n - k + 1 left, the k-th shortest of n ends that many times its lead over the one before
    # later. Far more tasks than there is room for at first.
    rng = np.random.default_rng(n)
    requirement = rng.exponential(1.0, n)
    log = qdq.TaskLog(
        arrival=np.zeros(n) + np.arange(n) * 1e-300,
        departure=np.ones(n),
        treated=np.zeros(n, bool),
        server=np.zeros(n, int),
        service_time=requirement,
    )
    if n == 1:
        log = qdq.TaskLog(
            arrival=[0.0], departure=[1.0], treated=[False], server=[0], service_time=requirement
        )
    scenario = sharing(n_servers=1, control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(1))
    again = qdq.replay(scenario, log, treated=False)
    ordered = np.sort(requirement)
    expected = np.cumsum(np.diff(ordered, prepend=0.0) * np.arange(n, 0, -1))
    np.testing.assert_allclose(again.departure[np.argsort(requirement)], expected, rtol=1e-10)


# --- the reference simulator ----------------------------------------------------------------------


@njit
def cheapest_or_random(queue_lengths, work, rates, candidates, u):
    if u < 0.25:
        return candidates[int(4 * u * len(candidates))]
    best = candidates[0]
    for server in candidates:
        if work[server] + (queue_lengths[server] + 1) / rates[server] < (
            work[best] + (queue_lengths[best] + 1) / rates[best]
        ):
            best = server
    return best


with pytest.warns(UserWarning, match="stability of a UserPolicy"):
    USER = qdq.UserPolicy(cheapest_or_random)

BUILT_IN = [
    qdq.PowerOfD(1),
    qdq.PowerOfD(3),
    qdq.ShortestExpectedDelay(2),
    qdq.JoinShortestQueue(),
    qdq.LeastWorkLeft(),
    qdq.JoinIdleQueue(),
    qdq.RoundRobin(),
]
# (information_delay, dispatch_delay, counts_own_dispatches)
DELAYS = [
    (0.0, 0.0, False),
    (0.7, 0.0, False),
    (0.0, 0.6, True),
    (0.5, 0.4, False),
    (0.5, 0.4, True),
]
RATES_OF_5 = [1.0, (0.7, 1.3, 1.0, 0.9, 1.1), (0.5, 0.5, 1.0, 1.0, 2.0)]
LAWS = [
    qdq.Exponential(),
    qdq.Deterministic(),
    qdq.Pareto(1.5),
    qdq.LogNormal(2.0),
    qdq.ServiceTrace(np.random.default_rng(6).gamma(0.5, 2.0, 500)),
]


def groups_of(log: qdq.TaskLog) -> tuple[Sequence[int], Sequence[int]] | None:
    if not isinstance(log.design, qdq.ServerSplit):
        return None
    control, treatment = (sorted(set(log.server[log.treated == z].tolist())) for z in (False, True))
    assert sorted(control + treatment) == list(range(log.n_servers))
    return control, treatment


def assert_same_path(
    log: qdq.TaskLog, u: np.ndarray, present: Sequence[tuple] = (), whole_log: bool = False
) -> None:
    scenario, groups = log.scenario, groups_of(log)
    drawn = log.candidates if log.candidates is not None else np.empty((log.n_tasks, 0), int)
    requirement = log.service_time * scenario.rates[log.server]
    draws = Draws(log.arrival, requirement, log.treated, drawn, u)
    path = simulate_reference(scenario, draws, groups, present)
    np.testing.assert_array_equal(log.queue_lengths, path.queue_lengths)
    np.testing.assert_array_equal(log.server, path.server)
    if groups is None:
        np.testing.assert_array_equal(log.choice_control, path.choice_control)
        np.testing.assert_array_equal(log.choice_treatment, path.choice_treatment)
    np.testing.assert_array_equal(log.in_system, path.in_system)
    # The reference has no arrivals after the log: they slow down those who are still there.
    last = np.inf if whole_log else log.arrival[-1] + scenario.dispatch_delay
    done = path.departure <= last
    np.testing.assert_allclose(log.departure[done], path.departure[done], rtol=1e-9, atol=1e-9)
    assert np.all(log.departure >= path.departure - 1e-9)
    assert done.mean() > 0.5


def check(scenario: qdq.Scenario, design: object = qdq.Bernoulli(0.5), seed: int = 1) -> None:
    record = [
        name
        for name in RECORDABLE
        if not (name == "choices" and isinstance(design, qdq.ServerSplit))
    ]
    log = qdq.simulate(scenario, design, 400, seed, warm_up=0, record=record)
    # What is recorded makes the servers be looked at, which changes nothing.
    bare = qdq.simulate(scenario, design, 400, seed, warm_up=0)
    same_columns(bare, log, ("arrival", "departure", "treated", "server"))
    assert_same_path(log, tie_uniforms(seed, 400))


@pytest.mark.parametrize("i", range(14))
def test_every_built_in_policy_delay_rate_and_law(i):
    control, treatment = BUILT_IN[i % 7], BUILT_IN[(i * 3 + 1 + i // 7) % 7]
    a, b, own = DELAYS[i % 5]
    scenario = sharing(
        n_servers=5,
        service_rates=RATES_OF_5[i % 3],
        arrivals=qdq.Poisson(0.7),
        service=LAWS[(i + i // 5) % 5],
        information_delay=a,
        dispatch_delay=b,
        counts_own_dispatches=own,
        control=control,
        treatment=treatment,
        allow_unstable=True,
    )
    check(scenario, seed=i)


@pytest.mark.long  # compiles the kernel anew
def test_a_users_policy():
    scenario = sharing(
        n_servers=5,
        service_rates=RATES_OF_5[2],
        information_delay=0.3,
        counts_own_dispatches=True,
        treatment=USER,
        control=qdq.PowerOfD(2),
        allow_unstable=True,
    )
    check(scenario)


@pytest.mark.parametrize(
    "design",
    [qdq.Switchback(4.0, 0.6), qdq.ServerSplit(0.4), qdq.AllControl(), qdq.AllTreatment()],
    ids=str,
)
@pytest.mark.parametrize(
    "arrivals",
    [
        qdq.Periodic(0.6, 0.9, 12.0),
        qdq.ArrivalTrace(np.cumsum(np.random.default_rng(5).exponential(0.25, 450))),
    ],
    ids=lambda arrivals: type(arrivals).__name__,
)
def test_other_designs_and_arrivals(arrivals, design):
    scenario = sharing(
        n_servers=6,
        service_rates=(1, 1, 1, 1.5, 1.5, 1.5),
        arrivals=arrivals,
        service=qdq.LogNormal(1.0),
        control=qdq.PowerOfD(2),
        treatment=qdq.JoinShortestQueue(),
    )
    check(scenario, design)


def test_a_log_goes_on_where_the_warm_up_ended():
    scenario = sharing(n_servers=5, arrivals=qdq.Poisson(0.85), treatment=qdq.LeastWorkLeft())
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 400, 8, warm_up=40.0, record=RECORDABLE)
    carried = log.carried_over
    assert len(carried) > 5
    assert np.all(carried[:, 1] <= 0)
    assert np.all((carried[:, 2] > 0) & (carried[:, 2] < log.arrival[-1]))
    # What each still needs at time 0 is the share that it gets from then on.
    n = len(carried)
    both = qdq.TaskLog(
        arrival=np.concatenate((np.zeros(n), log.arrival)),
        departure=np.concatenate((carried[:, 2], log.departure)),
        treated=np.zeros(n + 400, bool),
        server=np.concatenate((carried[:, 0], log.server)).astype(int),
        n_servers=5,
    )
    left = service_had(both)[:n]
    present = [(int(s), 0.0, float(w)) for s, w in zip(carried[:, 0], left, strict=True)]
    assert_same_path(log, tie_uniforms(8, 400), present)


def test_replay_of_a_log_from_outside_ends_without_more_arrivals():
    scenario = sharing(
        n_servers=5,
        service_rates=RATES_OF_5[1],
        arrivals=qdq.Poisson(0.7),
        dispatch_delay=0.5,
        treatment=qdq.LeastWorkLeft(),
    )
    record = ("service_time", "candidates", "queue_lengths", "choices", "in_system")
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 400, 3, warm_up=0.0, record=record)
    outside = qdq.TaskLog(**{name: getattr(log, name) for name in COLUMNS[:10]})
    flipped = np.random.default_rng(9).random(400) < 0.2
    again = qdq.replay(scenario, outside, treated=flipped, seed=3)
    assert again.scenario is None
    requirement = log.service_time * scenario.rates[log.server]
    draws = Draws(log.arrival, requirement, flipped, log.candidates, tie_uniforms(3, 400))
    path = simulate_reference(scenario, draws)
    np.testing.assert_array_equal(again.server, path.server)
    np.testing.assert_allclose(again.departure, path.departure, rtol=1e-9, atol=1e-9)
    without = qdq.TaskLog(
        arrival=log.arrival, departure=log.departure, treated=log.treated, server=log.server
    )
    with pytest.raises(ValueError, match="no column service_time"):
        qdq.replay(scenario, without, treated=True)


# --- FCFS -----------------------------------------------------------------------------------------


def ends_of_busy_periods(log: qdq.TaskLog) -> np.ndarray:
    ends = []
    for server in range(log.n_servers):
        mine = log.server == server
        until = np.maximum.accumulate(log.departure[mine])
        # A server is idle from when all are gone to the next arrival; the last end is cut off.
        ends.append(until[:-1][until[:-1] < log.arrival[mine][1:]])
    return np.concatenate(ends)


@pytest.mark.parametrize("policy", [qdq.PowerOfD(1), qdq.RoundRobin()], ids=str)
@pytest.mark.parametrize("law", LAWS[:4], ids=str)
def test_work_is_conserved(policy, law):
    # Where routing does not look at the servers, both disciplines are busy at the same times.
    scenario = qdq.Scenario(
        service=law, service_rates=[0.9] * 10 + [1.4] * 10, control=policy, treatment=policy
    )
    fcfs, shared = (
        qdq.simulate(
            scenario.replace(discipline=discipline),
            qdq.Bernoulli(0.5),
            30_000,
            5,
            warm_up=0.0,
            record=["service_time", "candidates"],
        )
        for discipline in ("fcfs", "processor_sharing")
    )
    same_columns(fcfs, shared, ("arrival", "treated", "server", "service_time", "candidates"))
    before, after = ends_of_busy_periods(fcfs), ends_of_busy_periods(shared)
    assert before.size > 1000
    np.testing.assert_allclose(after, before, rtol=1e-11)
    assert np.mean(np.isclose(shared.departure, fcfs.departure, atol=1e-9)) < 0.6


def test_both_disciplines_share_their_draws():
    scenario = qdq.Scenario(arrivals=qdq.Periodic(0.7, 0.5, 30.0), service=qdq.LogNormal(2.0))
    fcfs, shared = (
        qdq.simulate(
            scenario.replace(discipline=discipline),
            qdq.Switchback(5.0),
            3000,
            4,
            record=["candidates", "service_time"],
        )
        for discipline in ("fcfs", "processor_sharing")
    )
    names = ("arrival", "treated", "period", "candidates", "service_time")
    same_columns(fcfs, shared, names)
    assert not np.array_equal(fcfs.server, shared.server)


def test_both_delays_equal_one_information_delay():
    both = sharing(information_delay=0.5, dispatch_delay=0.75)
    one = both.replace(information_delay=1.25, dispatch_delay=0.0)
    record = ["queue_lengths", "service_time"]
    first, second = (
        qdq.simulate(s, qdq.Bernoulli(0.5), 2000, 3, warm_up=50.0, record=record)
        for s in (both, one)
    )
    same_columns(first, second, ("arrival", "treated", "server", "service_time", "queue_lengths"))
    np.testing.assert_allclose(first.response_time, second.response_time + 0.75, rtol=0, atol=1e-10)


# --- queueing theory ------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS[:4], ids=str)
def test_random_routing_is_insensitive(law):
    scenario = sharing(
        n_servers=4,
        service=law,
        arrivals=qdq.Poisson(0.5),
        service_rates=(1.0, 0.8, 1.0, 1.5),
        control=qdq.PowerOfD(1),
    )
    log = qdq.simulate(scenario, qdq.AllControl(), 400_000, seed=7)
    expected = np.mean([1 / (rate - 0.5) for rate in scenario.rates])
    assert qdq.exact.random_routing_response(scenario) == pytest.approx(expected, rel=1e-12)
    error = batch_error(log.response_time)
    assert error < 0.025 * expected
    # A Pareto response has no variance here, so batch means are a rough guide: twice as wide.
    wide = 2.0 if isinstance(law, qdq.Pareto) else 1.0
    assert abs(log.response_time.mean() - expected) < wide * Z * error


def test_the_closed_form_and_its_refusals():
    assert processor_sharing_response(0.8, qdq.Pareto(1.1)) == pytest.approx(5.0)
    assert processor_sharing_response(0.8, qdq.Deterministic(), 2.0) == pytest.approx(0.5 / 0.6)
    exponential = qdq.Exponential()
    assert processor_sharing_response(0.7, exponential) == pytest.approx(
        pollaczek_khinchine(0.7, exponential)
    )
    with pytest.raises(ValueError, match="load of 1"):
        processor_sharing_response(1.0, exponential)


SMALL = {"n_servers": 2, "arrivals": qdq.Poisson(0.6), "control": qdq.PowerOfD(1)}


def test_small_chains_know_what_depends_on_numbers_alone():
    fcfs = small_chain(qdq.Scenario(**SMALL, treatment=qdq.PowerOfD(2)))
    chain = small_chain(sharing(**SMALL, treatment=qdq.PowerOfD(2)))
    assert chain.global_effect == fcfs.global_effect
    assert chain.slope() == fcfs.slope()
    assert chain.expected_dq_queue(10) == fcfs.expected_dq_queue(10)
    for ask in (
        chain.direct_effect,
        lambda: chain.expected_dq_response(10),
        lambda: chain.expected_dq_queue(10, queue="waiting"),
    ):
        with pytest.raises(ValueError, match="not known under discipline='processor_sharing'"):
            ask()
    truth = qdq.true_effect(chain.scenario)
    assert truth.method == "exact"
    assert truth.value == pytest.approx(fcfs.global_effect, abs=1e-9)

    log = qdq.simulate(chain.scenario, qdq.Bernoulli(0.5), 300_000, seed=5)
    error = batch_error(log.response_time)
    assert error < 0.01 * chain.mean_response()
    assert abs(log.response_time.mean() - chain.mean_response()) < Z * error
    # And the queue's truncated sums, whose expectation the chain has.
    estimate = qdq.dq_queue(log, horizon=10, arrival_rate=1.2)
    assert abs(estimate.value - chain.expected_dq_queue(10)) < Z * estimate.standard_error
    assert estimate.standard_error < 0.05


def test_the_direct_effect_is_another_than_under_fcfs():
    # That it is refused has a reason: the naive difference tends to something else.
    chain = small_chain(qdq.Scenario(**SMALL, treatment=qdq.PowerOfD(2)))
    log = qdq.simulate(
        sharing(**SMALL, treatment=qdq.PowerOfD(2)), qdq.Bernoulli(0.5), 600_000, seed=6
    )
    estimate = qdq.naive(log)
    assert abs(estimate.value - chain.direct_effect()) > 6 * estimate.standard_error


def test_true_effect_by_simulation_and_with_an_infinite_variance():
    scenario = sharing(
        n_servers=3,
        arrivals=qdq.Poisson(0.5),
        service=qdq.Pareto(1.6),
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(2),
    )
    truth = qdq.true_effect(scenario, relative_error=0.1)
    assert truth.method == "partly exact"
    assert truth.mean_response_control == pytest.approx(2.0)
    assert -1.0 < truth.value < 0.0
    with pytest.raises(ValueError, match="infinite"):
        qdq.true_effect(scenario.replace(discipline="fcfs"))


# --- what comes after the log ---------------------------------------------------------------------

DESIGNED = [
    (sharing(), qdq.Bernoulli(0.5)),
    (
        sharing(arrivals=qdq.Poisson(0.6), service_rates=[0.7] * 10 + [1.3] * 10),
        qdq.ServerSplit(0.4),
    ),
    (sharing(arrivals=qdq.Periodic(0.7, 0.5, 30.0), information_delay=0.3), qdq.Switchback(7.0)),
    (sharing(control=qdq.RoundRobin(), treatment=qdq.JoinIdleQueue()), qdq.Bernoulli(0.2)),
    (
        sharing(
            arrivals=qdq.ArrivalTrace(1e6 + np.arange(3500) / 15.0), service=qdq.LogNormal(1.0)
        ),
        qdq.Bernoulli(0.5),
    ),
]


@pytest.mark.parametrize(("scenario", "design"), DESIGNED)
def test_replay_under_the_same_assignment_returns_the_log(scenario, design):
    record = [
        name
        for name in RECORDABLE
        if not (name == "choices" and isinstance(design, qdq.ServerSplit))
    ]
    log = qdq.simulate(scenario, design, 3000, seed=6, record=record)
    again = qdq.replay(scenario, log, treated=log.treated)
    same_columns(log, again)
    assert (again.design, again.propensity, again.seed) == (log.design, log.propensity, log.seed)
    assert again.scenario == log.scenario
    other = qdq.replay(scenario, log, treated=True)
    same_columns(log, other, ("arrival",))
    assert other.treated.all()


def test_replay_of_one_changed_task_changes_only_what_comes_after():
    scenario = sharing()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 3000, seed=7)
    treated = log.treated.copy()
    treated[1500] = ~treated[1500]
    other = qdq.replay(scenario, log, treated=treated)
    earlier = log.departure < log.arrival[1500]
    np.testing.assert_array_equal(other.departure[earlier], log.departure[earlier])
    np.testing.assert_array_equal(other.server[:1500], log.server[:1500])
    assert other.design is None
    # Of who arrives after it nothing is known any more.
    with pytest.raises(ValueError, match="itself a replay"):
        qdq.replay(scenario, other, treated=True)


def test_an_all_treated_replay_goes_on_so():
    scenario = sharing()
    log = qdq.simulate(scenario, qdq.AllTreatment(), 2000, seed=7, warm_up=0.0)
    mixed = qdq.simulate(scenario, qdq.Bernoulli(0.5), 2000, seed=7, warm_up=0.0)
    same_columns(log, qdq.replay(scenario, mixed, treated=True), COLUMNS[:4])


@pytest.mark.parametrize(("scenario", "design"), DESIGNED)
def test_a_longer_log_begins_with_the_shorter(scenario, design):
    short = qdq.simulate(scenario, design, 700, seed=8)
    long = qdq.simulate(scenario, design, 3000, seed=8)
    for name in ("arrival", "departure", "treated", "server"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[:700])
    same_columns(short, long, ("carried_over",))


def test_a_service_trace_that_ends_is_drawn_from():
    scenario = sharing(service=qdq.ServiceTrace(np.arange(1, 1001) / 500.0))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 1000, seed=2, record=["service_time"])
    np.testing.assert_allclose(log.service_time, np.arange(1, 1001) / 500.0)
    assert np.isfinite(log.departure).all()


def test_an_overload_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["qdq.simulate"], "_MOST_LATER", 20_000)
    scenario = sharing(
        n_servers=2,
        arrivals=qdq.Poisson(20.0),
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(2),
        allow_unstable=True,
    )
    with pytest.raises(ValueError, match=r"of n_tasks=300 tasks are still there after 23000 later"):
        qdq.simulate(scenario, qdq.Bernoulli(0.5), 300, seed=1, warm_up=10.0)


# --- invariance -----------------------------------------------------------------------------------


def test_the_block_does_not_matter(monkeypatch):
    scenario = sharing(information_delay=0.2, treatment=qdq.JoinShortestQueue())
    one = qdq.simulate(scenario, qdq.Switchback(3.0), 3000, seed=10, record=RECORDABLE)
    module = sys.modules["qdq.simulate"]
    monkeypatch.setattr(module, "_BLOCK", 37)
    monkeypatch.setattr(module, "CHUNK", 101)
    two = qdq.simulate(scenario, qdq.Switchback(3.0), 3000, seed=10, record=RECORDABLE)
    same_columns(one, two)


@pytest.mark.parametrize("arrivals", [qdq.Poisson(0.8), qdq.Periodic(0.8, 0.5, 20.0)], ids=str)
def test_a_base_that_moves_on_changes_rounding_only(arrivals, monkeypatch):
    scenario = sharing(arrivals=arrivals, information_delay=0.2)
    one = qdq.simulate(scenario, qdq.Bernoulli(0.5), 5000, seed=10, record=["queue_lengths"])
    module = sys.modules["qdq.simulate"]
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "_ARRIVALS_TO_A_BASE", 200)
    two = qdq.simulate(scenario, qdq.Bernoulli(0.5), 5000, seed=10, record=["queue_lengths"])
    same_columns(one, two, ("server", "queue_lengths"))
    np.testing.assert_allclose(two.departure, one.departure, rtol=1e-12)
    np.testing.assert_allclose(two.response_time, one.response_time, atol=1e-10)


@pytest.mark.parametrize("law", [qdq.Exponential(), qdq.LogNormal(2.0)], ids=str)
def test_doubling_the_warm_up_changes_nothing(law):
    scenario = sharing(n_servers=5, arrivals=qdq.Poisson(0.7), service=law, control=qdq.PowerOfD(1))
    warm_up = scenario.default_warm_up
    means = np.array(
        [
            [
                qdq.simulate(
                    scenario, qdq.AllControl(), 200, (9, j), warm_up=w
                ).response_time.mean()
                for w in (warm_up, 2 * warm_up)
            ]
            for j in range(200)
        ]
    )
    change = means[:, 1] - means[:, 0]
    error = change.std(ddof=1) / math.sqrt(200)
    assert error < 0.04 * means.mean()
    assert abs(change.mean()) <= Z * error


def test_replicate_and_studies_know_it():
    scenario = sharing(n_servers=4, treatment=qdq.PowerOfD(3))
    for design in (qdq.Bernoulli(0.5), qdq.Switchback(25.0)):
        log = qdq.simulate(scenario, design, 20_000, seed=3)
        frame = qdq.replicate(scenario, design, 20_000, seed=3)
        np.testing.assert_allclose(frame.value, qdq.estimate(log).value, rtol=1e-9)
    options = {"n_tasks": 3000, "n_replications": 4, "seed": 3, "horizon": 50, "truth": 0.0}
    one, two = (qdq.run_study(scenario, **options, n_jobs=n_jobs).replications for n_jobs in (1, 2))
    assert one.equals(two)
    again = qdq.replicate(scenario, qdq.Bernoulli(0.5), 3000, seed=(3, 2), horizon=50)
    np.testing.assert_array_equal(one.value[one.replication == 2], again.value)


_BOTH_WAYS = """
import hashlib
import numpy as np, qdq
from qdq.simulate import RECORDABLE
digest = hashlib.sha256()
for scenario, design in [
    (qdq.Scenario(discipline="processor_sharing", n_servers=4, service=qdq.Pareto(2.5),
                  information_delay=0.3, counts_own_dispatches=True, control=qdq.PowerOfD(2),
                  treatment=qdq.LeastWorkLeft()), qdq.Bernoulli(0.5)),
    (qdq.Scenario(discipline="processor_sharing", n_servers=3, control=qdq.RoundRobin(),
                  treatment=qdq.ShortestExpectedDelay(2), service_rates=(1.0, 1.2, 1.4)),
     qdq.Switchback(3.0)),
]:
    log = qdq.simulate(scenario, design, 300, seed=5, warm_up=8.0, record=RECORDABLE)
    for name in ("arrival", "departure", "treated", "server", "service_time", "in_system",
                 "candidates", "choice_control", "choice_treatment", "queue_lengths",
                 "carried_over"):
        column = getattr(log, name)
        digest.update(b"" if column is None else np.ascontiguousarray(column).tobytes())
print(digest.hexdigest())
"""


def test_kernels_compute_the_same_bits_uncompiled():
    digests = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", _BOTH_WAYS],
            env=os.environ | {"NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == len(hashlib.sha256().hexdigest())


# --- the face -------------------------------------------------------------------------------------


def test_the_field_is_checked_kept_and_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"discipline='lifo' is not allowed: .* 'fcfs'"):
        qdq.Scenario(discipline="lifo")
    scenario = sharing()
    assert scenario != qdq.Scenario()
    assert hash(scenario) != hash(qdq.Scenario())
    assert "processor_sharing" in repr(scenario)
    assert qdq.Scenario.from_dict(scenario.to_dict()) == scenario
    old = {name: value for name, value in scenario.to_dict().items() if name != "discipline"}
    assert qdq.Scenario.from_dict(old) == qdq.Scenario()  # written before there was a choice
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 500, seed=1)
    for name in ("log.csv", "log.parquet"):
        log.write(tmp_path / name)
        again = qdq.TaskLog.read(tmp_path / name)
        assert again.scenario == scenario
        same_columns(log, again)
        same_columns(log, qdq.replay(scenario, again, treated=again.treated))


def test_nobody_waits():
    scenario = sharing()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 2000, seed=1, record=["service_time"])
    for call in (
        lambda: qdq.dq_queue(log, horizon=50, queue="waiting"),
        lambda: qdq.estimate(log, horizon=50, queue="waiting"),
        lambda: qdq.replicate(
            scenario, qdq.Bernoulli(0.5), 2000, seed=1, horizon=50, queue="waiting"
        ),
        lambda: qdq.run_study(
            scenario, 2000, 2, seed=1, horizon=50, queue=["in_system", "waiting"]
        ),
    ):
        with pytest.raises(ValueError, match="queue='waiting' is not allowed under discipline="):
            call()
    with pytest.raises(ValueError, match="differs from the one"):
        qdq.replay(scenario.replace(discipline="fcfs"), log, treated=True)
