"""The simulator: closed forms, identities, the semantics of policies under mixing, replay."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qdq
from qdq import kernels
from qdq.simulate import RECORDABLE

# Two-sided false alarm of a single comparison: 4.5 standard errors, 7e-6.
Z = 4.5
ALL = RECORDABLE


@numba.njit
def shortest_of_two(queue_lengths, work, rates, candidates, u):
    a, b = candidates[0], candidates[1]
    return a if queue_lengths[a] <= queue_lengths[b] else b


@numba.njit
def nowhere(queue_lengths, work, rates, candidates, u):
    return -1


def same_columns(one, other, names=("arrival", "departure", "treated", "server")):
    for name in names:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def replicated_mean(scenario, design, n_tasks, n_replications, seed, pick=lambda log: slice(None)):
    means = [
        float(np.mean(log.response_time[pick(log)]))
        for log in (
            qdq.simulate(scenario, design, n_tasks, seed=(seed, j)) for j in range(n_replications)
        )
    ]
    return np.mean(means), np.std(means, ddof=1) / math.sqrt(n_replications)


# --- closed forms: random routing makes each server a queue of its own ----------------------------


@pytest.mark.parametrize(
    ("service", "lam"),
    [
        (qdq.Exponential(), 0.5),
        (qdq.Exponential(), 0.8),
        (qdq.Deterministic(), 0.7),
        (qdq.Pareto(4.5), 0.6),
        (qdq.LogNormal(1.5), 0.6),
    ],
)
def test_random_routing_is_pollaczek_khinchine(service, lam):
    scenario = qdq.Scenario(arrivals=qdq.Poisson(lam), service=service, control=qdq.PowerOfD(1))
    mean, error = replicated_mean(scenario, qdq.AllControl(), 60_000, 40, seed=11)
    exact = 1 + lam * (1 + service.scv) / (2 * (1 - lam))
    assert error < 0.03 * exact  # a wrong second moment moves the mean by more than 20 %
    assert abs(mean - exact) < Z * error


def test_random_routing_with_unequal_rates_is_a_mixture_of_mm1():
    rates = np.array([0.7, 0.7, 1.3, 1.6])
    scenario = qdq.Scenario(
        n_servers=4, arrivals=qdq.Poisson(0.5), service_rates=rates, control=qdq.PowerOfD(1)
    )
    for k in (0, 2, 3):
        mean, error = replicated_mean(
            scenario, qdq.AllControl(), 20_000, 30, 12, lambda log, k=k: log.server == k
        )
        assert abs(mean - 1 / (rates[k] - 0.5)) < Z * error


def test_round_robin_alone_is_an_erlang_arrival_queue():
    # One server of N under round robin sees Erlang(N, N lam) gaps: G/M/1, whose sigma solves
    # sigma = (N lam / (N lam + 1 - sigma)) ** N, and whose mean response time is 1 / (1 - sigma).
    n, lam = 3, 0.7
    sigma = 0.5
    for _ in range(500):
        sigma = (n * lam / (n * lam + 1 - sigma)) ** n
    scenario = qdq.Scenario(
        n_servers=n, arrivals=qdq.Poisson(lam), control=qdq.RoundRobin(), treatment=qdq.PowerOfD(2)
    )
    mean, error = replicated_mean(scenario, qdq.AllControl(), 40_000, 40, seed=13)
    assert error < 0.02
    assert abs(mean - 1 / (1 - sigma)) < Z * error


def test_arrivals_are_poisson_at_the_asked_rate():
    log = qdq.simulate(qdq.Scenario(arrivals=qdq.Poisson(0.7)), qdq.Bernoulli(0.3), 200_000, seed=2)
    gaps = np.diff(log.arrival, prepend=0.0) * 14
    n = gaps.size
    assert abs(gaps.mean() - 1) < Z / math.sqrt(n)
    assert abs(np.mean(gaps**2) - 2) < Z * math.sqrt(20 / n)
    assert abs(log.treated.mean() - 0.3) < Z * math.sqrt(0.21 / n)


def test_periodic_arrivals_follow_the_rate_over_the_cycle():
    scenario = qdq.Scenario(arrivals=qdq.Periodic(0.7, 0.8, 50.0))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 300_000, seed=3, warm_up=0.0)
    cycles = math.floor(log.arrival[-1] / 50.0)
    phase = (log.arrival[log.arrival < cycles * 50.0] % 50.0) / 50.0
    counts, edges = np.histogram(phase, bins=20, range=(0, 1))
    share = np.diff(edges - 0.8 / (2 * np.pi) * np.cos(2 * np.pi * edges))
    expected = 14 * 50 * cycles * share
    chi2 = np.sum((counts - expected) ** 2 / expected)
    assert chi2 < 70  # chi-square with 20 degrees of freedom exceeds 70 with probability 2e-7


def test_the_warm_up_of_a_periodic_rate_ends_at_phase_zero():
    # With full amplitude the rate is zero at phase 3/4: few tasks arrive around there, warm-up
    # included.
    scenario = qdq.Scenario(
        n_servers=3, arrivals=qdq.Periodic(0.3, 1.0, 400.0), treatment=qdq.PowerOfD(3)
    )
    n, clock = kernels.warm_up_start(
        np.array([1, 2], np.uint32), kernels.PERIODIC, 1 / 0.9, 1.0, 400.0, 100.0
    )
    # A quarter cycle before time 0 brings what the mean rate does in 400 * (1/4 - 1/(2 pi)).
    assert -400 * (0.25 - 1 / (2 * np.pi)) < clock < 0.0
    assert n < 60
    log = qdq.simulate(scenario, qdq.AllControl(), 100, seed=1, warm_up=400.0)
    assert log.warm_up == 400.0


# --- identities -----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 400),
    lam=st.floats(0.05, 0.95),
    n_servers=st.integers(3, 9),
    delay=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=40, deadline=None)
def test_a_log_is_a_fcfs_history(seed, n, lam, n_servers, delay):
    scenario = qdq.Scenario(
        n_servers=n_servers,
        arrivals=qdq.Poisson(lam),
        information_delay=delay,
        dispatch_delay=delay,
    )
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n, seed=seed, record=ALL)
    assert np.all(np.diff(log.arrival) >= 0)
    assert log.arrival[0] > 0
    start = log.departure - log.service_time
    tolerance = 1e-9 * (1 + log.departure.max())
    assert np.all(start >= log.arrival + delay - tolerance)
    for k in range(n_servers):
        mine = log.server == k
        free = log.carried_over[log.carried_over[:, 0] == k, 2].max(initial=-np.inf)
        busy_until = np.concatenate(([free], log.departure[mine][:-1]))
        np.testing.assert_allclose(
            start[mine], np.maximum(log.arrival[mine] + delay, busy_until), atol=tolerance
        )
    departures = np.concatenate((log.carried_over[:, 2], log.departure))
    order = np.concatenate((np.full(len(log.carried_over), -1), np.arange(n)))
    for k in range(n):
        assert log.in_system[k] == np.sum((departures > log.arrival[k]) & (order < k))
    if delay == 0.0:
        np.testing.assert_array_equal(log.queue_lengths.sum(axis=1), log.in_system)


def test_littles_law_is_an_identity_on_a_log_from_empty_to_empty():
    log = qdq.simulate(qdq.Scenario(), qdq.Bernoulli(0.5), 5000, seed=4, warm_up=0.0)
    # The number in system, integrated by its jumps.
    times = np.concatenate((log.arrival, log.departure))
    jumps = np.concatenate((np.ones(5000), -np.ones(5000)))
    order = np.argsort(times, kind="stable")
    level = np.cumsum(jumps[order])[:-1]
    area = np.sum(level * np.diff(times[order]))
    assert area == pytest.approx(log.response_time.sum(), rel=1e-12)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("policy", [qdq.PowerOfD(2), qdq.JoinShortestQueue(), qdq.LeastWorkLeft()])
def test_both_delays_equal_one_information_delay(own, policy):
    base = qdq.Scenario(counts_own_dispatches=own, control=policy)
    late = qdq.simulate(
        base.replace(information_delay=0.75, dispatch_delay=0.5), qdq.Bernoulli(0.5), 20_000, seed=5
    )
    seen = qdq.simulate(base.replace(information_delay=1.25), qdq.Bernoulli(0.5), 20_000, seed=5)
    same_columns(late, seen, ("arrival", "treated", "server"))
    np.testing.assert_allclose(late.departure, seen.departure + 0.5, rtol=0, atol=1e-9)


def test_counting_own_dispatches_without_a_delay_changes_nothing():
    scenario = qdq.Scenario(n_servers=6)
    one = qdq.simulate(scenario, qdq.Bernoulli(0.5), 5000, seed=6)
    two = qdq.simulate(
        scenario.replace(counts_own_dispatches=True), qdq.Bernoulli(0.5), 5000, seed=6
    )
    same_columns(one, two)


# --- randomness -----------------------------------------------------------------------------------


def test_policies_and_designs_share_their_draws():
    scenario = qdq.Scenario()
    logs = [
        qdq.simulate(
            system, design, 2000, seed=7, warm_up=0.0, record=("service_time", "candidates")
        )
        for system in (
            scenario,
            scenario.replace(control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(3)),
        )
        for design in (qdq.Bernoulli(0.5), qdq.AllTreatment(), qdq.Switchback(5.0))
    ]
    for log in logs[1:]:
        same_columns(logs[0], log, ("arrival", "service_time", "candidates"))


def test_a_longer_log_begins_with_the_shorter():
    scenario = qdq.Scenario(information_delay=0.3)
    short = qdq.simulate(scenario, qdq.Bernoulli(0.5), 1500, seed=8)
    long = qdq.simulate(scenario, qdq.Bernoulli(0.5), 4000, seed=8)
    for name in ("arrival", "departure", "treated", "server"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[:1500])


@pytest.mark.parametrize(
    "scenario",
    [
        qdq.Scenario(arrivals=qdq.Poisson(0.95)),
        qdq.Scenario(n_servers=3, arrivals=qdq.Poisson(0.9)),
        qdq.Scenario(
            n_servers=5,
            arrivals=qdq.Poisson(0.7),
            service=qdq.LogNormal(2.0),
            control=qdq.PowerOfD(1),
        ),
    ],
)
def test_doubling_the_warm_up_changes_nothing(scenario):
    # The last tasks before time 0 keep their draws: the first logged ones are a paired comparison.
    warm_up = scenario.default_warm_up
    means = np.array(
        [
            [
                qdq.simulate(
                    scenario, qdq.AllControl(), 200, (9, j), warm_up=w
                ).response_time.mean()
                for w in (warm_up, 2 * warm_up)
            ]
            for j in range(300)
        ]
    )
    change = means[:, 1] - means[:, 0]
    error = change.std(ddof=1) / math.sqrt(300)
    assert error < 0.04 * means.mean()
    assert abs(change.mean()) < Z * error


def test_random_routing_forgets_its_start_exactly():
    # Each server is the same once it has been empty at the same time, whatever came before.
    scenario = qdq.Scenario(arrivals=qdq.Poisson(0.8), control=qdq.PowerOfD(1))
    one = qdq.simulate(scenario, qdq.AllControl(), 2000, seed=9)
    two = qdq.simulate(scenario, qdq.AllControl(), 2000, seed=9, warm_up=2 * one.warm_up)
    same_columns(one, two, ("arrival", "treated", "server"))
    np.testing.assert_allclose(one.departure, two.departure, rtol=0, atol=1e-9)


def test_replications_differ():
    scenario = qdq.Scenario()
    one = qdq.simulate(scenario, qdq.Bernoulli(0.5), 100, seed=(1, 0))
    two = qdq.simulate(scenario, qdq.Bernoulli(0.5), 100, seed=(1, 1))
    assert not np.any(one.arrival == two.arrival)


def test_the_block_does_not_matter(monkeypatch):
    scenario = qdq.Scenario(information_delay=0.2, treatment=qdq.JoinShortestQueue())
    one = qdq.simulate(scenario, qdq.Switchback(3.0), 3000, seed=10, record=ALL)
    module = sys.modules["qdq.simulate"]  # qdq.simulate itself is the function
    monkeypatch.setattr(module, "_BLOCK", 37)
    monkeypatch.setattr(module, "CHUNK", 101)
    two = qdq.simulate(scenario, qdq.Switchback(3.0), 3000, seed=10, record=ALL)
    same_columns(
        one, two, ("arrival", "departure", "treated", "server", "queue_lengths", "carried_over")
    )


@pytest.mark.parametrize("room", ["pool", "ring"])
def test_full_queues_get_more_room_and_lose_nothing(room):
    # Overload: thousands of tasks wait at each server, and a delay keeps thousands of dispatches
    # unseen.
    scenario = qdq.Scenario(
        n_servers=2,
        arrivals=qdq.Poisson(3.0),
        information_delay=500.0 if room == "ring" else 0.0,
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(2),
        allow_unstable=True,
    )
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 6000, seed=1, warm_up=10.0, record=ALL)
    seen_at = log.arrival - scenario.information_delay
    start = log.departure - log.service_time
    for k in range(2):
        mine = log.server == k
        np.testing.assert_allclose(start[mine][1:], log.departure[mine][:-1], rtol=1e-12)
        carried = log.carried_over[log.carried_over[:, 0] == k, 2]
        for i in range(0, 6000, 97):
            joined = mine & (log.arrival <= seen_at[i]) & (np.arange(6000) < i)
            present = np.sum(joined & (log.departure > seen_at[i]))
            if seen_at[i] >= 0:
                assert log.queue_lengths[i, k] == present + np.sum(carried > seen_at[i])
    assert log.queue_lengths.max() > 800


# --- policies under mixing ------------------------------------------------------------------------


def test_round_robin_has_one_pointer_an_arm():
    scenario = qdq.Scenario(n_servers=5, control=qdq.RoundRobin(), treatment=qdq.RoundRobin())
    log = qdq.simulate(scenario, qdq.Bernoulli(0.4), 1000, seed=1, warm_up=0.0, record=("choices",))
    for arm in (False, True):
        np.testing.assert_array_equal(
            log.server[log.treated == arm], np.arange(np.sum(log.treated == arm)) % 5
        )
    # What the other arm would have chosen: where its pointer stands.
    ahead = np.cumsum(log.treated) - log.treated
    np.testing.assert_array_equal(log.choice_treatment, ahead % 5)
    np.testing.assert_array_equal(log.choice_control, (np.arange(1000) - ahead) % 5)


def test_power_of_all_servers_is_join_the_shortest_queue_in_law():
    scenario = qdq.Scenario(n_servers=6, control=qdq.PowerOfD(6), treatment=qdq.JoinShortestQueue())
    log = qdq.simulate(scenario, qdq.AllControl(), 20_000, seed=2, record=ALL)
    chosen = log.queue_lengths[np.arange(20_000), log.server]
    np.testing.assert_array_equal(chosen, log.queue_lengths.min(axis=1))
    # Ties are split evenly: among servers tied for the least, each gets its share.
    tied = log.queue_lengths == log.queue_lengths.min(axis=1)[:, None]
    for server in (log.server, log.choice_treatment):
        share = tied / tied.sum(axis=1)[:, None]
        got = np.bincount(server, minlength=6) - share.sum(axis=0)
        assert np.abs(got).max() < Z * np.sqrt((share * (1 - share)).sum(axis=0).max())


def test_a_users_policy_sees_what_the_built_in_one_sees():
    with pytest.warns(UserWarning, match="total service rate"):
        user = qdq.Scenario(
            n_servers=7,
            service_rates=[0.8] * 3 + [1.2] * 4,
            information_delay=0.4,
            control=qdq.UserPolicy(shortest_of_two),
            treatment=qdq.PowerOfD(3),
        )
    built_in = user.replace(control=qdq.PowerOfD(2))
    for design in (qdq.Bernoulli(0.5), qdq.ServerSplit(0.5)):
        same_columns(
            qdq.simulate(user, design, 3000, seed=3, warm_up=20.0),
            qdq.simulate(built_in, design, 3000, seed=3, warm_up=20.0),
        )


def test_a_users_policy_that_chooses_no_candidate_is_stopped():
    with pytest.warns(UserWarning, match="total service rate"):
        scenario = qdq.Scenario(treatment=qdq.UserPolicy(nowhere))
    with pytest.raises(
        ValueError, match=r"the UserPolicy chose, for task .* not among its candidates"
    ):
        qdq.simulate(scenario, qdq.Bernoulli(0.5), 100, seed=1, warm_up=0.0)


def test_a_split_keeps_the_arms_apart():
    scenario = qdq.Scenario(arrivals=qdq.Poisson(0.6), service_rates=[0.7] * 10 + [1.3] * 10)
    log = qdq.simulate(scenario, qdq.ServerSplit(0.3), 20_000, seed=4)
    treated = set(log.server[log.treated])
    control = set(log.server[~log.treated])
    assert len(treated) == 6
    assert len(control) == 14
    assert not treated & control
    share = sum(scenario.rates[k] for k in treated) / 20.0
    assert log.propensity == pytest.approx(share)
    assert abs(log.treated.mean() - share) < Z * math.sqrt(share * (1 - share) / 20_000)


def test_a_switchback_treats_whole_periods():
    log = qdq.simulate(qdq.Scenario(), qdq.Switchback(4.0, 0.3), 60_000, seed=5)
    np.testing.assert_array_equal(log.period, np.floor(log.arrival / 4.0).astype(int))
    first = np.concatenate(([True], np.diff(log.period) > 0))
    arm = log.treated[first]
    np.testing.assert_array_equal(log.treated, arm[np.cumsum(first) - 1])
    n = arm.size
    assert abs(arm.mean() - 0.3) < Z * math.sqrt(0.21 / n)
    assert abs(np.corrcoef(arm[:-1], arm[1:])[0, 1]) < Z / math.sqrt(n)


@pytest.mark.parametrize(("design", "arm"), [(qdq.AllControl(), False), (qdq.AllTreatment(), True)])
def test_pure_designs(design, arm):
    log = qdq.simulate(qdq.Scenario(), design, 1000, seed=1, warm_up=0.0)
    assert np.all(log.treated == arm)
    assert log.propensity == float(arm)


# --- replay ---------------------------------------------------------------------------------------

REPLAYED = [
    (qdq.Scenario(), qdq.Bernoulli(0.5)),
    (
        qdq.Scenario(arrivals=qdq.Poisson(0.6), service_rates=[0.7] * 10 + [1.3] * 10),
        qdq.ServerSplit(0.4),
    ),
    (
        qdq.Scenario(arrivals=qdq.Periodic(0.7, 0.5, 30.0), information_delay=0.3),
        qdq.Switchback(7.0),
    ),
    (qdq.Scenario(control=qdq.RoundRobin(), treatment=qdq.JoinIdleQueue()), qdq.Bernoulli(0.2)),
    (qdq.Scenario(arrivals=qdq.ArrivalTrace(np.arange(3000) / 15.0)), qdq.Bernoulli(0.5)),
]


@pytest.mark.parametrize(("scenario", "design"), REPLAYED)
def test_replay_under_the_same_assignment_returns_the_log(scenario, design):
    record = tuple(
        name for name in ALL if name != "choices" or not isinstance(design, qdq.ServerSplit)
    )
    log = qdq.simulate(scenario, design, 3000, seed=6, record=record)
    again = qdq.replay(scenario, log, treated=log.treated)
    names = ("arrival", "departure", "treated", "server", "service_time", "in_system", "candidates")
    same_columns(log, again, (*names, "queue_lengths", "carried_over"))
    assert (again.design, again.propensity, again.seed) == (log.design, log.propensity, log.seed)
    if log.choice_control is not None:
        same_columns(log, again, ("choice_control", "choice_treatment"))
    if log.period is not None:
        same_columns(log, again, ("period",))


def test_replay_of_one_changed_task_changes_only_what_comes_after():
    scenario = qdq.Scenario()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 3000, seed=7)
    treated = log.treated.copy()
    treated[1000] = ~treated[1000]
    other = qdq.replay(scenario, log, treated=treated)
    np.testing.assert_array_equal(other.departure[:1000], log.departure[:1000])
    np.testing.assert_array_equal(other.arrival, log.arrival)
    assert other.design is None


def test_replay_of_an_outside_log_rebuilds_the_requirements():
    scenario = qdq.Scenario(service_rates=np.linspace(0.85, 1.15, 20), arrivals=qdq.Poisson(0.6))
    log = qdq.simulate(
        scenario, qdq.Bernoulli(0.5), 4000, seed=8, warm_up=0.0, record=("candidates",)
    )
    outside = qdq.TaskLog(
        arrival=log.arrival,
        departure=log.departure,
        treated=log.treated,
        server=log.server,
        candidates=log.candidates,
    )
    again = qdq.replay(scenario, outside, treated=log.treated)
    np.testing.assert_array_equal(again.server, log.server)
    np.testing.assert_allclose(again.departure, log.departure, rtol=0, atol=1e-8)
    swapped = qdq.replay(scenario, outside, treated=~log.treated)
    assert not np.array_equal(swapped.server, log.server)
    everything = qdq.replay(scenario, outside, treated=True)
    assert everything.design == qdq.AllTreatment()
    assert everything.response_time.mean() < log.response_time.mean()


def test_replay_keeps_what_the_log_says_of_itself():
    scenario = qdq.Scenario(n_servers=6)
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 200, seed=1)
    log = replace(log, skip=3.0, time_unit="s")
    again = qdq.replay(scenario, log, treated=~log.treated)
    assert (again.skip, again.time_unit) == (3.0, "s")
    outside = qdq.TaskLog(
        arrival=log.arrival,
        departure=log.departure,
        treated=log.treated,
        server=log.server,
        period=np.arange(200) // 9 + 4,
        skip=2.0,
    )
    again = qdq.replay(scenario, outside, treated=outside.treated)
    same_columns(outside, again, ("period",))
    assert again.skip == 2.0
    assert qdq.replay(scenario, outside, treated=~outside.treated).period is None


@pytest.mark.parametrize("treated", [True, False, None])
def test_replay_of_a_replay_does_not_start_from_another_state(treated):
    scenario = qdq.Scenario()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 500, seed=1)
    other = qdq.replay(scenario, log, treated=~log.treated if treated is None else treated)
    with pytest.raises(ValueError, match="it is itself a replay, or was changed"):
        qdq.replay(scenario, other, treated=log.treated)
    # From an empty system there is nothing to make again.
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 500, seed=1, warm_up=0.0)
    other = qdq.replay(scenario, log, treated=~log.treated if treated is None else treated)
    same_columns(log, qdq.replay(scenario, other, treated=log.treated), ("departure", "server"))


def test_replay_does_not_forget_a_warm_up_whose_scenario_is_lost():
    scenario = qdq.Scenario()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 500, seed=1)
    lost = replace(log, scenario=None)
    with pytest.raises(ValueError, match=r"has not both scenario and seed.*dataclasses\.replace"):
        qdq.replay(scenario, lost, treated=log.treated)
    again = qdq.replay(scenario, replace(lost, scenario=scenario), treated=log.treated)
    same_columns(log, again, ("departure", "server"))


def test_replay_does_not_guess_the_servers_of_a_split():
    log = qdq.TaskLog(
        arrival=[1.0], departure=[2.0], treated=[True], server=[0], design=qdq.ServerSplit(0.5)
    )
    with pytest.raises(ValueError, match="does not know the servers of each arm"):
        qdq.replay(qdq.Scenario(), log, treated=True)


def test_there_are_no_candidates_where_nobody_samples():
    scenario = qdq.Scenario(control=qdq.RoundRobin(), treatment=qdq.JoinShortestQueue())
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 50, seed=1, record=("candidates",))
    assert log.candidates is None


@pytest.mark.parametrize("record", [5, None])
def test_record_must_be_a_collection(record):
    with pytest.raises(TypeError, match="is not a collection of names: they must be among"):
        qdq.simulate(qdq.Scenario(), qdq.Bernoulli(0.5), 5, seed=1, record=record)


BAD_CALLS = [
    (lambda s, log: qdq.simulate(s, qdq.Bernoulli(0.5), 0, seed=1), "n_tasks=0 is not allowed"),
    (lambda s, log: qdq.simulate(s, qdq.Bernoulli(0.5), 10, seed=-1), "seed=-1 is not allowed"),
    (lambda s, log: qdq.simulate(s, "bernoulli", 10, seed=1), "design='bernoulli' is not a design"),
    (
        lambda s, log: qdq.simulate(0.8, qdq.Bernoulli(0.5), 10, seed=1),
        "scenario=0.8 is not a Scenario",
    ),
    (
        lambda s, log: qdq.simulate(s, qdq.Bernoulli(0.5), 10, 1, warm_up=-1),
        "warm_up=-1 is not allowed",
    ),
    (
        lambda s, log: qdq.simulate(s, qdq.Bernoulli(0.5), 10, 1, record=("queues",)),
        "record='queues'",
    ),
    (
        lambda s, log: qdq.simulate(s, qdq.ServerSplit(), 10, 1, record="choices"),
        "record='choices' is not allowed under ServerSplit",
    ),
    (
        lambda s, log: qdq.simulate(
            s.replace(arrivals=qdq.ArrivalTrace(np.arange(9.0))), qdq.Bernoulli(0.5), 10, 1
        ),
        "n_tasks=10 is not allowed: n_tasks must be at most the length of the trace, 9",
    ),
    (
        lambda s, log: qdq.simulate(
            s.replace(arrivals=qdq.ArrivalTrace(np.arange(9.0))),
            qdq.Bernoulli(0.5),
            9,
            1,
            warm_up=5,
        ),
        "warm_up=5.0 is not allowed: warm_up must be 0 for an ArrivalTrace",
    ),
    (lambda s, log: qdq.replay(s, log, treated=[1, 0]), r"treated has shape \(2,\)"),
    (
        lambda s, log: qdq.replay(s, log, treated=np.full(50, 2)),
        "treated holds something else than 0 and 1",
    ),
    (
        lambda s, log: qdq.replay(s.replace(information_delay=1.0), log, treated=True),
        "differs from the one that the log was simulated with in more than its policies",
    ),
    (
        lambda s, log: qdq.replay(
            s, qdq.TaskLog(arrival=[1.0], departure=[2.0], treated=[True]), treated=True
        ),
        "the log has no column server",
    ),
    (
        lambda s, log: qdq.replay(
            s.replace(n_servers=3),
            qdq.TaskLog(arrival=[1.0], departure=[2.0], treated=[True], server=[5]),
            treated=True,
        ),
        "names servers 5 to 5: scenario.n_servers=3 must cover them",
    ),
    (
        lambda s, log: qdq.replay(
            s,
            qdq.TaskLog(
                arrival=[1.0, 2.0], departure=[9.0, 3.0], treated=[True, False], server=[0, 0]
            ),
            treated=True,
        ),
        "task 1 departs before the task ahead of it at server 0",
    ),
    (
        lambda s, log: qdq.replay(
            s,
            qdq.TaskLog(
                arrival=[1.0], departure=[2.0], treated=[True], server=[0], candidates=[[0, 1]]
            ),
            treated=True,
        ),
        "the log has 2 candidates a task and the policies look at 3",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls_are_refused(call, message):
    scenario = qdq.Scenario()
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 50, seed=1, warm_up=0.0)
    with pytest.raises((TypeError, ValueError), match=message):
        call(scenario, log)


# --- compiled and interpreted ---------------------------------------------------------------------

_BOTH_WAYS = """
import hashlib, sys, warnings
import numpy as np, qdq
from qdq.simulate import RECORDABLE
digest = hashlib.sha256()
P = qdq.Poisson
for scenario, design in [
    (qdq.Scenario(arrivals=P(0.9)), qdq.Bernoulli(0.5)),
    (qdq.Scenario(n_servers=5, arrivals=qdq.Periodic(0.6, 1.0, 9.0), service=qdq.LogNormal(2.0),
                  information_delay=0.4, dispatch_delay=0.2, control=qdq.LeastWorkLeft(),
                  treatment=qdq.JoinShortestQueue()), qdq.Switchback(3.0)),
    (qdq.Scenario(arrivals=P(0.5), service=qdq.Pareto(1.5), control=qdq.PowerOfD(1),
                  treatment=qdq.ShortestExpectedDelay(14), service_rates=np.linspace(0.8, 1.2, 20)),
     qdq.Bernoulli(0.3)),
]:
    log = qdq.simulate(scenario, design, 400, seed=5, warm_up=8.0, record=RECORDABLE)
    for name in ("arrival", "departure", "treated", "server", "service_time", "in_system",
                 "candidates",
                 "choice_control", "choice_treatment", "queue_lengths", "carried_over"):
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
