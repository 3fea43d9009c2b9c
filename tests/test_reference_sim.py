"""The reference simulator against traces worked out by hand, and against queueing theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

import qdq
from reference_sim import Draws, Path, draw_tasks, simulate_reference

CONTROL, TREATMENT = False, True


def run(scenario: qdq.Scenario, rows: list[tuple], **more: object) -> Path:
    """Simulate a trace of rows (arrival, requirement, treated, candidates, u)."""
    arrival, requirement, treated, candidates, u = zip(*rows, strict=True)
    draws = Draws(
        np.array(arrival, dtype=float),
        np.array(requirement, dtype=float),
        np.array(treated),
        np.array(candidates),
        np.array(u, dtype=float),
    )
    return simulate_reference(scenario, draws, **more)


def system(**fields: object) -> qdq.Scenario:
    """A scenario whose stability does not matter: only a few tasks go through it."""
    defaults = {"n_servers": 2, "arrivals": qdq.Poisson(0.5), "allow_unstable": True}
    return qdq.Scenario(**(defaults | fields))


def test_a_shared_server_serves_all_at_once():
    # The first still needs 2.5 when the second comes at 1; at half speed each gets 1 until 3, when
    # they need 1.5 and 0.5. At a third of the speed the second leaves at 4.5, when the first needs
    # 1 and the third 1.5; at half speed the first leaves at 6.5, and the third needs 0.5 more.
    scenario = system(
        n_servers=1,
        discipline="processor_sharing",
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(1),
    )
    path = run(
        scenario,
        [
            (0.0, 3.5, CONTROL, (0,), 0.5),
            (1.0, 1.5, CONTROL, (0,), 0.5),
            (3.0, 2.0, CONTROL, (0,), 0.5),
        ],
    )
    np.testing.assert_allclose(path.departure, [6.5, 4.5, 7.0])
    np.testing.assert_allclose(path.work[:, 0], [0.0, 2.5, 2.0])
    np.testing.assert_array_equal(path.start, [0.0, 1.0, 3.0])
    np.testing.assert_array_equal(path.queue_lengths[:, 0], [0, 1, 2])


def test_power_of_d_is_first_come_first_served_and_breaks_ties_by_candidate_order():
    scenario = system(control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
    path = run(
        scenario,
        [
            (0.0, 3.0, TREATMENT, (1, 0), 0.0),  # both empty: candidate 1; served 0 to 3
            (1.0, 1.0, CONTROL, (1, 0), 0.0),  # sees 0, 1; one candidate: 1; served 3 to 4
            (2.0, 2.0, TREATMENT, (1, 0), 0.0),  # sees 0, 2: 0; served 2 to 4
            (4.0, 1.0, TREATMENT, (0, 1), 0.0),  # who leaves at 4 has left; 0; served 4 to 5
            (4.0, 1.0, TREATMENT, (0, 1), 0.0),  # sees the one before: 1, 0: 1; served 4 to 5
            (4.5, 1.0, CONTROL, (0, 1), 0.0),  # sees 1, 1: 0; served 5 to 6
        ],
    )
    assert path.server.tolist() == [1, 1, 0, 0, 1, 0]
    assert path.start.tolist() == [0, 3, 2, 4, 4, 5]
    assert path.departure.tolist() == [3, 4, 4, 5, 5, 6]
    assert path.service_time.tolist() == [3, 1, 2, 1, 1, 1]
    assert path.in_system.tolist() == [0, 1, 2, 0, 1, 2]
    assert path.queue_lengths.tolist() == [[0, 0], [0, 1], [0, 2], [0, 0], [1, 0], [1, 1]]
    assert path.choice_control.tolist() == [1, 1, 1, 0, 0, 0]
    assert path.choice_treatment.tolist() == [1, 0, 0, 0, 1, 0]


def test_shortest_expected_delay_divides_by_the_rate():
    scenario = system(
        service_rates=(1.0, 2.0), control=qdq.PowerOfD(2), treatment=qdq.ShortestExpectedDelay(2)
    )
    path = run(
        scenario,
        [
            (0.0, 2.0, TREATMENT, (0, 1), 0.0),  # 1/1 and 1/2: server 1; takes 1: 0 to 1
            (0.5, 2.0, TREATMENT, (0, 1), 0.0),  # 1/1 and 2/2, a tie: first, 0; takes 2: 0.5 to 2.5
            (0.75, 2.0, TREATMENT, (0, 1), 0.0),  # 2/1 and 2/2: server 1; takes 1: 1 to 2
        ],
    )
    assert path.server.tolist() == [1, 0, 1]
    assert path.departure.tolist() == [1, 2.5, 2]
    assert path.choice_control.tolist() == [0, 0, 0]


DELAYED = [
    (0.0, 5.0, TREATMENT, (0, 1), 0.0),
    (0.5, 1.0, TREATMENT, (0, 1), 0.0),
    (1.0, 1.0, TREATMENT, (0, 1), 0.0),
    (2.5, 1.0, TREATMENT, (0, 1), 0.0),
    (3.0, 1.0, TREATMENT, (0, 1), 0.0),
]


def test_information_delay_shows_the_past():
    path = run(system(information_delay=1.0, treatment=qdq.PowerOfD(2)), DELAYED)
    # Task 0: looks at -1, empty: server 0, 0 to 5.  Task 1: looks at -0.5, empty: server 0, 5 to 6.
    # Task 2: looks at 0, when task 0 had just joined: server 1, 1 to 2.
    # Task 3: looks at 1.5: tasks 0 and 1 at server 0, task 2 at server 1: server 1, 2.5 to 3.5.
    # Task 4: looks at 2: task 2 had just left, task 3 not come: server 1, 3.5 to 4.5.
    assert path.queue_lengths.tolist() == [[0, 0], [0, 0], [1, 0], [2, 1], [2, 0]]
    assert path.server.tolist() == [0, 0, 1, 1, 1]
    assert path.departure.tolist() == [5, 6, 2, 3.5, 4.5]
    assert path.in_system.tolist() == [0, 1, 2, 2, 3]  # the true number, not the seen one


def test_own_dispatches_are_counted_until_they_are_seen():
    scenario = system(information_delay=1.0, counts_own_dispatches=True, treatment=qdq.PowerOfD(2))
    path = run(scenario, DELAYED)
    # Task 1: task 0 is its own: 1, 0: server 1, 0.5 to 1.5.
    # Task 2: looks at 0: task 0 is seen, task 1 its own: 1, 1: server 0, 5 to 6.
    # Task 3: looks at 1.5: tasks 0 and 2 seen at server 0, task 1 just left: server 1, 2.5 to 3.5.
    # Task 4: looks at 2: tasks 0 and 2; task 3 its own: 2, 1: server 1, 3.5 to 4.5.
    assert path.queue_lengths.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert path.server.tolist() == [0, 1, 0, 1, 1]
    assert path.departure.tolist() == [5, 1.5, 6, 3.5, 4.5]


def test_own_dispatch_that_has_left_unseen_is_still_counted():
    scenario = system(information_delay=2.0, counts_own_dispatches=True, treatment=qdq.PowerOfD(2))
    # Task 0 leaves server 0 at 0.5, but at time 1 the dispatcher has not even seen it join.
    path = run(scenario, [(0.0, 0.5, TREATMENT, (0, 1), 0.0), (1.0, 1.0, TREATMENT, (0, 1), 0.0)])
    assert path.queue_lengths.tolist() == [[0, 0], [1, 0]]
    assert path.server.tolist() == [0, 1]
    assert path.in_system.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("own", "server", "departure", "seen"),
    [
        # Task 0 joins server 0 at 1, served 1 to 3.  Task 1 does not see it: server 0, joins at
        # 1.5, served 3 to 4.  Task 2 comes as task 0 joins: 1, 0: server 1, served 2 to 3.
        # Task 3: tasks 0 and 2 have just left: 1, 0: server 1, served 4 to 4.5.
        (False, [0, 0, 1, 1], [3, 4, 3, 4.5], [[0, 0], [0, 0], [1, 0], [1, 0]]),
        # Task 1 knows of task 0: server 1, served 1.5 to 2.5.  Task 2: task 0 seen, task 1 its own:
        # 1, 1: server 0, joins at 2, served 3 to 4.  Task 3: 1, 0: server 1, served 4 to 4.5.
        (True, [0, 1, 0, 1], [3, 2.5, 4, 4.5], [[0, 0], [1, 0], [1, 1], [1, 0]]),
    ],
)
def test_dispatch_delay_is_travel_time(own, server, departure, seen):
    scenario = system(dispatch_delay=1.0, counts_own_dispatches=own, treatment=qdq.PowerOfD(2))
    path = run(
        scenario,
        [
            (0.0, 2.0, TREATMENT, (0, 1), 0.0),
            (0.5, 1.0, TREATMENT, (0, 1), 0.0),
            (1.0, 1.0, TREATMENT, (0, 1), 0.0),
            (3.0, 0.5, TREATMENT, (0, 1), 0.0),
        ],
    )
    assert path.server.tolist() == server
    assert path.departure.tolist() == departure
    assert path.queue_lengths.tolist() == seen
    assert path.in_system.tolist() == [0, 1, 2, 1]  # those on their way are in the system


def test_least_work_left_counts_time_not_tasks():
    scenario = system(service_rates=(1.0, 2.0), treatment=qdq.LeastWorkLeft())
    path = run(
        scenario,
        [
            (0.0, 3.0, TREATMENT, (0, 1), 0.6),  # 0, 0, a tie: floor(1.2) = 1; takes 1.5: 0 to 1.5
            (0.5, 2.0, TREATMENT, (0, 1), 0.0),  # 0, 1: server 0; takes 2: 0.5 to 2.5
            (1.0, 1.0, TREATMENT, (0, 1), 0.0),  # 1.5, 0.5: server 1; takes 0.5: 1.5 to 2
            (1.25, 1.0, TREATMENT, (0, 1), 0.0),  # 1.25, 0.25 + 0.5: server 1; 2 to 2.5
            (2.5, 1.0, TREATMENT, (0, 1), 0.4),  # all left, a tie: floor(0.8) = 0; 2.5 to 3.5
        ],
    )
    assert path.work.tolist() == [[0, 0], [0, 1], [1.5, 0.5], [1.25, 0.75], [0, 0]]
    assert path.server.tolist() == [1, 0, 1, 1, 0]
    assert path.departure.tolist() == [1.5, 2.5, 2, 2.5, 3.5]


def test_work_seen_late_adds_own_dispatches_in_full():
    scenario = system(
        information_delay=0.5, counts_own_dispatches=True, treatment=qdq.LeastWorkLeft()
    )
    path = run(
        scenario,
        [
            (0.0, 2.0, TREATMENT, (0, 1), 0.0),  # server 0: 0 to 2
            (0.25, 1.0, TREATMENT, (0, 1), 0.0),  # own task 0: 2, 0: server 1: 0.25 to 1.25
            (1.0, 0.5, TREATMENT, (0, 1), 0.0),  # as of 0.5: 1.5, 0.75: server 1: 1.25 to 1.75
            (1.25, 0.5, TREATMENT, (0, 1), 0.0),  # as of 0.75: 1.25, 0.5 + own 0.5: server 1
            (1.5, 1.0, TREATMENT, (0, 1), 0.0),  # as of 1: 1, 0.25 + 0.5 + own 0.5: server 0
        ],
    )
    assert path.work.tolist() == [[0, 0], [2, 0], [1.5, 0.75], [1.25, 1.0], [1.0, 1.25]]
    assert path.server.tolist() == [0, 1, 1, 1, 0]
    assert path.departure.tolist() == [2, 1.25, 1.75, 2.25, 3]


def test_join_idle_queue_is_uniform_among_the_idle_else_among_all():
    scenario = system(n_servers=3, control=qdq.JoinShortestQueue(), treatment=qdq.JoinIdleQueue())
    path = run(
        scenario,
        [
            (0.0, 9.0, TREATMENT, (0, 1), 0.5),  # idle 0, 1, 2: floor(1.5) = 1: server 1
            (1.0, 9.0, TREATMENT, (0, 1), 0.5),  # idle 0, 2: floor(1.0) = 1: server 2
            (2.0, 9.0, TREATMENT, (0, 1), 0.99),  # idle 0: server 0
            (3.0, 9.0, TREATMENT, (0, 1), 0.99),  # none idle: floor(2.97) = 2: server 2
            (4.0, 9.0, TREATMENT, (0, 1), 0.99),  # none idle: server 2, though the longest
        ],
    )
    assert path.server.tolist() == [1, 2, 0, 2, 2]
    # Control would join the shortest: tied 0, 1, 2; 0, 2; 0; 0, 1, 2; and at last 1, 1, 2: 0, 1.
    assert path.choice_control.tolist() == [1, 2, 0, 2, 1]


def test_round_robin_has_one_pointer_an_arm_moved_by_its_own_tasks():
    scenario = system(n_servers=3, control=qdq.RoundRobin(), treatment=qdq.RoundRobin())
    arms = [CONTROL, TREATMENT, CONTROL, CONTROL, TREATMENT, CONTROL]
    path = run(scenario, [(i, 1.0, arm, (0,), 0.0) for i, arm in enumerate(arms)])
    assert path.choice_control.tolist() == [0, 1, 1, 2, 0, 0]
    assert path.choice_treatment.tolist() == [0, 0, 1, 1, 1, 2]
    assert path.server.tolist() == [0, 0, 1, 2, 1, 0]


@njit
def last_or_least_loaded(queue_lengths, work, rates, candidates, u):
    if u < 0.5:
        return candidates[-1]
    return np.argmin(work + queue_lengths / rates)


def test_user_policy_gets_what_it_is_promised():
    with pytest.warns(UserWarning, match="stability of a UserPolicy"):
        scenario = system(
            n_servers=3,
            service_rates=(1.0, 2.0, 4.0),
            control=qdq.PowerOfD(1),
            treatment=qdq.UserPolicy(last_or_least_loaded),
        )
    path = run(
        scenario,
        [
            (0.0, 8.0, TREATMENT, (2, 0, 1), 0.0),  # last candidate: server 1; takes 4
            (1.0, 8.0, CONTROL, (2, 0, 1), 0.0),  # first candidate: server 2; takes 2
            (1.5, 9.0, TREATMENT, (0, 1, 2), 0.5),  # 0, 2.5 + 1/2, 1.5 + 1/4: server 0; takes 9
            (2.0, 1.0, TREATMENT, (0, 1, 2), 0.5),  # 8.5 + 1/1, 2 + 1/2, 1 + 1/4: server 2
        ],
    )
    assert path.server.tolist() == [1, 2, 0, 2]
    assert path.departure.tolist() == [4, 3, 10.5, 3.25]


def test_server_split_keeps_each_arm_to_its_servers():
    scenario = system(n_servers=4, control=qdq.JoinShortestQueue(), treatment=qdq.RoundRobin())
    path = run(
        scenario,
        [
            (0.0, 9.0, CONTROL, (2, 0), 0.5),  # 0 and 2 tied: floor(1.0) = 1: server 2
            (1.0, 9.0, TREATMENT, (1, 3), 0.5),  # first of 1, 3
            (2.0, 9.0, CONTROL, (2, 0), 0.9),  # 0 is shorter
            (3.0, 9.0, TREATMENT, (1, 3), 0.0),  # second of 1, 3
            (4.0, 9.0, TREATMENT, (1, 3), 0.0),  # back to 1
        ],
        groups=([0, 2], [1, 3]),
    )
    assert path.server.tolist() == [2, 1, 0, 3, 1]
    assert path.choice_control.tolist() == [2, -1, 0, -1, -1]
    assert path.choice_treatment.tolist() == [-1, 1, -1, 3, 1]


def test_tasks_present_at_the_start_are_served_first():
    path = run(
        system(treatment=qdq.PowerOfD(2)),
        [
            (0.5, 1.0, TREATMENT, (0, 1), 0.0),  # sees 2, 0: server 1: 0.5 to 1.5
            (1.0, 1.0, TREATMENT, (0, 1), 0.0),  # one has left at 1: 1, 1: server 0: 3 to 4
        ],
        present=[(0, -1.0, 1.0), (0, 1.0, 3.0)],
    )
    assert path.queue_lengths.tolist() == [[2, 0], [1, 1]]
    assert path.in_system.tolist() == [2, 2]
    assert path.departure.tolist() == [1.5, 4]


def random_path(seed: int, n: int, **fields: object) -> tuple[Draws, Path]:
    scenario = system(**fields)
    draws = draw_tasks(scenario, qdq.Bernoulli(0.5), n, np.random.default_rng(seed))
    return draws, simulate_reference(scenario, draws)


@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.25)])
def test_number_in_system_and_littles_law(delays):
    draws, path = random_path(
        1,
        500,
        n_servers=3,
        arrivals=qdq.Poisson(0.7),
        information_delay=delays[0],
        dispatch_delay=delays[1],
    )
    for k in range(500):
        assert path.in_system[k] == sum(path.departure[:k] > draws.arrival[k])
    # The integral of the number in system over time is the sum of the response times. Between two
    # arrivals it is that of q_k + 1 tasks, less what those that leave meanwhile miss of it.
    area = 0.0
    ends = np.append(draws.arrival[1:], path.departure.max())
    for k, (start, end) in enumerate(zip(draws.arrival, ends, strict=True)):
        leave = [time for time in path.departure[: k + 1] if start < time <= end]
        area += (path.in_system[k] + 1) * (end - start) - sum(end - time for time in leave)
    assert area == pytest.approx(np.sum(path.departure - draws.arrival), rel=1e-12)


@pytest.mark.parametrize("own", [False, True])
def test_delays_add_up(own):
    fields = {"n_servers": 4, "arrivals": qdq.Poisson(0.8), "counts_own_dispatches": own}
    _, apart = random_path(2, 500, information_delay=0.5, dispatch_delay=0.75, **fields)
    _, at_once = random_path(2, 500, information_delay=1.25, dispatch_delay=0.0, **fields)
    np.testing.assert_array_equal(apart.server, at_once.server)
    np.testing.assert_array_equal(apart.queue_lengths, at_once.queue_lengths)
    np.testing.assert_allclose(apart.departure, at_once.departure + 0.75, rtol=1e-12)


@pytest.mark.parametrize(
    ("law", "second_moment"),
    [
        (qdq.Exponential(), 2.0),
        (qdq.Deterministic(), 1.0),
        (qdq.Pareto(4.0), 4 / 2 * (3 / 4) ** 2),  # shape / (shape - 2) * scale^2
        (qdq.LogNormal(1.5), 1 + 1.5**2),
    ],
)
def test_one_server_is_pollaczek_khinchine(law, second_moment):
    lam, n_batches, size = 0.5, 21, 700
    scenario = qdq.Scenario(
        n_servers=1,
        arrivals=qdq.Poisson(lam),
        service=law,
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(1),
    )
    rng = np.random.default_rng(3)
    draws = draw_tasks(scenario, qdq.Bernoulli(0.5), n_batches * size, rng)
    path = simulate_reference(scenario, draws)
    batches = (path.departure - draws.arrival).reshape(n_batches, size).mean(axis=1)[1:]
    error = np.std(batches, ddof=1) / math.sqrt(n_batches - 1)
    expected = 1 + lam * second_moment / (2 * (1 - lam))
    assert error < 0.05 * expected
    assert abs(np.mean(batches) - expected) < 4.5 * error


def test_draws_follow_the_design():
    rng = np.random.default_rng(4)
    scenario = system(n_servers=4, arrivals=qdq.Periodic(0.5, 1.0, 10.0))
    draws = draw_tasks(scenario, qdq.Switchback(5.0), 4000, rng)
    period = np.floor(draws.arrival / 5.0)
    assert all(len(set(draws.treated[period == j])) == 1 for j in set(period))
    # The rate is 0.5 (1 + sin(2 pi t / 10)) a server: 1/2 + 1/pi of the tasks come in even periods.
    assert np.mean(period % 2 == 0) == pytest.approx(0.5 + 1 / math.pi, abs=0.03)
    split = draw_tasks(scenario, qdq.ServerSplit(), 2000, rng, groups=([0, 3], [1, 2]))
    assert all(set(row) <= {1, 2} for row in split.candidates[split.treated])
    assert all(set(row) <= {0, 3} for row in split.candidates[~split.treated])
    assert np.mean(split.treated) == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(2000))
