"""The simulator against an independent event-by-event simulation, for every feature of a scenario.

Pathwise: the reference gets the draws of a log (arrivals, requirements, arms, candidates, uniforms)
and must come to the same servers, choices, queue lengths, numbers in system and departures. In law:
the reference draws everything from numpy's own generator, and the mean response times agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from numba import njit
from scipy import stats

import qdq
from qdq.simulate import tie_uniforms
from reference_sim import Draws, Path, draw_tasks, simulate_reference

EVERYTHING = ("service_time", "in_system", "candidates", "choices", "queue_lengths")


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


# A kernel with a user's function is compiled anew for each arm that has one: the control's is long.
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
POLICIES = [*BUILT_IN, USER]
# (information_delay, dispatch_delay, counts_own_dispatches)
DELAYS = [
    (0.0, 0.0, False),
    (0.7, 0.0, False),
    (0.7, 0.0, True),
    (0.0, 0.6, False),
    (0.0, 0.6, True),
    (0.5, 0.4, False),
    (0.5, 0.4, True),
]
RATES_OF_5 = [1.0, (0.7, 1.3, 1.0, 0.9, 1.1), (0.5, 0.5, 1.0, 1.0, 2.0)]


def system(delays: tuple[float, float, bool] = DELAYS[0], **fields: object) -> qdq.Scenario:
    """A scenario for a pathwise comparison, for which stability does not matter."""
    names = ("information_delay", "dispatch_delay", "counts_own_dispatches")
    return qdq.Scenario(**dict(zip(names, delays, strict=True)), **fields, allow_unstable=True)


def groups_of(log: qdq.TaskLog) -> tuple[Sequence[int], Sequence[int]] | None:
    """The servers that each arm uses in a server split."""
    if not isinstance(log.design, qdq.ServerSplit):
        return None
    groups = tuple(sorted(set(log.server[log.treated == z].tolist())) for z in (False, True))
    assert sorted(groups[0] + groups[1]) == list(range(log.n_servers))  # disjoint, and all used
    return groups


def assert_same_path(log: qdq.TaskLog, u: np.ndarray, present: Sequence[tuple] = ()) -> Path:
    scenario, groups = log.scenario, groups_of(log)
    requirement = log.service_time * scenario.rates[log.server]
    drawn = log.candidates if log.candidates is not None else np.empty((log.n_tasks, 0), int)
    draws = Draws(log.arrival, requirement, log.treated, drawn, u)
    path = simulate_reference(scenario, draws, groups, present)
    np.testing.assert_array_equal(log.queue_lengths, path.queue_lengths)
    np.testing.assert_array_equal(log.server, path.server)
    if groups is None:
        np.testing.assert_array_equal(log.choice_control, path.choice_control)
        np.testing.assert_array_equal(log.choice_treatment, path.choice_treatment)
    np.testing.assert_allclose(log.departure, path.departure, rtol=1e-9, atol=0)
    np.testing.assert_array_equal(log.in_system, path.in_system)
    return path


def check(
    scenario: qdq.Scenario, design: object = qdq.Bernoulli(0.5), n: int = 400, seed: int = 1
) -> tuple[qdq.TaskLog, Path]:
    record = [
        name
        for name in EVERYTHING
        if not (name == "choices" and isinstance(design, qdq.ServerSplit))
    ]
    log = qdq.simulate(scenario, design, n_tasks=n, seed=seed, warm_up=0, record=record)
    # Where nothing is asked for, power-of-d has a loop of its own.
    bare = qdq.simulate(scenario, design, n_tasks=n, seed=seed, warm_up=0)
    for name in ("arrival", "departure", "treated", "server"):
        np.testing.assert_array_equal(getattr(bare, name), getattr(log, name))
    return log, assert_same_path(log, tie_uniforms(seed, n))


def label(value: object) -> str:
    return "User" if value is USER else str(value)


CONTROLS = [
    pytest.param(policy, marks=pytest.mark.long) if policy is USER else policy
    for policy in POLICIES
]


@pytest.mark.parametrize("treatment", POLICIES, ids=label)
@pytest.mark.parametrize("control", CONTROLS, ids=label)
def test_every_policy_on_either_arm_under_every_delay(control, treatment):
    # 7 delays and 8 policies: each policy meets each delay on each arm.
    i = POLICIES.index(control) * len(POLICIES) + POLICIES.index(treatment)
    scenario = system(
        DELAYS[i % 7],
        n_servers=5,
        service_rates=RATES_OF_5[i % 3],
        arrivals=qdq.Poisson(0.9),
        control=control,
        treatment=treatment,
    )
    log, _ = check(scenario, seed=i)
    if control != treatment:
        assert np.any(log.choice_control != log.choice_treatment)


@pytest.mark.parametrize("d", range(1, 7))
@pytest.mark.parametrize("delays", DELAYS[::3], ids=str)
def test_every_number_of_choices(d, delays):
    scenario = system(
        delays,
        n_servers=6,
        arrivals=qdq.Poisson(0.9),
        service_rates=(1, 2, 1, 0.5, 0.5, 1),
        control=qdq.PowerOfD(d),
        treatment=qdq.ShortestExpectedDelay(7 - d),
    )
    check(scenario)


def test_one_server_and_many():
    for n_servers in (1, 2, 33, 100):
        scenario = system(
            DELAYS[6],
            n_servers=n_servers,
            arrivals=qdq.Poisson(0.9),
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(n_servers),
        )
        check(scenario, n=300)


TIMES = np.cumsum(np.random.default_rng(5).exponential(0.2, 400))
ARRIVALS = [qdq.Poisson(0.8), qdq.Periodic(0.8, 0.9, 12.0), qdq.ArrivalTrace(TIMES)]
LAWS = [
    qdq.Exponential(),
    qdq.Deterministic(),
    qdq.Pareto(1.5),
    qdq.LogNormal(2.0),
    qdq.ServiceTrace(np.random.default_rng(6).gamma(0.5, 2.0, 400)),
]
DESIGNS = [
    qdq.Bernoulli(0.3),
    qdq.Switchback(4.0, 0.6),
    qdq.ServerSplit(0.4),
    qdq.AllControl(),
    qdq.AllTreatment(),
]


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("arrivals", ARRIVALS, ids=lambda arrivals: type(arrivals).__name__)
def test_every_arrival_process_law_and_design(arrivals, law, design):
    i = ARRIVALS.index(arrivals) * 25 + LAWS.index(law) * 5 + DESIGNS.index(design)
    scenario = system(
        DELAYS[i % 7],
        n_servers=6,
        service_rates=(1, 1, 1, 1.5, 1.5, 1.5),
        arrivals=arrivals,
        service=law,
        control=qdq.PowerOfD(1 + i % 2),
        treatment=qdq.JoinShortestQueue(),
    )
    log, path = check(scenario, design, seed=i)
    if isinstance(arrivals, qdq.ArrivalTrace):
        np.testing.assert_array_equal(log.arrival, TIMES)
    if isinstance(law, qdq.ServiceTrace):
        expected = law.requirements / scenario.rates[path.server]
        np.testing.assert_allclose(log.service_time, expected, rtol=1e-12)
    if isinstance(law, qdq.Deterministic):
        np.testing.assert_allclose(log.service_time, 1 / scenario.rates[path.server], rtol=1e-12)
    if isinstance(design, qdq.Switchback):
        np.testing.assert_array_equal(log.period, np.floor(log.arrival / 4.0))
        assert all(len(set(log.treated[log.period == j])) == 1 for j in set(log.period))
    if isinstance(design, qdq.AllControl | qdq.AllTreatment):
        assert np.all(log.treated == isinstance(design, qdq.AllTreatment))


@pytest.mark.parametrize("treatment", POLICIES, ids=label)
def test_server_split_with_every_policy(treatment):
    i = POLICIES.index(treatment)
    for j, delays in enumerate(DELAYS):
        scenario = system(
            delays,
            n_servers=7,
            arrivals=qdq.Poisson(0.9),
            service_rates=(1, 1, 1, 1, 2, 2, 2),
            control=BUILT_IN[(i + j) % len(BUILT_IN)],
            treatment=treatment,
        )
        log, _ = check(scenario, qdq.ServerSplit(), seed=10 * i + j)
        groups = groups_of(log)
        assert groups is not None
        if log.candidates is None:  # neither policy samples servers
            continue
        for z, policy in enumerate((scenario.control, scenario.treatment)):
            # Candidates come from the arm's own group; a user's policy gets all of it.
            depth = len(groups[z]) if policy is USER else policy.n_choices or 0
            for row in log.candidates[log.treated == bool(z), :depth]:
                assert len(set(row)) == depth
                assert set(row) <= set(groups[z])


@pytest.mark.parametrize("treatment", POLICIES, ids=label)
@pytest.mark.parametrize(
    "delays",
    [(0.0, 0.0, False), (1.0, 0.0, False), (0.5, 0.5, True), (0.0, 1.25, False), (1.0, 0.0, True)],
    ids=str,
)
def test_simultaneous_events(treatment, delays):
    # All times are multiples of 1/8, so that arrivals, joins, departures and looks back coincide
    # often and sums are exact; several tasks come at once, and some need no service at all.
    rng = np.random.default_rng(7)
    scenario = system(
        delays,
        n_servers=5,
        service_rates=(1.0, 1.0, 0.5, 2.0, 1.0),
        arrivals=qdq.ArrivalTrace(np.sort(rng.integers(0, 500, 400)) / 4),
        service=qdq.ServiceTrace(rng.integers(0, 12, 400) / 4),
        control=BUILT_IN[POLICIES.index(treatment) - 1],
        treatment=treatment,
    )
    check(scenario)


@pytest.mark.parametrize("design", DESIGNS[:2] + DESIGNS[3:], ids=str)
@pytest.mark.parametrize(
    "treatment", [qdq.PowerOfD(3), qdq.LeastWorkLeft(), qdq.JoinIdleQueue(), USER], ids=label
)
def test_log_goes_on_where_the_warm_up_ended(treatment, design):
    # Without delays, the tasks carried over are all the dispatcher knows of the time before 0.
    scenario = qdq.Scenario(
        n_servers=5, arrivals=qdq.Poisson(0.85), treatment=treatment, allow_unstable=True
    )
    log = qdq.simulate(scenario, design, n_tasks=300, seed=8, warm_up=40.0, record=EVERYTHING)
    assert len(log.carried_over) > 0
    assert np.all(log.carried_over[:, 2] > 0)
    assert log.arrival[0] > 0
    present = sorted(map(tuple, log.carried_over.tolist()), key=lambda row: row[1])
    present = [(int(server), start, departure) for server, start, departure in present]
    assert_same_path(log, tie_uniforms(8, 300), present)


@pytest.mark.parametrize("delays", DELAYS[::2], ids=str)
def test_replay_under_another_assignment_and_other_policies(delays):
    scenario = system(
        delays, n_servers=5, arrivals=qdq.Poisson(0.9), control=qdq.PowerOfD(2), treatment=USER
    )
    log, _ = check(scenario, seed=9)
    other = scenario.replace(control=qdq.LeastWorkLeft(), treatment=qdq.ShortestExpectedDelay(3))
    flipped = np.random.default_rng(9).random(log.n_tasks) < 0.2
    again = qdq.replay(other, log, treated=flipped)
    np.testing.assert_array_equal(again.treated, flipped)
    np.testing.assert_array_equal(again.arrival, log.arrival)
    np.testing.assert_array_equal(again.candidates, log.candidates[:, :3])
    assert_same_path(again, tie_uniforms(9, log.n_tasks))


def test_replay_of_a_log_from_outside():
    # Rates differ and the log has no service times: requirements are rebuilt from the FCFS order.
    scenario = system(
        (0.0, 0.5, False),
        n_servers=5,
        service_rates=RATES_OF_5[2],
        arrivals=qdq.Poisson(0.9),
        control=qdq.PowerOfD(2),
        treatment=qdq.PowerOfD(4),
    )
    log, _ = check(scenario, seed=10)
    outside = qdq.TaskLog(
        arrival=log.arrival,
        departure=log.departure,
        treated=log.treated,
        server=log.server,
        candidates=log.candidates,
    )
    flipped = ~log.treated
    again = qdq.replay(scenario, outside, treated=flipped, seed=3)
    requirement = log.service_time * scenario.rates[log.server]
    draws = Draws(log.arrival, requirement, flipped, log.candidates, np.zeros(log.n_tasks))
    path = simulate_reference(scenario, draws)
    np.testing.assert_array_equal(again.server, path.server)
    np.testing.assert_allclose(again.departure, path.departure, rtol=1e-9)


@pytest.mark.long
def test_random_mixtures_of_everything():
    rng = np.random.default_rng(11)

    def one_of(options: Sequence[object]) -> object:
        return options[rng.integers(len(options))]

    n = 2000
    for seed in range(150):
        n_servers = int(rng.integers(6, 25))
        policies = [qdq.PowerOfD(int(rng.integers(1, 4))), *POLICIES]
        design = one_of([*DESIGNS, qdq.Bernoulli(0.5), qdq.ServerSplit(0.5)])
        if not isinstance(design, qdq.ServerSplit):
            policies.append(qdq.PowerOfD(int(rng.integers(1, n_servers + 1))))
            policies.append(qdq.ShortestExpectedDelay(int(rng.integers(1, n_servers + 1))))
        rates = [1.0, rng.uniform(0.5, 2.0, n_servers), 1.0 + np.arange(n_servers) % 2]
        rate = float(rng.uniform(0.6, 1.1))
        scenario = system(
            (float(one_of([0, 0.3, 2.0])), float(one_of([0, 0.4, 1.5])), bool(one_of([0, 1]))),
            n_servers=n_servers,
            service_rates=one_of(rates),
            arrivals=one_of([qdq.Poisson(rate), qdq.Periodic(rate, float(rng.random()), 30.0)]),
            service=one_of(LAWS[:4]),
            control=one_of(policies),
            treatment=one_of(policies),
        )
        check(scenario, design, n=n, seed=seed)


# --------------------------------------------------------------------------------------------------
# In law
# --------------------------------------------------------------------------------------------------

Z = 4.5


def batch_mean(values: np.ndarray, n_batches: int = 24) -> tuple[float, float]:
    """Mean and its standard error by batches of consecutive tasks."""
    size = len(values) // n_batches
    means = values[: n_batches * size].reshape(n_batches, size).mean(axis=1)
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(n_batches))


HALF_AND_HALF = qdq.Bernoulli(0.5)
IN_LAW = {
    "random routing": ({"control": qdq.PowerOfD(1)}, HALF_AND_HALF),
    "rates": (
        {"service_rates": (0.7, 0.8, 1.3, 1.6), "treatment": qdq.ShortestExpectedDelay(4)},
        HALF_AND_HALF,
    ),
    "Pareto": ({"service": qdq.Pareto(3.5), "treatment": qdq.LeastWorkLeft()}, HALF_AND_HALF),
    "LogNormal": (
        {"service": qdq.LogNormal(1.0), "control": qdq.JoinIdleQueue()},
        qdq.Bernoulli(0.3),
    ),
    "Deterministic": (
        {"service": qdq.Deterministic(), "control": qdq.RoundRobin()},
        HALF_AND_HALF,
    ),
    "Periodic": ({"arrivals": qdq.Periodic(0.6, 0.9, 10.0)}, HALF_AND_HALF),
    "information delay": ({"information_delay": 1.0}, HALF_AND_HALF),
    "own dispatches": (
        {"information_delay": 0.5, "dispatch_delay": 1.0, "counts_own_dispatches": True},
        HALF_AND_HALF,
    ),
    "switchback": ({"control": qdq.PowerOfD(1)}, qdq.Switchback(3.0, 0.3)),
    "split": (
        {"n_servers": 5, "service": qdq.Deterministic(), "control": qdq.PowerOfD(1)},
        qdq.ServerSplit(0.4),
    ),
    "all control": ({"control": qdq.JoinShortestQueue()}, qdq.AllControl()),
}


@pytest.mark.parametrize("law", LAWS[:4], ids=str)
@pytest.mark.parametrize("arrivals", ARRIVALS[:2], ids=str)
def test_draws_in_law(arrivals, law):
    # Kolmogorov-Smirnov on 20,000 tasks sees a shift of a distribution function by 0.02.
    scenario = system(n_servers=3, arrivals=arrivals, service=law, service_rates=(1.0, 2.0, 3.0))
    n = 20_000
    log = qdq.simulate(
        scenario, HALF_AND_HALF, n, seed=13, warm_up=0, record=["service_time", "candidates"]
    )
    draws = draw_tasks(scenario, HALF_AND_HALF, n, np.random.default_rng(13))
    requirement = log.service_time * scenario.rates[log.server]
    if isinstance(law, qdq.Deterministic):
        np.testing.assert_allclose(requirement, 1.0, rtol=1e-15)
    else:
        assert stats.ks_2samp(requirement, draws.requirement).pvalue > 1e-4
    gaps, expected_gaps = np.diff(log.arrival), np.diff(draws.arrival)
    assert stats.ks_2samp(gaps, expected_gaps).pvalue > 1e-4
    if isinstance(arrivals, qdq.Periodic):
        phase, expected_phase = log.arrival % arrivals.period, draws.arrival % arrivals.period
        assert stats.ks_2samp(phase, expected_phase).pvalue > 1e-4
    for first, second in itertools.permutations(range(3), 2):
        share = np.mean((log.candidates[:, 0] == first) & (log.candidates[:, 1] == second))
        assert abs(share - 1 / 6) < Z * math.sqrt(5 / 36 / n)
    assert abs(np.mean(log.treated) - 0.5) < Z * 0.5 / math.sqrt(n)


@pytest.mark.parametrize("name", IN_LAW)
def test_mean_response_time_in_law(name):
    fields, design = IN_LAW[name]
    defaults = {
        "n_servers": 4,
        "arrivals": qdq.Poisson(0.6),
        "control": qdq.PowerOfD(2),
        "treatment": qdq.PowerOfD(2 if name == "split" else 4),
    }
    scenario = qdq.Scenario(**(defaults | fields))
    log = qdq.simulate(scenario, design, n_tasks=400_000, seed=12)
    groups = groups_of(log)

    n, burn_in = 9_000, 1_000
    rng = np.random.default_rng(list(IN_LAW).index(name))
    draws = draw_tasks(scenario, design, n, rng, groups)
    response = (simulate_reference(scenario, draws, groups).departure - draws.arrival)[burn_in:]
    treated = draws.treated[burn_in:]

    expected, error = batch_mean(treated)
    value, small_error = batch_mean(log.treated)
    assert abs(value - expected) <= Z * math.hypot(error, small_error)
    for arm in (False, True):
        if arm not in treated:
            assert arm not in log.treated
            continue
        expected, error = batch_mean(response[treated == arm])
        value, small_error = batch_mean(log.response_time[log.treated == arm])
        error = math.hypot(error, small_error)
        assert error < 0.04 * expected  # small enough to see a wrong law or rate
        assert abs(value - expected) < Z * error
