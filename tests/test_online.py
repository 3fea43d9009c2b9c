"""Estimates kept up to date: those of `estimate` after the same tasks, whatever way they came."""

from __future__ import annotations

import copy
import math
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qdq
from qdq import OnlineEstimator
from qdq.estimators import METHODS_OF, NORMALISATIONS, VARIANCES

# The logs here are short, and are said to be so.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{doubt}:UserWarning")
    for doubt in ("windows side by side", "the log was cut", "degrees of freedom", "heavy tail")
]

NUMBERS = ["value", "standard_error", "low", "high", "alpha"]
QUEUES = ["in_system", "including_self", "time_average"]


def random_log(n=600, seed=1, **fields):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(size=n))
    return qdq.TaskLog(
        arrival=arrival,
        departure=arrival + rng.gamma(2.0, 3.0, n),
        treated=rng.random(n) < 0.5,
        propensity=0.5,
        **fields,
    )


LOG = random_log()


def columns_of(log):
    return log.arrival, log.departure, log.treated


def assert_same(found, expected):
    pd.testing.assert_frame_equal(found.drop(columns=NUMBERS), expected.drop(columns=NUMBERS))
    for name in NUMBERS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-8, atol=1e-11)


def state_of(online):
    """Return all that an estimator knows, to be compared with what it knows later."""
    return copy.deepcopy({k: v for k, v in vars(online).items() if k != "_sums"}), {
        name: copy.deepcopy(value)
        for name, value in vars(online._sums).items()
        if isinstance(value, (int, float, np.ndarray))
    }


@pytest.mark.parametrize("variance", [None, *VARIANCES])
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_all_at_once_is_the_estimate_of_the_log(normalise, queue, variance):
    options = {"normalise": normalise, "queue": queue, "variance": variance, "level": 0.9}
    online = OnlineEstimator(20, propensity=0.5, **options)
    online.update(*columns_of(LOG))
    assert online.n_tasks == 600
    assert_same(online.result(), qdq.estimate(LOG, horizon=20, **options))


@pytest.mark.parametrize(
    "rate", [None, "estimated", "window", 1.5, lambda t: 1.0 + 0.1 * np.sin(t)]
)
def test_rates_are_those_of_the_estimate(rate):
    online = OnlineEstimator(7, ["dq_queue", "dq_mixed"], arrival_rate=rate)
    online.update(*columns_of(LOG))
    expected = qdq.estimate(LOG, ["dq_queue", "dq_mixed"], 7, arrival_rate=rate)
    assert_same(online.result(), expected)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 600), max_size=12).map(sorted),
    skip=st.integers(0, 50),
    horizon=st.integers(1, 200),
    method=st.sampled_from(METHODS_OF[qdq.Bernoulli]),
    queue=st.sampled_from(QUEUES),
    look=st.booleans(),
)
def test_pieces_do_not_matter(cuts, skip, horizon, method, queue, look):
    """Whatever the pieces, and whether or not somebody looks in between."""
    log = random_log(skip=LOG.arrival[skip] - LOG.arrival[0])
    online = OnlineEstimator(horizon, [method], queue=queue, skip_tasks=skip)
    for begin, end in zip([0, *cuts], [*cuts, 600], strict=True):
        online.update(*(column[begin:end] for column in columns_of(log)))
        assert online.n_tasks == end
        if look and end > horizon + skip + 30:
            online.result()
    assert_same(online.result(), qdq.estimate(log, [method], horizon, queue=queue))


def test_what_is_seen_in_between_is_of_the_tasks_so_far():
    online = OnlineEstimator(20, variance="score")
    done = 0
    for end in (60, 61, 200, 599):
        online.update(*(column[done:end] for column in columns_of(LOG)))
        done = end
        part = qdq.TaskLog(
            arrival=LOG.arrival[:end], departure=LOG.departure[:end], treated=LOG.treated[:end]
        )
        assert_same(online.result(), qdq.estimate(part, horizon=20, variance="score"))
        pd.testing.assert_frame_equal(online.result(), online.result())


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(40)), sizes=st.lists(st.integers(1, 9), min_size=40))
def test_any_order_with_numbers(order, sizes):
    order = np.concatenate([order, np.arange(40, 120)])
    online = OnlineEstimator(5)
    begin, seen = 0, set()
    for size in [*sizes[:20], 120]:
        rows = order[begin : begin + size]
        if rows.size:
            online.update(*(column[rows] for column in columns_of(LOG)), number=rows)
        begin += size
        seen |= set(rows.tolist())
        gapless = next(k for k in range(121) if k not in seen)
        assert online.n_tasks == gapless
    part = qdq.TaskLog(
        arrival=LOG.arrival[:120], departure=LOG.departure[:120], treated=LOG.treated[:120]
    )
    assert_same(online.result(), qdq.estimate(part, horizon=5))


def test_tasks_one_by_one_as_they_are_done():
    """In the order of departure, with numbers, as a running system gives them."""
    online = OnlineEstimator(20)
    for k in np.argsort(LOG.departure):
        online.update(LOG.arrival[k], LOG.departure[k], int(LOG.treated[k]), int(k))
    assert not online._early
    assert_same(online.result(), qdq.estimate(LOG, horizon=20))


def test_arrays_that_change_later_do_not_matter():
    online, rows = OnlineEstimator(20), slice(0, 600)
    arrays = [column[rows].copy() for column in columns_of(LOG)]
    online.update(*arrays)
    for array in arrays:
        array[:] = 0
    assert_same(online.result(), qdq.estimate(LOG, horizon=20))


def test_a_simulated_log_with_a_warm_up_of_tasks():
    scenario = qdq.Scenario(n_servers=4)
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 20_000, seed=3, warm_up=0.0)
    skipped = qdq.TaskLog(
        arrival=log.arrival,
        departure=log.departure,
        treated=log.treated,
        propensity=0.5,
        skip=log.arrival[500] - log.arrival[0],
    )
    online = OnlineEstimator(80, skip_tasks=500)
    for k in range(0, 20_000, 3_333):
        online.update(*(column[k : k + 3_333] for column in columns_of(log)))
    assert_same(online.result(), qdq.estimate(skipped, horizon=80))


def test_memory_does_not_grow():
    def size_of(thing, seen):
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        total = thing.nbytes if isinstance(thing, np.ndarray) else sys.getsizeof(thing)
        if isinstance(thing, dict):
            parts = [*thing, *thing.values()]
        elif isinstance(thing, (list, tuple)):
            parts = list(thing)
        elif hasattr(thing, "__dict__"):
            parts = list(vars(thing).values())
        else:
            parts = []
        return total + sum(size_of(part, seen) for part in parts)

    rng = np.random.default_rng(4)
    online = OnlineEstimator(300)
    sizes = []
    time = 0.0
    for _ in range(40):
        arrival = time + np.cumsum(rng.exponential(size=50_000))
        time = arrival[-1]
        departure = arrival + rng.exponential(5.0, 50_000)
        online.update(arrival, departure, rng.random(50_000) < 0.5)
        online.result()
        sizes.append(size_of(online, set()))
    assert online.n_tasks == 2_000_000
    assert max(sizes[1:]) < sizes[0] + 20_000  # in bytes; 2,000,000 tasks take 34 MB
    assert max(sizes) < 6_000_000


REFUSED = {
    "arrivals out of order": (
        ((9e9, 8e9), (9e9, 9e9), (0, 1)),
        {},
        "arrival=8000000000 comes after one at 9000000000: tasks must be in the order of arrival",
    ),
    "arrival before the last one": (((0.5,), (6.0,), (0,)), {}, "arrival=0.5.* comes after one at"),
    "departure too early": (((9e9, 9e9), (9e9, 8e9), (0, 1)), {}, "is before the arrival"),
    "arrival not finite": (((math.nan,), (1.0,), (0,)), {}, "arrival=.*nan.* must be finite"),
    "departure not finite": (((9e9,), (math.inf,), (0,)), {}, "departure=.*inf.* must be finite"),
    "arrival no number": ((("now",), (1.0,), (0,)), {}, "arrival=.* is not a number"),
    "treated 2": (((9e9,), (9e9,), (2,)), {}, "treated=.* must be True or False, or 1 or 0"),
    "treated text": (((9e9,), (9e9,), ("no",)), {}, "treated=.* is not allowed"),
    "lengths": (((9e9, 9e9), (9e9,), (0,)), {}, "must be of one length"),
    "number came before": (((9e9,), (9e9,), (0,)), {"number": 3}, "number=3 came before"),
    "number below 0": (((9e9,), (9e9,), (0,)), {"number": -1}, "number=-1 came before"),
    "number twice": (
        ((9e9, 9e9), (9e9, 9e9), (0, 1)),
        {"number": [700, 700]},
        "number=700 came before",
    ),
    "number a fraction": (((9e9,), (9e9,), (0,)), {"number": 600.5}, "must hold an integer a task"),
    "numbers too few": (
        ((9e9, 9e9), (9e9, 9e9), (0, 1)),
        {"number": [600]},
        "must hold an integer a task",
    ),
    "order wrong by numbers": (
        ((1e9, 9e8), (9e9, 9e9), (0, 1)),
        {"number": [600, 601]},
        "arrival=900000000 comes after one at",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_all_as_it_was(case):
    columns, options, message = REFUSED[case]
    online = OnlineEstimator(20)
    online.update(*columns_of(LOG))
    before = state_of(online)
    with pytest.raises((TypeError, ValueError), match=message):
        online.update(*(np.array(column) for column in columns), **options)
    after = state_of(online)
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name in old:
            np.testing.assert_equal(new[name], old[name])
    assert online.n_tasks == 600
    assert_same(online.result(), qdq.estimate(LOG, horizon=20))


def test_tasks_that_wait_outlive_a_refusal():
    online = OnlineEstimator(20)
    online.update(5.0, 6.0, 1, 1)
    with pytest.raises(ValueError, match="arrival=5 comes after one at 7"):
        online.update([7.0, 9.0], [8.0, 9.0], [0, 0], [0, 2])
    assert list(online._early) == [1]
    online.update([4.0, 9.0], [8.0, 9.0], [0, 0], [0, 2])
    assert online.n_tasks == 3


def test_numbers_must_go_on_while_a_task_waits():
    online = OnlineEstimator(20)
    online.update(1.0, 2.0, 1, 1)
    assert online.n_tasks == 0
    with pytest.raises(ValueError, match="number=None after tasks with numbers"):
        online.update(3.0, 4.0, 0)
    online.update(0.5, 9.0, 0, 0)
    assert online.n_tasks == 2
    online.update(3.0, 4.0, 0)
    assert online.n_tasks == 3


def test_nothing_at_all_may_come():
    online = OnlineEstimator(20)
    online.update(*(column[:0] for column in columns_of(LOG)))
    assert online.n_tasks == 0
    with pytest.raises(ValueError, match="there are 0 tasks yet, too few for an estimate"):
        online.result()
    online.update(*(column[:10] for column in columns_of(LOG)))
    with pytest.raises(ValueError, match="windows of horizon 20 begin with a control task"):
        online.result()
    assert list(OnlineEstimator(3, ["naive"])._call.methods) == ["naive"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"horizon": 0}, ValueError, "horizon=0 is not allowed: horizon must be a number of arri"),
        ({"horizon": "rmse"}, TypeError, "horizon='rmse' is not an integer"),
        ({"methods": "naive"}, TypeError, "methods='naive' is one name"),
        ({"methods": ["switchback"]}, ValueError, "methods='switchback' is not allowed"),
        ({"queue": "waiting"}, ValueError, "queue='waiting' .* it needs the starts of service"),
        ({"arrival_rate": "scenario"}, ValueError, "arrival_rate='scenario' .* there is none here"),
        ({"normalise": "ipw"}, ValueError, "normalise='ipw' is not allowed"),
        ({"normalise": "inverse_propensity"}, ValueError, "needs the known probability"),
        ({"variance": "bootstrap"}, ValueError, "variance='bootstrap' is not allowed"),
        ({"level": 1.0}, ValueError, "level=1.0 is not allowed"),
        ({"propensity": 1.0}, ValueError, "propensity=1.0 is not allowed"),
        ({"skip_tasks": -1}, ValueError, "skip_tasks=-1 is not allowed"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(options, kind, message):
    with pytest.raises(kind, match=message):
        OnlineEstimator(**{"horizon": 5} | options)
