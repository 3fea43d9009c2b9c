"""What a log shows of its servers; the estimates that use it test the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import qdq
from qdq import rebuild

ONE, TWO = qdq.PowerOfD(1), qdq.PowerOfD(2)
SMALL = qdq.Scenario(n_servers=4, arrivals=qdq.Poisson(0.7), control=ONE, treatment=TWO)


@pytest.fixture(scope="module")
def log():
    return qdq.simulate(SMALL, qdq.Bernoulli(), n_tasks=6_000, seed=1, record=("candidates",))


def outside(log, **fields):
    nothing = {"scenario": None, "seed": None, "warm_up": None, "design": None}
    return replace(log, **(nothing | {"carried_over": np.empty((0, 3))} | fields))


def who(log, n_servers=None):
    return rebuild.servers(log, n_servers, stacklevel=1)


def test_the_number_of_servers_is_the_logs_then_its_scenarios_then_as_many_as_occur(log):
    assert who(outside(log, n_servers=9)).number == 9
    assert who(replace(log, n_servers=None)).number == 4
    with pytest.warns(UserWarning, match=r"taken to be 4, as many as occur: give n_servers$"):
        assert who(outside(log, n_servers=None)).number == 4
    assert who(outside(log, n_servers=None), 6).number == 6
    with pytest.raises(ValueError, match=r"n_servers=6 is not allowed.*the log's own, 4, or None"):
        who(log, 6)
    with pytest.raises(ValueError, match=r"n_servers=3 is not allowed.*at least 4, as many"):
        who(outside(log, n_servers=None), 3)


def test_servers_of_other_numbers_are_numbered_anew(log):
    far = outside(log, n_servers=None, server=10 * log.server, candidates=10 * log.candidates)
    with pytest.warns(UserWarning, match="to be 4, as many as occur, numbered anew in their order"):
        found = who(far)
    for each in (found, who(far, 4)):
        assert_array_equal(each.joined, log.server)
        assert_array_equal(each.candidates, log.candidates)
    with pytest.raises(ValueError, match="names server 30: servers must be numbered from 0 to 3"):
        who(replace(far, scenario=SMALL))


def test_queues_at_joining_count_those_who_were_there_before(log):
    assert len(log.carried_over) > 0
    found = rebuild.queue_at_joining(log, who(log), 0.0)
    for k in range(60):
        earlier = log.departure[:k][log.server[:k] == log.server[k]]
        before = log.carried_over[log.carried_over[:, 0] == log.server[k], 2]
        assert found[k] == np.sum(np.concatenate((earlier, before)) > log.arrival[k])


def test_rates_of_servers_that_take_the_same_time_for_all_are_equal():
    scenario = SMALL.replace(service=qdq.Deterministic())
    log = qdq.simulate(scenario, qdq.Bernoulli(), n_tasks=2_000, seed=1)
    time = log.departure - rebuild.start_of_service(log, who(log), 0.0)
    assert np.ptp(time) > 0.0  # rounding
    assert np.ptp(rebuild.rates(who(log), time).rate) == 0.0


def test_t_of_what_requirements_must_not_depend_on(log):
    rng = np.random.default_rng(1)
    time, queue = rng.exponential(size=log.n_tasks), rng.integers(0, 4, log.n_tasks)
    # The rates that are found are equal, so relative to the mean is in proportion.
    assert np.ptp(rebuild.rates(who(log), time).rate) == 0.0
    relative = time / rebuild.rates(who(log), time).mean[log.server]
    for part in (slice(100, 450), slice(0, 500)):
        found = rebuild.exogeneity(log, who(log), time, queue, part)
        for name, other in {"queue": queue, "arm": log.treated}.items():
            r = np.corrcoef(relative[part], other[part])[0, 1]
            assert found[name] == pytest.approx(r * np.sqrt(part.stop - part.start))
        second = max(part.start, 1)
        mine, before = relative[second : part.stop], relative[second - 1 : part.stop - 1]
        r = np.corrcoef(mine, before)[0, 1]
        assert_allclose(found["previous"], r * np.sqrt(mine.size))
    same = np.ones(log.n_tasks)
    assert rebuild.exogeneity(log, who(log), same, queue, slice(0, 500)) == {}


def in_ticks(log, tick, lengths):
    """Return the log with times in whole ticks, departures from cut lengths or cut themselves."""
    arrival = np.floor(log.arrival / tick)
    length = np.floor(log.response_time / tick)
    departure = arrival + length if lengths else np.floor(log.departure / tick)
    order = np.lexsort((departure, arrival))  # as where lines are written at completion
    return qdq.TaskLog(
        arrival=tick * arrival[order],
        departure=tick * departure[order],
        treated=log.treated[order],
        server=log.server[order],
        n_servers=log.n_servers,
    )


@pytest.mark.parametrize("tick", [0.01, 0.04, 0.1, 1.0 / 3.0])
@pytest.mark.parametrize("lengths", [False, True])
def test_the_tick_of_a_clock_is_found_and_explains_overtaking(log, tick, lengths):
    coarse = in_ticks(log, tick, lengths)
    found = who(coarse)
    assert found.tick == pytest.approx(tick, rel=1e-9)
    start = rebuild.start_of_service(coarse, found, 0.0)
    assert rebuild.overtaken(coarse, start, found.tick) <= rebuild.MOST_OVERTAKEN
    assert not lengths or rebuild.overtaken(coarse, start, 0.0) > 0.0


def test_times_of_full_precision_have_no_tick(log):
    assert rebuild.tick(log) == rebuild.tick(outside(log)) == 0.0
