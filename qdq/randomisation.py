"""A test of no effect at all, from the randomisation of the experiment alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdq import estimators, inference, validation
from qdq.designs import Bernoulli, Switchback
from qdq.estimators import ArrivalRate, Call
from qdq.tasklog import TaskLog

_METHODS = (*estimators.METHODS_OF[Bernoulli], *estimators.METHODS_OF[Switchback])
_DRAWS_AT_ONCE = 1 << 22  # labels held at a time


@dataclass(frozen=True, kw_only=True)
class RandomisationTest:
    """What `randomisation_test` found.

    Attributes
    ----------
    method : str
    value : float
        The estimate of the log, treated minus control.
    p_value : float
        Share of the assignments, that of the log among them, whose estimate is as far from zero.
    draws : int
        Assignments drawn.
    """

    method: str
    value: float
    p_value: float
    draws: int


def randomisation_test(
    log: TaskLog,
    method: str = "dq_mixed",
    *,
    horizon: int | None = None,
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    washout: float = 0.0,
    draws: int = 999,
    seed: int = 0,
) -> RandomisationTest:
    """Test that the arm of a task changes nothing at all, for it or for any other task.

    If it does not, responses and queues would have been the same under every assignment, so that
    the estimates of other assignments, drawn as the experiment's was, show what chance does. The
    test is exact whatever the arrivals, service times and their dependence; it needs no standard
    error. It is a check, not an interval: an effect of any kind may make it reject.

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment or a switchback, or from outside.
    method : {"naive", "dq_response", "dq_queue", "dq_mixed", "switchback"}, default "dq_mixed"
        What to estimate, with group means; the weight of the mixture is found anew in every draw.
    horizon, queue, arrival_rate, washout
        As for `estimate`.
    draws : int, default 999
        Assignments to draw, >= 19. With the log's known propensity each task (period) is treated
        with it, else labels are shuffled.
    seed : int, default 0
        Seed of the draws, >= 0.

    Returns
    -------
    RandomisationTest

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; as `estimate`.

    Examples
    --------
    >>> import qdq
    >>> log = qdq.simulate(qdq.Scenario(n_servers=4), qdq.Bernoulli(0.5), n_tasks=5000, seed=1)
    >>> qdq.randomisation_test(log, "naive", draws=99).p_value
    0.01
    """
    estimators.check_choice("method", method, _METHODS)
    draws = validation.integer("draws", draws, "a number of assignments >= 19", at_least=19)
    seed = validation.integer("seed", seed, "an integer >= 0", at_least=0)
    # All arguments are checked here, and the log's own estimate is of the code that all use.
    (own,) = estimators.estimates_of(
        log,
        [method],
        horizon=horizon,
        queue=queue,
        arrival_rate=arrival_rate,
        washout=washout,
    )
    if own.rule is not None:
        raise ValueError(
            f"horizon={horizon!r} lets the log choose, by arms that the test draws anew: give a "
            "number of arrivals"
        )
    if method == "switchback":
        treated, values = _periods(log, washout)
    else:
        call = Call((method,), own.horizon, "group_means", queue, arrival_rate)
        treated, values = _units(log, call)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    far = 0
    left = draws
    at_once = max(1, _DRAWS_AT_ONCE // treated.size)
    while left:
        rows = min(at_once, left)
        labels = _labels(treated, log.propensity, rows, rng)
        far += int(
            np.sum(np.abs(_estimates(method, labels, values)) >= abs(own.value) * (1 - 1e-9))
        )
        left -= rows
    return RandomisationTest(
        method=method, value=own.value, p_value=(far + 1) / (draws + 1), draws=draws
    )


def _units(log: TaskLog, call: Call) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the labels of the tasks or windows, and their response and queue, shape (n, 2)."""
    first = log.first_counted
    if call.horizon is None:
        response = log.response_time[first:]
        return log.treated[first:], np.column_stack((response, np.zeros(response.size)))
    columns = estimators.truncated_sums(log, call)
    return log.treated[first : first + len(columns)], columns


def _periods(log: TaskLog, washout: float) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the labels of the whole periods, and their tasks and summed response."""
    period, kept = estimators.kept_of_periods(log, washout)
    kept &= period != period[-1]
    names, index = np.unique(period[kept], return_inverse=True)
    tasks = np.bincount(index, minlength=names.size).astype(np.float64)
    response = np.bincount(index, log.response_time[kept], minlength=names.size)
    treated = np.zeros(names.size, np.bool_)
    treated[index] = log.treated[kept]
    return treated, np.column_stack((tasks, response))


def _labels(
    treated: NDArray[np.bool_], propensity: float | None, rows: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw assignments, shape (rows, n), with both arms in each."""
    if propensity is None:
        return rng.permuted(np.broadcast_to(treated, (rows, treated.size)), axis=1)
    labels = rng.random((rows, treated.size), dtype=np.float32) < propensity
    # The estimators need two of each arm; the log, which had them, is one of the assignments.
    enough = np.minimum(labels.sum(axis=1), (~labels).sum(axis=1)) >= 2
    for row in np.flatnonzero(~enough):
        labels[row] = treated
    return labels


def _estimates(
    method: str, labels: NDArray[np.bool_], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the estimate under each of the assignments."""
    arms: Any = (~labels, labels)
    if method == "switchback":
        totals = [arm.astype(np.float64) @ values for arm in arms]
        means = [total[:, 1] / total[:, 0] for total in totals]
        return np.asarray(means[1] - means[0], np.float64)
    origin = values.mean(axis=0)
    x, y = (values - origin).T
    columns = np.column_stack((np.ones(x.size), x, y, x * x, y * y, x * y))
    sums = np.stack([arm.astype(np.float64) @ columns for arm in arms], axis=1)
    weight = {"dq_queue": 0.0, "dq_mixed": None}.get(method, 1.0)
    found = np.empty(len(labels))
    for k, both in enumerate(sums):
        contrast = inference.difference_in_sums(both, origin)
        found[k] = contrast.mixture(contrast.best_weight if weight is None else weight)
    return found
