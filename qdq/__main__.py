"""The command line: ``python -m qdq estimate LOG``.

It reads the log of an experiment and prints the estimates of the effect, checks of the log, and
when not to trust them. Exit codes: 0 if the estimates were printed, whatever the checks found; 2 if
an argument is wrong or the log cannot be read or used, with one line on stderr that says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

import qdq
from qdq import inference
from qdq.designs import Bernoulli
from qdq.estimators import NORMALISATIONS, QUEUES, estimate
from qdq.tasklog import TaskLog

PROGRAM = "python -m qdq"

# What the advice counts as remarkable. The checks stand in the output, so that readers can judge
# by other bounds.
SUSPICIOUS_RATIO = 0.001  # p-value; intended and found shares of treatment
SUSPICIOUS_RATE = 0.01  # p-value; constant arrival rate
SUSPICIOUS_SHARE = 0.05  # of all response time, in the largest 0.1 % of tasks
SUSPICIOUS_UNLOGGED = 0.005  # of the number in system, in tasks that the log lacks
SUSPICIOUS_EDGE = 0.01  # of all response time, beyond the log's ends
FEW_HORIZONS = 200  # windows side by side

EXAMPLE = f"""\
example:
  {PROGRAM} estimate access.log.gz --horizon 480 --propensity 0.5 --skip 10

  An HAProxy log in which each request carries its arm; half of them treated;
  the first 10 seconds left out; effects followed over 480 arrivals.

The log is a CSV or Parquet file with the columns arrival, departure and
treated (0 or 1), or a log of HAProxy; "pydoc qdq.TaskLog.read" tells more.

exit codes:
  0  estimates printed, whatever the checks found
  2  wrong argument, or a log that cannot be read or used: one line on stderr
"""


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _parser() -> tuple[_Parser, _Parser]:
    """Return the parser, and that of `estimate`."""
    parser = _Parser(prog=PROGRAM, description=(qdq.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"qdq {qdq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "estimate",
        help="estimate the effect of a policy from the log of an experiment",
        description="Estimate the effect of a scheduling policy on the mean response time from\n"
        "the log of an A/B test, check the log, and say when not to trust the result.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("log", metavar="LOG", help="file to read; .gz may be at the end of CSV and HAProxy logs")
    add("--format", choices=("csv", "parquet", "haproxy"), help="default: by the file's name")
    add(
        "--horizon",
        type=int,
        metavar="L",
        help="arrivals over which the effect of a task is followed; default: those of 30 mean "
        "service times, if the log has service times",
    )
    add(
        "--propensity",
        type=float,
        metavar="P",
        help="intended probability of treatment, for the sample-ratio check",
    )
    add(
        "--queue",
        choices=QUEUES,
        default="in_system",
        metavar="R",
        help=f"reading of the queue: {', '.join(QUEUES)}; default: %(default)s",
    )
    add(
        "--normalise",
        choices=NORMALISATIONS,
        default="group_means",
        metavar="N",
        help=f"{' or '.join(NORMALISATIONS)} (needs --propensity); default: %(default)s",
    )
    add(
        "--skip",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="leave out tasks that arrive in the first SECONDS (or whatever the file's unit is); "
        "they still count in the queue; default: 0",
    )
    add(
        "--level",
        type=float,
        default=0.95,
        metavar="C",
        help="confidence level of the intervals; default: %(default)s",
    )
    add(
        "--json",
        action="store_true",
        help="print JSON, times in seconds (or whatever the file's unit is), and nothing else",
    )
    return parser, command


# --------------------------------------------------------------------------------------------------
# What is known of the log
# --------------------------------------------------------------------------------------------------


def _by_task(log: TaskLog) -> bool:
    """Whether the arm was drawn for each task by itself."""
    return isinstance(log.design, Bernoulli) or (log.design is None and log.period is None)


def _refuse_lack(log: TaskLog, options: argparse.Namespace) -> None:
    """Refuse to go without what the estimators need, in the words of the command line."""
    if options.normalise == "inverse_propensity" and log.propensity is None:
        raise ValueError(
            "--normalise inverse_propensity needs --propensity, the intended probability of "
            "treatment"
        )
    known = log.scenario is not None or log.service_time is not None
    if options.horizon is None and _by_task(log) and not known:
        span = float(log.arrival[-1] - log.arrival[0])
        rate = f" ({log.n_tasks / span:.4g} a {_time(log)})" if span > 0.0 else ""
        raise ValueError(
            "--horizon is needed, as the log has no service times: give the number of "
            f"arrivals{rate} over which to follow a task's effect, say those of 30 mean service "
            "times"
        )


def _time(log: TaskLog) -> str:
    return {"s": "second", None: "unit of time"}.get(log.time_unit) or str(log.time_unit)


def _describe(log: TaskLog) -> dict[str, Any]:
    """Return what the log holds; means are over the tasks that are not skipped."""
    span = float(log.arrival[-1] - log.arrival[0])
    if span == 0.0:
        raise ValueError("all arrivals are at the same time")
    response = log.response_time
    if not response.any():
        raise ValueError("all response times are zero")
    counted = slice(log.first_counted, None)
    treated = log.treated[counted]
    n_servers = log.n_servers
    if n_servers is None and log.server is not None:
        n_servers = int(np.unique(log.server).size)
    rate = (log.n_tasks - 1) / span
    service = None if log.service_time is None else float(log.service_time.mean())
    known = service is not None and n_servers is not None
    return {
        "n_tasks": log.n_tasks,
        "n_counted": int(treated.size),
        "span": span,
        "skip": log.skip,
        "time_unit": log.time_unit,
        "arrival_rate": rate,
        "treated_share": float(log.treated.mean()),
        "propensity": log.propensity,
        "n_servers": n_servers,
        "mean_service_time": service,
        "load": rate * service / n_servers if known else None,  # type: ignore[operator]
        "mean_response_control": _mean(response[counted][~treated]),
        "mean_response_treatment": _mean(response[counted][treated]),
        "longest_response": float(response.max()),
    }


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    return float(values.mean()) if values.size else None


def _check(log: TaskLog) -> dict[str, Any]:
    """Run the checks; each holds its figures, and `passed` (None: it could not be made)."""
    ratio: dict[str, Any] = {"propensity": log.propensity, "p_value": None, "passed": None}
    if log.propensity is not None and _by_task(log):
        p = inference.sample_ratio_p_value(
            int(np.count_nonzero(log.treated)), log.n_tasks, log.propensity
        )
        ratio |= {"p_value": p, "passed": p >= SUSPICIOUS_RATIO}
    rate: dict[str, Any] = dict.fromkeys(("bins", "dispersion", "variation", "p_value", "passed"))
    test = inference.constant_rate(log.arrival)
    if test is not None:
        rate = test._asdict() | {"passed": test.p_value >= SUSPICIOUS_RATE}
    law = inference.littles_law(log.arrival, log.departure, log.in_system, log.carried_over[:, 2])
    seen = log.in_system is not None
    complete = abs(law.unlogged) < SUSPICIOUS_UNLOGGED and abs(law.edge) < SUSPICIOUS_EDGE
    little = {
        "source": "in_system" if seen else "logged tasks",
        "number_in_system": law.number_in_system,
        "rate_times_response": law.rate_times_response,
        "relative_difference": law.number_in_system / law.rate_times_response - 1.0,
        "edge": law.edge,
        "unlogged": law.unlogged if seen else None,
        "found_on_arrival": law.found_on_arrival,
        "passed": complete,
    }
    share = inference.share_of_largest(log.response_time)
    tail = {"share_of_largest_thousandth": share, "passed": share < SUSPICIOUS_SHARE}
    return {"sample_ratio": ratio, "constant_rate": rate, "littles_law": little, "tail": tail}


# --------------------------------------------------------------------------------------------------
# When not to trust the estimates
# --------------------------------------------------------------------------------------------------


def _advise(
    log: TaskLog, known: dict[str, Any], checks: dict[str, Any], rows: list[dict[str, Any]]
) -> list[str]:
    """Return what speaks against the estimates, the weightiest first."""
    estimates = {row["method"]: row for row in rows}
    mixed = estimates.get("dq_mixed")
    advice = []
    if checks["sample_ratio"]["passed"] is False:
        advice.append(
            f"The share of treated tasks, {known['treated_share']:.4g}, is not what was intended, "
            f"{log.propensity:.4g}. Find out why before you read on: whatever lost or moved tasks "
            "of one arm biases every estimate."
        )
    if mixed is not None:
        load = "" if known["load"] is None else f" (the load here is {known['load']:.2f})"
        advice.append(
            "The DQ estimates aim at the slope of the mean response at the present share of "
            "treatment, followed over the horizon, and not at the effect of full deployment. Where "
            f"the mean response bends with the share, as it does at high load{load}, they may miss "
            "much of the effect, and no longer log mends that."
        )
        advice.append(
            "The naive estimate compares tasks that met the same queues. It leaves out what each "
            "arm does to the queues, and its interval does not allow for that."
        )
        naive = estimates["naive"]
        apart = abs(mixed["value"] - naive["value"])
        if mixed["standard_error"] == 0.0:
            advice.append(
                "The mixed estimate has a standard error of zero: the windows of an arm are all "
                "alike, so this log cannot show an effect, nor how far off the estimate is."
            )
        elif mixed["low"] <= naive["value"] <= mixed["high"]:
            advice.append(
                "This log cannot tell the mixed estimate from the naive one: they differ by "
                f"{apart / mixed['standard_error']:.1f} standard errors of the mixed one. The "
                "standard error falls with the root of the number of tasks, and grows with the "
                "horizon."
            )
        if not 0.0 <= mixed["alpha"] <= 1.0:
            advice.append(
                f"The mixture extrapolates: its weight of the response is {mixed['alpha']:.2f}, "
                "outside 0 to 1. Its bias then need not lie between those of its parts."
            )
        horizons = mixed["n_used"] / mixed["horizon"]
        if horizons < FEW_HORIZONS:
            advice.append(
                f"The log is short: {horizons:.0f} horizons side by side, and the intervals hold "
                "for many."
            )
    rate, little = checks["constant_rate"], checks["littles_law"]
    if rate["passed"] is False:
        constant = any(row["arrival_rate"] for row in rows)
        advice.append(
            f"Arrivals are not Poisson at a constant rate: counts in {rate['bins']} bins vary "
            f"{rate['dispersion']:.3g} times as much as they should (a rate that varies by "
            f"{100 * rate['variation']:.2g} %, or bursts)."
        )
        if constant:
            advice[-1] += (
                " Arrivals then oversample busy times (they found "
                f"{little['found_on_arrival']:.4g} tasks, the time average is "
                f"{little['number_in_system']:.4g}) and dq_queue is biased: use --queue "
                "time_average, which needs no rate."
            )
    tail = checks["tail"]
    if not tail["passed"]:
        advice.append(
            f"Response times have a heavy tail: the largest 0.1 % of tasks hold "
            f"{100 * tail['share_of_largest_thousandth']:.1f} % of all response time. A few tasks "
            "can decide the result, and the intervals are likely to be too short."
        )
    if little["unlogged"] is not None and abs(little["unlogged"]) >= SUSPICIOUS_UNLOGGED:
        advice.append(
            f"Of the tasks that were counted in the system, {100 * little['unlogged']:.2g} % are "
            "not in the log: lines were lost, or the log was cut out of running traffic."
            if little["unlogged"] > 0.0
            else "Fewer tasks were counted in the system than the log holds: its column in_system "
            "counts something else, or departures are logged late."
        )
    if abs(little["edge"]) >= SUSPICIOUS_EDGE:
        advice.append(
            f"The log's ends weigh {100 * abs(little['edge']):.2g} % of all response time: it is "
            "short against the response times, or was cut."
        )
    if log.scenario is None and log.skip == 0.0:
        scale, unit, _ = _unit(log)
        longest = f"{scale * known['longest_response']:.4g} {unit}".rstrip()
        advice.append(
            "The log is taken to start with an empty system, and nothing was skipped. If it did, "
            "leave out the time until queues were as usual (--skip); if traffic was running, at "
            f"least the longest response time, {longest}."
        )
    if mixed is not None and known["load"] is None:
        advice.append(
            "The load is not known (it takes the columns service_time and server): judge for "
            "yourself how near to saturation the servers were."
        )
    return advice


# --------------------------------------------------------------------------------------------------
# Printing
# --------------------------------------------------------------------------------------------------


def _unit(log: TaskLog) -> tuple[float, str, str]:
    """Return the table's scale, the unit's short name, and how to speak of it."""
    if log.time_unit == "s":
        return 1000.0, "ms", "ms"
    return 1.0, log.time_unit or "", log.time_unit or "the file's unit"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _decimals(smallest: float) -> int:
    """Return the decimals that show a standard error with three digits."""
    if not (math.isfinite(smallest) and smallest > 0.0):
        return 3
    return min(max(2 - math.floor(math.log10(smallest)), 0), 9)


def _table(rows: list[dict[str, Any]], scale: float, unit: str, level: float) -> list[str]:
    """Return the lines of the table of estimates."""
    decimals = _decimals(scale * min(row["standard_error"] for row in rows))
    names = ["value", "standard_error", "low", "high"]
    cells = [[f"{scale * row[name]:.{decimals}f}" for name in names] for row in rows]
    heads = ["estimate", "std. error"]
    widths = [max(len(c[i]) for c in cells) for i in range(4)]
    widths[0] = max(widths[0], len(heads[0]))
    widths[1] = max(widths[1], len(heads[1]))
    interval = f"{100 * level:g} % interval"
    between = max(widths[2] + widths[3] + 4, len(interval))
    lines = [
        f"Effect on the mean response time, treatment minus control, in {unit}",
        "",
        f"  {'method':<14}{heads[0]:>{widths[0]}}  {heads[1]:>{widths[1]}}  {interval:>{between}}",
    ]
    for row, (value, error, low, high) in zip(rows, cells, strict=True):
        ends = f"[{low:>{widths[2]}}, {high:>{widths[3]}}]"
        lines.append(
            f"  {row['method']:<14}{value:>{widths[0]}}  {error:>{widths[1]}}  {ends:>{between}}"
        )
    return lines


def _check_lines(log: TaskLog, known: dict[str, Any], checks: dict[str, Any]) -> list[str]:
    """Return the lines of the checks: name, verdict, figures."""
    ratio, rate = checks["sample_ratio"], checks["constant_rate"]
    little, tail = checks["littles_law"], checks["tail"]
    share = f"{100 * known['treated_share']:.2f} % treated"
    if ratio["p_value"] is not None:
        said = f"{share}, {100 * ratio['propensity']:g} % intended; {_p(ratio['p_value'])}"
    elif _by_task(log):
        said = f"{share}; not checked without --propensity"
    else:
        said = f"{share}; not checked: the arm was not drawn task by task"
    rows = [("sample ratio", ratio["passed"], said)]
    if rate["p_value"] is None:
        said = f"not checked: it takes {2 * inference.ARRIVALS_PER_BIN + 2} tasks"
    else:
        said = (
            f"counts of arrivals in {rate['bins']} bins vary {rate['dispersion']:.3g} times as "
            f"much as at a constant rate; {_p(rate['p_value'])}"
        )
    rows.append(("constant rate", rate["passed"], said))
    differ, edge = (100 * little[name] for name in ("relative_difference", "edge"))
    said = (
        f"{little['number_in_system']:.4g} tasks in system; arrival rate x mean response is "
        f"{little['rate_times_response']:.4g}. They differ by {differ:+.3f} %: {edge:+.3f} % from "
        "the log's ends, "
    )
    if little["unlogged"] is None:
        said += "and none other can show, as the tasks in system are counted from the log itself"
    else:
        said += f"{100 * little['unlogged']:+.3f} % from tasks that are not in the log"
    rows.append(("Little's law", little["passed"], said))
    said = (
        f"the largest 0.1 % of tasks hold {100 * tail['share_of_largest_thousandth']:.1f} % of all "
        "response time"
    )
    rows.append(("tail", tail["passed"], said))
    lines = []
    for name, passed, said in rows:
        verdict = {True: "ok", False: "LOOK", None: "-"}[passed]
        lines += textwrap.wrap(
            said,
            78,
            initial_indent=f"  {name:<14}{verdict:<6}",
            subsequent_indent=" " * 22,
            break_on_hyphens=False,
        )
    return lines


def _report(
    path: str,
    log: TaskLog,
    known: dict[str, Any],
    checks: dict[str, Any],
    rows: list[dict[str, Any]],
    level: float,
) -> str:
    """Return the whole text, at most 80 columns wide but for the name of the file."""
    scale, short, unit = _unit(log)
    lines = [
        os.path.basename(path),
        f"  {known['n_tasks']:,} tasks in {known['span']:.4g} {log.time_unit or 'units of time'}, "
        f"{known['arrival_rate']:.4g} arrivals a {_time(log)}",
    ]
    if log.skip:
        first = f"{log.skip:g} {log.time_unit or ''}".rstrip()
        lines[-1] += ";"
        lines.append(f"  the first {first} left out, {known['n_counted']:,} tasks counted")
    parts = [
        f"{scale * known[key]:.4g} {short}".rstrip() + f" {name}"
        for name, key in (
            ("control", "mean_response_control"),
            ("treatment", "mean_response_treatment"),
        )
        if known[key] is not None
    ]
    lines.append(f"  mean response {', '.join(parts)}")
    parts = [f"{known['n_servers']} servers"] if known["n_servers"] is not None else []
    if known["mean_service_time"] is not None:
        service = f"{scale * known['mean_service_time']:.4g} {short}".rstrip()
        parts.append(f"mean service time {service}")
    if known["load"] is not None:
        parts.append(f"load {known['load']:.3f}")
    if parts:
        lines.append(f"  {', '.join(parts)}")
    lines += ["", *_table(rows, scale, unit, level)]
    last = rows[-1]
    if last["horizon"] is not None:
        time = f"{scale * last['horizon'] / known['arrival_rate']:.4g} {short}".rstrip()
        lines += [
            "",
            f"  DQ: {last['n_used']:,} windows of {last['horizon']} arrivals ({time}), "
            f"{str(last['normalise']).replace('_', ' ')}",
        ]
        rate = "" if last["arrival_rate"] is None else f", arrival rate {last['arrival_rate']}"
        lines[-1] += ","
        lines.append(f"      queue {last['queue']}{rate}, weight alpha {last['alpha']:.3f}")
    lines += ["", "Checks of the log", "", *_check_lines(log, known, checks)]
    advice = _advise(log, known, checks, rows)
    if advice:
        lines += ["", "When not to trust this", ""]
        for item in advice:
            lines += textwrap.wrap(
                item, 78, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
            )
    return "\n".join(lines)


def _json_native(value: Any) -> Any:
    """Return a value as JSON knows it; what is missing or not finite is null."""
    if isinstance(value, dict):
        return {key: _json_native(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_native(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return None  # pandas' own missing value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, by default those of the process.

    Returns
    -------
    int
        0.

    Raises
    ------
    SystemExit
        With code 2 if an argument is wrong or the log cannot be read or used; with code 0 after
        ``--help`` and ``--version``.
    """
    parser, command = _parser()
    options = parser.parse_args(argv)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            log = TaskLog.read(
                options.log, options.format, skip=options.skip, propensity=options.propensity
            )
            _refuse_lack(log, options)
            known = _describe(log)
            frame = estimate(
                log,
                horizon=options.horizon,
                normalise=options.normalise,
                queue=options.queue,
                arrival_rate=None,
                level=options.level,
            )
            lost = ~np.isfinite(frame[["value", "standard_error"]].to_numpy()).all(axis=1)
            if lost.any():
                raise ValueError(
                    f"{frame['method'][int(np.argmax(lost))]} is not finite: the log's times are "
                    "too large to be squared and summed; give them in another unit, or look for "
                    "a wrong one"
                )
            rows: list[dict[str, Any]] = _json_native(frame.to_dict("records"))
            checks = _check(log)
        except OSError as error:
            command.error(f"{options.log}: {error.strerror or error}")
        except (TypeError, ValueError) as error:
            command.error(str(error))
    for warning in caught:
        print(f"{command.prog}: warning: {' '.join(str(warning.message).split())}", file=sys.stderr)
    if options.json:
        checks["advice"] = _advise(log, known, checks, rows)
        result = {"log": known, "checks": checks, "estimates": rows}
        text = json.dumps(_json_native(result), allow_nan=False, indent=2)
    else:
        text = _report(options.log, log, known, checks, rows, options.level)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
