"""Checks of a log, and what speaks against the estimates made from it.

The bounds below which a check passes are ours; its figures stand beside it, so that readers can
judge by others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qdq import inference
from qdq.designs import Bernoulli, ServerSplit
from qdq.scenario import Pareto
from qdq.tasklog import TaskLog

if TYPE_CHECKING:
    from qdq.estimators import Estimate

SUSPICIOUS_RATIO = 0.001  # p-value; intended and found shares of treatment
SUSPICIOUS_DRAW = 0.001  # p-value; arms drawn independently of each other
SUSPICIOUS_RATE = 0.01  # p-value; constant arrival rate
SUSPICIOUS_FEEDBACK = 0.0001  # p-value; arrivals that wait for a shorter queue
SUSPICIOUS_END = 0.001  # p-value; tasks missing at the end of the log
SUSPICIOUS_SHARE = 0.05  # of all response time, in the largest 0.1 % of tasks
SUSPICIOUS_TAIL = 4.0  # tail index; intervals rest on fourth moments
SUSPICIOUS_UNLOGGED = 0.005  # of the number in system, in tasks that the log lacks
SUSPICIOUS_EDGE = 0.01  # of all response time, beyond the log's ends
FEW_HORIZONS = 200  # windows side by side
FEW_TERMS = 5  # degrees of freedom of a standard error

# Lags at which arms are compared.
_LAGS = 64
# Of fewer tasks the largest say little of the tail: 20 of them are no small part.
_TAIL_TASKS = 400


def by_task(log: TaskLog) -> bool:
    """Whether the arm was drawn for each task by itself."""
    return isinstance(log.design, Bernoulli) or (log.design is None and log.period is None)


def unit_of(log: TaskLog) -> tuple[float, str, str]:
    """Return the scale that times are shown in, its unit's short name, and how to speak of it."""
    if log.time_unit == "s":
        return 1000.0, "ms", "ms"
    return 1.0, log.time_unit or "", log.time_unit or "the file's unit"


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def checks(log: TaskLog) -> dict[str, dict[str, Any]]:
    """Check a log for what the estimators suppose.

    Parameters
    ----------
    log : TaskLog
        Whose arrivals are not all at the same time, nor its response times all zero.

    Returns
    -------
    dict of dict
        Each with the figures of a check and ``passed`` (None: it could not be made):

        - ``sample_ratio``: the share of treated tasks is the intended one;
        - ``independent_arms``: the arm of a task says nothing of those of the next 64, as it does
          if it is drawn for each user, or in turns;
        - ``constant_rate``: arrivals are Poisson at a constant rate;
        - ``feedback``: the time to the next arrival is no longer after one that finds many tasks;
        - ``littles_law``: the log's ends, and tasks that it lacks, weigh little;
        - ``complete_end``: no tasks are missing at the end, as they are if the log was cut while
          they were running;
        - ``tail``: the largest response times do not decide the result.
    """
    return {
        "sample_ratio": _sample_ratio(log),
        "independent_arms": _independent_arms(log),
        "constant_rate": _constant_rate(log),
        "feedback": _feedback(log),
        "littles_law": _littles_law(log),
        "complete_end": _complete_end(log),
        "tail": _tail(log),
    }


def _sample_ratio(log: TaskLog) -> dict[str, Any]:
    p = None
    if log.propensity is not None and by_task(log):
        treated = int(np.count_nonzero(log.treated))
        p = inference.sample_ratio_p_value(treated, log.n_tasks, log.propensity)
    return _by_p_value(p, SUSPICIOUS_RATIO, propensity=log.propensity)


def _independent_arms(log: TaskLog) -> dict[str, Any]:
    """Test the correlations of arms at lags 1 to 64 together (Ljung and Box)."""
    from scipy.special import chdtrc  # here, so that importing qdq stays quick

    found = {"lags": None, "largest_correlation": None}
    z = log.treated - log.treated.mean()
    n, square = z.size, float(z @ z)
    if not by_task(log) or n < 4 * _LAGS or square == 0.0:
        return _by_p_value(None, SUSPICIOUS_DRAW, **found)
    transform = np.fft.rfft(z, n=1 << (n + _LAGS).bit_length())
    correlation = np.fft.irfft(np.abs(transform) ** 2)[1 : _LAGS + 1] / square
    weights = n * (n + 2.0) / (n - np.arange(1, _LAGS + 1))
    p = float(chdtrc(_LAGS, weights @ correlation**2))
    largest = float(correlation[np.argmax(np.abs(correlation))])
    return _by_p_value(p, SUSPICIOUS_DRAW, lags=_LAGS, largest_correlation=largest)


def _constant_rate(log: TaskLog) -> dict[str, Any]:
    test = inference.constant_rate(log.arrival)
    if test is None:
        return dict.fromkeys((*inference.RateTest._fields, "passed"))
    return test._asdict() | {"passed": test.p_value >= SUSPICIOUS_RATE}


def _feedback(log: TaskLog) -> dict[str, Any]:
    """Test whether the next arrival takes longer after one that finds more tasks.

    Gaps of Poisson arrivals do not know the queue. A rate that varies makes them shorter where
    queues are long, and clients that wait for their answers make them longer.
    """
    from scipy.special import ndtr

    found = inference.found_on_arrival(log.arrival, log.departure, log.carried_over[:, 2])[:-1]
    gap = np.diff(log.arrival)
    if gap.size < 100 or np.ptp(gap) == 0.0 or np.ptp(found) == 0:
        return _by_p_value(None, SUSPICIOUS_FEEDBACK, correlation=None)
    correlation = float(np.corrcoef(found, gap)[0, 1])
    p = float(ndtr(-correlation * math.sqrt(gap.size)))
    return _by_p_value(p, SUSPICIOUS_FEEDBACK, correlation=correlation)


def _littles_law(log: TaskLog) -> dict[str, Any]:
    carried = log.carried_over[:, 2]
    law = inference.littles_law(log.arrival, log.departure, log.in_system, carried)
    means = inference.littles_law_means(log.arrival, log.departure, carried)
    seen = log.in_system is not None
    complete = bool(abs(law.unlogged) < SUSPICIOUS_UNLOGGED and abs(law.edge) < SUSPICIOUS_EDGE)
    return {
        "source": "in_system" if seen else "logged tasks",
        "number_in_system": law.number_in_system,
        "number_in_system_error": means.number_in_system.standard_error,
        "rate_times_response": law.rate_times_response,
        "relative_difference": law.number_in_system / law.rate_times_response - 1.0,
        "edge": law.edge,
        "unlogged": law.unlogged if seen else None,
        "found_on_arrival": law.found_on_arrival,
        "passed": complete,
    }


def _complete_end(log: TaskLog) -> dict[str, Any]:
    """Test whether the log was cut while tasks were running.

    Then the tasks that were still running are missing, and arrivals thin out towards the last one
    that is there. In a whole log they come as before up to the last one, whether or not the queues
    ran empty after it. So of the arrivals in the last 21 mean responses a share of 1/21 is expected
    in the last of these.
    """
    from scipy.special import bdtr

    mean = float(log.response_time.mean())
    found = {"expected": None, "arrived": None}
    back = log.arrival[-1] - log.arrival
    if log.scenario is not None or back[0] < 21.0 * mean:
        return _by_p_value(None, SUSPICIOUS_END, **found)
    # Without the last one itself, up to which time is counted.
    arrived, since = (int(np.count_nonzero(back < k * mean)) - 1 for k in (1.0, 21.0))
    expected = (since - arrived) / 20.0
    if expected < 25.0:
        return _by_p_value(None, SUSPICIOUS_END, **found)
    p = float(bdtr(arrived, since, 1.0 / 21.0))
    return _by_p_value(p, SUSPICIOUS_END, expected=expected, arrived=arrived)


def _tail(log: TaskLog) -> dict[str, Any]:
    response = log.response_time
    share = inference.share_of_largest(response)
    index, error = inference.hill_index(response)
    light: bool | None = share < SUSPICIOUS_SHARE and index + 2.0 * error >= SUSPICIOUS_TAIL
    if log.n_tasks < _TAIL_TASKS:
        light = None
    return {
        "share_of_largest_thousandth": share,
        "hill_index": index,
        "hill_index_error": error,
        "passed": light,
    }


def _by_p_value(p: float | None, bound: float, **figures: Any) -> dict[str, Any]:
    return figures | {"p_value": p, "passed": None if p is None else p >= bound}


# --------------------------------------------------------------------------------------------------
# Warnings
# --------------------------------------------------------------------------------------------------


def doubts(log: TaskLog, estimates: Sequence[Estimate]) -> list[str]:
    """Return what makes the intervals of some estimates doubtful, in short.

    Parameters
    ----------
    log : TaskLog
    estimates : sequence of Estimate
        Made from it.

    Returns
    -------
    list of str
        What is known of the scenario of a simulated log, or found in one from outside.
    """
    said = []
    names = {estimate.method for estimate in estimates}
    if log.scenario is not None:
        service = log.scenario.service
        if isinstance(service, Pareto) and service.shape <= SUSPICIOUS_TAIL + 1.0:
            said.append(
                f"response times need not have a fourth moment with {service!r}: standard errors "
                "and intervals may be too small"
            )
    elif log.n_tasks > 1 and np.ptp(log.arrival) > 0.0 and log.response_time.any():
        said += _doubts_of_outside(log, names)
    for estimate in estimates:
        if math.isnan(estimate.standard_error) and isinstance(log.design, ServerSplit):
            said.append(
                f"{estimate.method} has no standard error, as the servers of its groups differ"
            )
        elif log.scenario is None and estimate.degrees_of_freedom < FEW_TERMS:
            said.append(
                f"the log is short against the memory of its queues: the standard error of "
                f"{estimate.method} has {estimate.degrees_of_freedom:g} degrees of freedom"
            )
        if estimate.horizon is not None:
            windows = estimate.n_used / estimate.horizon
            if windows < FEW_HORIZONS and log.scenario is None:
                said.append(
                    f"{estimate.method} has {windows:.0f} windows side by side of horizon "
                    f"{estimate.horizon}: {FEW_HORIZONS} are advised"
                )
    return said


def _doubts_of_outside(log: TaskLog, names: set[str]) -> list[str]:
    said = []
    if _independent_arms(log)["passed"] is False:
        said.append(
            "the arms of neighbouring tasks are correlated, so they were not drawn task by task: "
            "standard errors are too small, and the DQ methods biased"
        )
    if names & {"dq_queue", "dq_mixed"} and _constant_rate(log)["passed"] is False:
        said.append(
            "arrivals are not Poisson at a constant rate: queue='time_average' needs no rate"
        )
    if _feedback(log)["passed"] is False:
        said.append(
            "arrivals are slower when queues are long, as of clients that wait for answers: the "
            "effect on their rate is left out of every estimate"
        )
    if _complete_end(log)["passed"] is False:
        said.append("the log was cut while tasks were running: the longest are missing at its end")
    tail = _tail(log)
    if tail["passed"] is False:
        said.append(
            f"response times have a heavy tail (index {tail['hill_index']:.2g}): standard errors "
            "and intervals may be too small"
        )
    return said


# --------------------------------------------------------------------------------------------------
# Advice
# --------------------------------------------------------------------------------------------------


def advice(
    log: TaskLog, known: dict[str, Any], checks: dict[str, Any], rows: list[dict[str, Any]]
) -> list[str]:
    """Return what speaks against the estimates, the weightiest first.

    Parameters
    ----------
    log : TaskLog
    known : dict
        Of the log: ``treated_share``, ``load`` (or None) and ``longest_response``.
    checks : dict of dict
        As `checks` returns them.
    rows : list of dict
        Rows of the frame of `estimate`.

    Returns
    -------
    list of str
        Sentences.
    """
    estimates = {row["method"]: row for row in rows}
    mixed = estimates.get("dq_mixed")
    said = []
    if checks["sample_ratio"]["passed"] is False:
        said.append(
            f"The share of treated tasks, {known['treated_share']:.4g}, is not what was intended, "
            f"{log.propensity:.4g}. Find out why before you read on: whatever lost or moved tasks "
            "of one arm biases every estimate."
        )
    if checks["independent_arms"]["passed"] is False:
        correlation = checks["independent_arms"]["largest_correlation"]
        said.append(
            "Arms were not drawn task by task: those of neighbouring tasks are correlated (up to "
            f"{correlation:+.2g}), as when a user keeps an arm, or arms take turns. Standard "
            "errors are then too small, and the DQ methods take one decision for another."
        )
    if mixed is not None:
        load = "" if known["load"] is None else f" (the load here is {known['load']:.2f})"
        said.append(
            "The DQ estimates aim at the slope of the mean response at the present share of "
            "treatment, followed over the horizon, and not at the effect of full deployment. Where "
            f"the mean response bends with the share, as it does at high load{load}, they may miss "
            "much of the effect, and no longer log mends that."
        )
        said.append(
            "The naive estimate compares tasks that met the same queues. It leaves out what each "
            "arm does to the queues, and its interval does not allow for that."
        )
        naive = estimates["naive"]
        apart = abs(mixed["value"] - naive["value"])
        if mixed["standard_error"] == 0.0:
            said.append(
                "The mixed estimate has a standard error of zero: the windows of an arm are all "
                "alike, so this log cannot show an effect, nor how far off the estimate is."
            )
        elif mixed["low"] <= naive["value"] <= mixed["high"]:
            said.append(
                "This log cannot tell the mixed estimate from the naive one: they differ by "
                f"{apart / mixed['standard_error']:.1f} standard errors of the mixed one. The "
                "standard error falls with the root of the number of tasks, and grows with the "
                "horizon."
            )
        if not 0.0 <= mixed["alpha"] <= 1.0:
            said.append(
                f"The mixture extrapolates: its weight of the response is {mixed['alpha']:.2f}, "
                "outside 0 to 1. Its bias then need not lie between those of its parts."
            )
        horizons = mixed["n_used"] / mixed["horizon"]
        if horizons < FEW_HORIZONS:
            said.append(
                f"The log is short: {horizons:.0f} horizons side by side, and the intervals hold "
                "for many."
            )
    rate, little = checks["constant_rate"], checks["littles_law"]
    if rate["passed"] is False:
        constant = any(row["arrival_rate"] for row in rows)
        said.append(
            f"Arrivals are not Poisson at a constant rate: counts in {rate['bins']} bins vary "
            f"{rate['dispersion']:.3g} times as much as they should (a rate that varies by "
            f"{100 * rate['variation']:.2g} %, or bursts)."
        )
        if constant:
            said[-1] += (
                " Arrivals then oversample busy times (they found "
                f"{little['found_on_arrival']:.4g} tasks, the time average is "
                f"{little['number_in_system']:.4g}) and dq_queue is biased: use --queue "
                "time_average, which needs no rate."
            )
    if checks["feedback"]["passed"] is False:
        said.append(
            "Arrivals come more slowly when queues are long, as of clients that wait for an answer "
            "before they ask again. Then the policy changes the arrivals too, which every estimate "
            "leaves out."
        )
    tail = checks["tail"]
    if tail["passed"] is False:
        said.append(
            f"Response times have a heavy tail: the largest 0.1 % of tasks hold "
            f"{100 * tail['share_of_largest_thousandth']:.1f} % of all response time, and their "
            f"tail index is {tail['hill_index']:.2g} ({tail['hill_index_error']:.1g}). A few tasks "
            "can decide the result, and the intervals are likely to be too short."
        )
    if little["unlogged"] is not None and abs(little["unlogged"]) >= SUSPICIOUS_UNLOGGED:
        said.append(
            f"Of the tasks that were counted in the system, {100 * little['unlogged']:.2g} % are "
            "not in the log: lines were lost, or the log was cut out of running traffic."
            if little["unlogged"] > 0.0
            else "Fewer tasks were counted in the system than the log holds: its column in_system "
            "counts something else, or departures are logged late."
        )
    if abs(little["edge"]) >= SUSPICIOUS_EDGE:
        said.append(
            f"The log's ends weigh {100 * abs(little['edge']):.2g} % of all response time: it is "
            "short against the response times, or was cut."
        )
    end = checks["complete_end"]
    if end["passed"] is False:
        said.append(
            f"Before the end of the log {end['arrived']} tasks arrived where "
            f"{end['expected']:.0f} were to be expected: it was cut while tasks were running. "
            "Leave out the last stretch, as long as the longest response time."
        )
    if log.scenario is None and log.skip == 0.0:
        scale, unit, _ = unit_of(log)
        longest = f"{scale * known['longest_response']:.4g} {unit}".rstrip()
        said.append(
            "The log is taken to start with an empty system, and nothing was skipped. If it did, "
            "leave out the time until queues were as usual (--skip); if traffic was running, at "
            f"least the longest response time, {longest}."
        )
    if mixed is not None and log.in_system is None and log.scenario is None:
        said.append(
            "Tasks that other load balancers send to the same servers are not in the log, and "
            "without the column in_system none of the checks can see them. They bias qDQ and the "
            "mixture, which count the tasks in the system."
        )
    if mixed is not None and known["load"] is None:
        said.append(
            "The load is not known (it takes the columns service_time and server): judge for "
            "yourself how near to saturation the servers were."
        )
    return said
