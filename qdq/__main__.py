"""The command line: ``python -m qdq estimate LOG`` and ``python -m qdq plan``.

The first reads the log of an experiment and prints the estimates of the effect, with a twin of the
log if the policies are named, checks of the log, and when not to trust them; the second says how
many tasks an experiment needs. Exit codes: 0 if the result was printed, whatever the checks found;
2 if an argument is wrong or the log cannot be read or used, with one line on stderr that says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

import qdq
from qdq import inference, trust
from qdq.estimators import NORMALISATIONS, QUEUES, VARIANCES, Estimate, estimate
from qdq.horizon import RULES
from qdq.policies import Policy
from qdq.tasklog import TaskLog
from qdq.trust import by_task, unit_of
from qdq.twin import LogTwin

if TYPE_CHECKING:
    import pandas as pd

PROGRAM = "python -m qdq"

POLICIES: dict[str, Callable[..., Policy]] = {
    "power-of-D": qdq.PowerOfD,
    "shortest-expected-delay-of-D": qdq.ShortestExpectedDelay,
    "join-shortest-queue": qdq.JoinShortestQueue,
    "join-idle-queue": qdq.JoinIdleQueue,
    "round-robin": qdq.RoundRobin,
    "least-work-left": qdq.LeastWorkLeft,
}

PLAN_EXAMPLE = f"""\
examples:
  {PROGRAM} plan --load 0.8 --control power-of-2 --treatment power-of-3
  {PROGRAM} plan access.log.gz --horizon 480 --effect 5

  The first simulates pilots of 20 servers at load 0.8; the second takes the
  variance from the log of a pilot, and is asked to see 5 ms.
"""

EXAMPLE = f"""\
examples:
  {PROGRAM} estimate access.log.gz --horizon 480 --propensity 0.5 --skip 10
  {PROGRAM} estimate log.csv --control power-of-1 --treatment power-of-2

  An HAProxy log in which each request carries its arm; half of them treated;
  the first 10 seconds left out; effects followed over 480 arrivals. With the
  policies, if the log names servers: a twin of the log, tested against it and
  run under either policy alone.

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


def _parser() -> _Parser:
    """Return the parser; what it parses holds `run`, the command's function, and `command`."""
    parser = _Parser(prog=PROGRAM, description=(qdq.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"qdq {qdq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_estimate(commands)
    _add_plan(commands)
    return parser


def _add_shared(command: _Parser) -> None:
    """Add the options that both commands have, with the same meaning."""
    add = command.add_argument
    add("--format", choices=("csv", "parquet", "haproxy"), help="default: by the file's name")
    add(
        "--skip",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="leave out tasks that arrive in the first SECONDS (or whatever the file's unit is); "
        "they still count in the queue; default: 0",
    )
    add(
        "--horizon",
        type=_horizon,
        metavar="L",
        help="arrivals over which the effect of a task is followed, or the rule that is to choose "
        "them, rmse or coverage; default: those of 30 mean service times, if the log has service "
        "times, else coverage",
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
        help="print JSON and nothing else, times of a log in seconds (or the file's unit)",
    )


def _add_policies(command: _Parser, use: str, *defaults: str | None) -> None:
    """Add the policies of the two arms."""
    for arm, default in zip(("control", "treatment"), defaults, strict=True):
        command.add_argument(
            f"--{arm}",
            type=_policy,
            default=default,
            metavar="POLICY",
            help=f"{use}: {', '.join(POLICIES)}"
            + ("" if default is None else "; default: %(default)s"),
        )


def _add_estimate(commands: argparse._SubParsersAction[_Parser]) -> None:
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
    _add_shared(command)
    _add_policies(command, "policy that routed the arm, for the log twin and dq_score", None, None)
    add(
        "--servers",
        type=int,
        metavar="N",
        help="number of servers; default: the log's, else those that it names",
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
        "--variance",
        choices=VARIANCES,
        metavar="V",
        help=f"standard errors by {', '.join(VARIANCES)}; default: hac",
    )
    command.set_defaults(run=_estimate, command=command)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser(
        "plan",
        help="say how many tasks an experiment needs to see an effect",
        description="Say how many tasks each method and design needs to see an effect, from the\n"
        "log of a pilot experiment, or from simulated ones of a system that is described.",
        epilog=PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("log", metavar="LOG", nargs="?", help="file of a pilot experiment, as for estimate")
    _add_shared(command)
    add(
        "--effect",
        type=float,
        metavar="E",
        help="difference of the mean responses to be seen, in the unit that estimate's table has "
        "(ms for HAProxy logs), or in mean service times; default: the true effect of the system",
    )
    add("--power", type=float, default=0.8, metavar="P", help="probability; default: %(default)s")
    add("--servers", type=int, default=20, metavar="N", help="without a log; default: %(default)s")
    add("--load", type=float, metavar="R", help="without a log: arrivals per server and service")
    _add_policies(command, "without a log", "power-of-1", "power-of-2")
    add("--seed", type=int, default=0, metavar="S", help="of the simulation; default: 0")
    command.set_defaults(run=_plan, command=command)


# --------------------------------------------------------------------------------------------------
# What is known of the log
# --------------------------------------------------------------------------------------------------


def _horizon(text: str) -> int | str:
    if text in RULES:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of arrivals nor one of {', '.join(RULES)}"
        ) from None


def _policy(text: str) -> Policy:
    name, _, d = text.rpartition("-")
    try:
        if text in POLICIES and d != "D":
            return POLICIES[text]()
        if f"{name}-D" in POLICIES and d.isdecimal():
            return POLICIES[f"{name}-D"](int(d))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(
        f"{text!r} is no policy such as power-of-2: it must be one of {', '.join(POLICIES)}, with "
        "a number of servers for D"
    )


def _refuse_lack(log: TaskLog, options: argparse.Namespace) -> None:
    """Refuse to go without what the estimators need, in the words of the command line."""
    if options.normalise == "inverse_propensity" and log.propensity is None:
        raise ValueError(
            "--normalise inverse_propensity needs --propensity, the intended probability of "
            "treatment"
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


# --------------------------------------------------------------------------------------------------
# Printing
# --------------------------------------------------------------------------------------------------


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _decimals(smallest: float) -> int:
    """Return the decimals that show a standard error with three digits."""
    if not (math.isfinite(smallest) and smallest > 0.0):
        return 3
    return min(max(2 - math.floor(math.log10(smallest)), 0), 9)


def _table(
    groups: dict[str, list[dict[str, Any]]], scale: float, unit: str, level: float
) -> list[str]:
    """Return the lines of the table of estimates, each group below its title if it has one."""
    rows = [row for group in groups.values() for row in group]
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
    left = iter(cells)
    for title, group in groups.items():
        if title:
            lines += ["", *_wrapped(title, "  ")]
        for row, (value, error, low, high) in zip(group, left, strict=False):
            ends = f"[{low:>{widths[2]}}, {high:>{widths[3]}}]"
            lines.append(
                f"  {row['method']:<14}{value:>{widths[0]}}  {error:>{widths[1]}}  "
                f"{ends:>{between}}"
            )
    return lines


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    """Return lines of at most 78 columns, the first and the others with what they begin with."""
    rest = first if rest is None else rest
    return textwrap.wrap(
        text, 78, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _grouped(twin: LogTwin | None, rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the table; with a twin, those of each aim under what that is."""
    if twin is None:
        return {"": rows}
    title, first = "full deployment, by a twin of the log", _rows(twin)
    if math.isnan(twin.standard_error):
        title, first = f"{title}: no finite effect", []
    elif not twin.trusted:
        title += ": not trusted, and so corrected by DQ"
    return {
        title: first,
        "direct effect, without a model": rows[:1],
        "slope at the present share of treatment, without a model": rows[1:],
    }


def _twin_lines(twin: LogTwin, scale: float, short: str) -> list[str]:
    """Return what the twin says of itself, and what was fitted."""

    def time(value: float) -> str:
        return f"{scale * value:.4g} {short}".rstrip()

    said = f"{twin.verdict}."
    if math.isnan(twin.standard_error):
        said += (
            " Deployed alone, an arm overloads a server, so that there is no finite effect to "
            "estimate."
        )
    elif not twin.trusted:
        said += (
            " The value is the twin's corrected by Differences-in-Q "
            f"({twin.fallback.meaning}). The twin alone says {time(twin.twin_value)}, standard "
            f"error {time(twin.twin_standard_error)}."
        )
    fitted = twin.scenario
    means = np.sort(1.0 / fitted.rates)
    rates = f"of mean service time {time(means[0])}"
    if means[0] != means[-1]:
        rates = f"of mean service times {time(means[0])} to {time(means[-1])}"
    delays = [
        f"{name} delay {time(delay) if delay else 'none'}"
        for name, delay in (
            ("dispatch", fitted.dispatch_delay),
            ("information", fitted.information_delay),
        )
    ]
    kind = {"fcfs": "FCFS", "processor_sharing": "processor-sharing"}[fitted.discipline]
    said += f" Fitted: {fitted.n_servers} {kind} servers {rates}; {', '.join(delays)}."
    return ["", *_wrapped(said, "  log_twin: ", "      ")]


def _check_lines(log: TaskLog, known: dict[str, Any], checks: dict[str, Any]) -> list[str]:
    """Return the lines of the checks: name, verdict, figures."""
    ratio, rate = checks["sample_ratio"], checks["constant_rate"]
    little, tail = checks["littles_law"], checks["tail"]
    share = f"{100 * known['treated_share']:.2f} % treated"
    if ratio["p_value"] is not None:
        said = f"{share}, {100 * ratio['propensity']:g} % intended; {_p(ratio['p_value'])}"
    elif by_task(log):
        said = f"{share}; not checked without --propensity"
    else:
        said = f"{share}; not checked: the arm was not drawn task by task"
    rows = [("sample ratio", ratio["passed"], said)]
    arms = checks["independent_arms"]
    if arms["p_value"] is None:
        said = "not checked"
    else:
        said = (
            f"arms up to {arms['lags']} tasks apart are correlated by at most "
            f"{arms['largest_correlation']:+.2g}; {_p(arms['p_value'])}"
        )
    rows.append(("drawn arms", arms["passed"], said))
    if rate["p_value"] is None:
        said = f"not checked: it takes {2 * inference.ARRIVALS_PER_BIN + 2} tasks"
    else:
        said = (
            f"counts of arrivals in {rate['bins']} bins vary {rate['dispersion']:.3g} times as "
            f"much as at a constant rate; {_p(rate['p_value'])}"
        )
    rows.append(("constant rate", rate["passed"], said))
    feedback = checks["feedback"]
    if feedback["p_value"] is None:
        said = "not checked"
    else:
        said = (
            "tasks found and the time to the next arrival are correlated by "
            f"{feedback['correlation']:+.2g}, {_p(feedback['p_value'])} for more than 0"
        )
    rows.append(("no feedback", feedback["passed"], said))
    differ, edge = (100 * little[name] for name in ("relative_difference", "edge"))
    said = (
        f"{little['number_in_system']:.4g} tasks in system (standard error "
        f"{little['number_in_system_error']:.2g}); arrival rate x mean response is "
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
        f"response time; tail index {tail['hill_index']:.2g} ({tail['hill_index_error']:.1g})"
    )
    rows.append(("tail", tail["passed"], said))
    end = checks["complete_end"]
    if end["p_value"] is None:
        said = "not checked: the log is too short"
    else:
        said = (
            f"{end['arrived']} tasks arrived before the end where {end['expected']:.0f} are usual; "
            f"{_p(end['p_value'])}"
        )
    rows.append(("whole end", end["passed"], said))
    lines = []
    for name, passed, said in rows:
        verdict = {True: "ok", False: "LOOK", None: "-"}[passed]
        lines += _wrapped(said, f"  {name:<14}{verdict:<6}", " " * 22)
    return lines


def _report(
    path: str,
    log: TaskLog,
    known: dict[str, Any],
    checks: dict[str, Any],
    rows: list[dict[str, Any]],
    twin: LogTwin | None,
    advice: list[str],
    level: float,
) -> str:
    """Return the whole text, at most 80 columns wide but for the name of the file."""
    scale, short, unit = unit_of(log)
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
    lines += ["", *_table(_grouped(twin, rows), scale, unit, level)]
    if twin is not None:
        lines += _twin_lines(twin, scale, short)
    last = next(row for row in reversed(rows) if row["method"] != "dq_score")
    if last["horizon"] is not None:
        spans = sorted({row["horizon"] for row in rows if row["horizon"] is not None})
        times = [f"{scale * span / known['arrival_rate']:.4g}" for span in spans]
        lines += [
            "",
            f"  DQ: windows of {_ends(spans)} arrivals ({_ends(times)} {short}".rstrip()
            + f"), {last['n_used']:,} of the last,",
            f"      {str(last['normalise']).replace('_', ' ')}, queue {last['queue']}"
            + ("" if last["arrival_rate"] is None else f", arrival rate {last['arrival_rate']}")
            + f", weight alpha {last['alpha']:.3f}",
        ]
    lines += ["", "Checks of the log", "", *_check_lines(log, known, checks)]
    if advice:
        lines += ["", "When not to trust this", ""]
        for item in advice:
            lines += _wrapped(item, "  - ", "    ")
    return "\n".join(lines)


def _ends(values: Sequence[Any]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


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


def _rows(found: Estimate | pd.DataFrame) -> list[dict[str, Any]]:
    frame = found.to_frame() if isinstance(found, Estimate) else found
    rows: list[dict[str, Any]] = _json_native(frame.to_dict("records"))
    return rows


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
    options = _parser().parse_args(argv)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = options.run(options)
        except OSError as error:
            options.command.error(f"{options.log}: {error.strerror or error}")
        except (TypeError, ValueError) as error:
            options.command.error(str(error))
    for said in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        print(f"{options.command.prog}: warning: {said}", file=sys.stderr)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _estimate(options: argparse.Namespace) -> str:
    log = TaskLog.read(
        options.log,
        options.format,
        skip=options.skip,
        propensity=options.propensity,
        n_servers=options.servers,
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
        variance=options.variance,
    )
    lost = ~np.isfinite(frame[["value", "standard_error"]].to_numpy()).all(axis=1)
    if lost.any():
        raise ValueError(
            f"{frame['method'][int(np.argmax(lost))]} is not finite: the log's times are "
            "too large to be squared and summed; give them in another unit, or look for "
            "a wrong one"
        )
    rows = _rows(frame)
    twin = _twin(log, options)
    if twin is not None:
        rows += _score(log, options, twin, rows[-1]["horizon"])
    checks = trust.checks(log)
    advice = trust.advice(log, known, checks, rows)
    if twin is not None and twin.trusted:
        advice.append(
            "The log twin is a model. It supposes that arrivals do not wait for answers, and that "
            "--control and --treatment are what routed the log and would be deployed: no test of "
            "fit can see either."
        )
    elif twin is None and log.server is not None and by_task(log):
        advice.append(
            "The log names the servers: with --control and --treatment, the policies of the arms, "
            "the log twin can estimate the effect of full deployment."
        )
    if options.json:
        result = {"log": known, "checks": checks | {"advice": advice}, "estimates": rows}
        if twin is not None:
            result["log_twin"] = _twin_in_json(twin)
        return json.dumps(_json_native(result), allow_nan=False, indent=2)
    return _report(options.log, log, known, checks, rows, twin, advice, options.level)


def _twin(log: TaskLog, options: argparse.Namespace) -> LogTwin | None:
    """Return the log's twin if the policies are named."""
    policies = options.control, options.treatment
    if policies == (None, None):
        return None
    if None in policies:
        raise ValueError("--control and --treatment go together: the log twin needs both policies")
    try:
        return qdq.log_twin(log, *policies, level=options.level)
    except ValueError as error:
        raise ValueError(
            f"{error} (without --control and --treatment the other methods can be had)"
        ) from error


def _score(
    log: TaskLog, options: argparse.Namespace, twin: LogTwin, horizon: int
) -> list[dict[str, Any]]:
    """Return the row of `dq_score`, if the policies' choices have probabilities."""
    try:
        found = qdq.dq_score(
            log,
            options.control,
            options.treatment,
            horizon=horizon,
            n_servers=twin.scenario.n_servers,
            level=options.level,
            variance=options.variance,
        )
    except ValueError as error:
        warnings.warn(f"dq_score is left out: {error}", UserWarning, stacklevel=2)
        return []
    return _rows(found)


def _twin_in_json(twin: LogTwin) -> dict[str, Any]:
    fitted = twin.scenario
    names = ("value", "standard_error", "low", "high", "trusted", "twin_value")
    return {name: getattr(twin, name) for name in (*names, "twin_standard_error", "verdict")} | {
        "tests": [test._asdict() for test in twin.tests],
        "fitted": {
            "discipline": fitted.discipline,
            "equal_rates": bool(np.ptp(fitted.rates) == 0.0),
            "dispatch_delay": fitted.dispatch_delay,
            "information_delay": fitted.information_delay,
        },
    }


def _plan(options: argparse.Namespace) -> str:
    shared = {"power": options.power, "level": options.level, "horizon": options.horizon}
    if options.log is not None:
        log = TaskLog.read(options.log, options.format, skip=options.skip)
        scale, short, unit = unit_of(log)
        if options.effect is None:
            raise ValueError("--effect is needed with a log: the difference that is to be seen")
        found = qdq.plan(log, options.effect / scale, **shared)
        time = {"s": " (seconds)", None: ""}.get(log.time_unit, f" ({log.time_unit})")
    elif options.load is None:
        raise ValueError("LOG or --load is needed: a pilot's log, or the system to simulate")
    else:
        scenario = qdq.Scenario(
            n_servers=options.servers,
            arrivals=qdq.Poisson(options.load),
            control=options.control,
            treatment=options.treatment,
        )
        found = qdq.plan(scenario, options.effect, seed=options.seed, **shared)
        scale, short, unit, time = 1.0, "", "mean service times", ""
    if options.json:
        rows = found.table.to_dict("records")
        return json.dumps(
            _json_native({"effect": found.effect, **shared, "plan": rows}),
            allow_nan=False,
            indent=2,
        )
    effect = f"{scale * found.effect:.4g} {short or unit}"
    table = found.shown().rename(columns={"time": f"time{time}"})
    return (
        f"Tasks needed to see an effect of {effect} with power {found.power:g},\n"
        f"by {100 * found.level:g} % intervals\n\n{table.to_string(index=False)}"
    )


if __name__ == "__main__":
    sys.exit(main())
