"""The book's figures: one style, one colour and marker a method, the few plots that pages share.

The ground is opaque white, also where the page is dark. Colours are those of Okabe and Ito, which
people with any of the common colour vision deficiencies can tell apart, and three darker ones for
the methods beside those of `estimate`; markers repeat the distinction. Figures are narrow and their
type is large, so that they can be read on a phone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike

from qdq import validation
from qdq.twin import MOST_LOAD, LogTwin

if TYPE_CHECKING:
    import pandas as pd

    from qdq.plan import Plan

WIDTH = 5.4
"""Width of a figure in inches."""


class MethodStyle(NamedTuple):
    """How a method is called and drawn."""

    label: str
    colour: str
    marker: str


METHODS = {
    "naive": MethodStyle("naive", "#D55E00", "o"),
    "server_split": MethodStyle("server split", "#E69F00", "s"),
    "dq_queue": MethodStyle("qDQ", "#56B4E9", "v"),
    "dq_response": MethodStyle("wDQ", "#0072B2", "^"),
    "dq_mixed": MethodStyle("mixed DQ", "#009E73", "D"),
    "switchback": MethodStyle("switchback", "#CC79A7", "P"),
}
"""Style of each method of `estimate`, by the name that `Estimate.method` has, in the order that
figures show."""

STYLES = METHODS | {
    "dq_score": MethodStyle("score DQ", "#7A3E6B", "X"),
    "lstd_dq": MethodStyle("LSTD-DQ", "#661100", "h"),
    "log_twin": MethodStyle("log twin", "#332288", "*"),
}
"""The same with the methods that need to know the policies, which come last."""

TRUTH = "#000000"
"""Colour of the line at the true effect."""

ARMS = {"control": "#8C8C8C", "treatment": "#5E3C99"}
"""Colour of the tasks of each arm."""


def use_style() -> None:
    """Set the style of all figures drawn from now on."""
    colours = [style.colour for style in METHODS.values()]
    sns.set_theme(context="notebook", style="whitegrid", palette=colours, font="DejaVu Sans")
    plt.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "savefig.dpi": 160,
            "savefig.facecolor": "white",
            "savefig.transparent": False,
            "axes.facecolor": "white",
            "axes.titlesize": 11,
            "axes.labelsize": 11,
            "axes.edgecolor": "#444444",
            "grid.color": "#dddddd",
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "legend.fontsize": 10,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.markersize": 6,
        }
    )


_NUMBER = re.compile(r"([-+−]?[\d,.]+( \([\d,.]+\))?( %)?)?")  # also with its error, or blank


def _numbers_to_the_right(html: str) -> str:
    """Align to the right those columns of an HTML table that hold only numbers."""
    rows = re.split("(?=<tr)", html)
    cells = [found for row in rows if (found := re.findall("<td>(.*?)</td>", row, re.DOTALL))]
    right = [all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    for i, row in enumerate(rows):
        parts = re.split("(?=<t[hd]>)", row)
        for j, move in zip(range(1, len(parts)), right, strict=False):
            if move:
                parts[j] = parts[j].replace(">", ' style="text-align: right">', 1)
        rows[i] = "".join(parts)
    return "".join(rows)


class Table:
    """A table that shows as HTML in a notebook, with the same bytes each time. Made by `table`."""

    def __init__(self, frame: pd.DataFrame, decimals: int) -> None:
        self._frame = frame
        # Pivoting leaves a name above the columns, which would show as one more column.
        html = frame.rename_axis(columns=None).to_html(
            index=False,
            border=0,
            justify="left",
            na_rep="",
            float_format=f"{{:z,.{decimals}f}}".format,
        )
        # A wide table scrolls in a box of its own.
        html = _numbers_to_the_right(html)
        self._html = f'<div style="overflow-x: auto; white-space: nowrap">{html}</div>'

    def __repr__(self) -> str:
        return self._frame.to_string(index=False)

    def _repr_html_(self) -> str:
        return self._html


def table(frame: pd.DataFrame, decimals: int = 3) -> Table:
    """Return a table for a page: no index, numbers rounded, missing values left blank.

    Parameters
    ----------
    frame : DataFrame
        The rows.
    decimals : int, default 3
        Digits after the point of the columns that hold floats.

    Returns
    -------
    Table
    """
    return Table(frame, validation.integer("decimals", decimals, "an integer >= 0", at_least=0))


def with_error(value: float, error: float) -> str:
    """Write a number and its standard error, ``-0.358 (0.011)``, to two digits of the error.

    What rounds to zero has no sign.

    Parameters
    ----------
    value, error : float
        If either is not finite, the answer is empty.

    Returns
    -------
    str
    """
    if not (math.isfinite(value) and math.isfinite(error)):
        return ""
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 6) if error > 0.0 else 4
    return f"{value:z.{decimals}f} ({error:.{decimals}f})"


def shown(name: str, value: Any) -> str:
    """Write the value of a coordinate in a table or a title: numbers in short, text as it is."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _shown_columns(frame: pd.DataFrame, coordinates: Sequence[str]) -> dict[str, list[str]]:
    return {
        name.replace("_", " "): [shown(name, value) for value in frame[name]]
        for name in coordinates
    }


def estimands(quantities: pd.DataFrame, coordinates: Sequence[str]) -> Table:
    """Return the table of the three estimands, and of both readings of the global effect.

    Parameters
    ----------
    quantities : DataFrame
        As in `qdq.grid.Grid`.
    coordinates : sequence of str
        Columns that set the cells apart.

    Returns
    -------
    Table
        A row a cell: ``direct effect, slope, GTE, GTE_w, GTE_q``, with standard errors.
    """
    import pandas as pd

    names = {"direct": "direct effect", "slope": "slope", "gte": "GTE"}
    names |= {"gte_w": "GTE_w", "gte_q": "GTE_q"}
    rows = []
    for cell, part in quantities.groupby(list(coordinates), sort=False):
        found = part.drop_duplicates("quantity").set_index("quantity")[["value", "error"]]
        row = {
            name.replace("_", " "): shown(name, value)
            for name, value in zip(coordinates, cell, strict=True)
        }
        for quantity, title in names.items():
            row[title] = with_error(*found.loc[quantity])
        rows.append(row)
    return table(pd.DataFrame(rows))


def relative_rmse(results: pd.DataFrame, coordinates: Sequence[str]) -> Table:
    """Return the table of root mean squared errors over the absolute effect.

    Parameters
    ----------
    results : DataFrame
        One row a cell and method, as `qdq.grid.Grid.main` returns.
    coordinates : sequence of str
        As for `estimands`.

    Returns
    -------
    Table
        A row a cell, a column a method.
    """
    import pandas as pd

    methods = _ordered(list(results["method"]))
    rows = []
    for _, part in results.groupby(list(coordinates), sort=False):
        row = {name: values[0] for name, values in _shown_columns(part, coordinates).items()}
        errors = part.set_index("method")["relative_rmse"]
        rows.append(row | {STYLES[method].label: errors.get(method) for method in methods})
    return table(pd.DataFrame(rows))


def errors(results: pd.DataFrame, coordinates: Sequence[str], unfold: str) -> Blocks:
    """Return tables of mean, bias, SD, RMSE and coverage with errors, to unfold one by one.

    Parameters
    ----------
    results, coordinates
        As for `relative_rmse`.
    unfold : str
        The coordinate that has a table for each of its values.

    Returns
    -------
    Blocks
    """
    import pandas as pd

    numbers = {"mean": "mean", "bias": "bias", "SD": "sd", "RMSE": "rmse", "coverage": "coverage"}
    inside = [name for name in coordinates if name != unfold]
    blocks = {}
    for value, part in results.groupby(unfold, sort=False):
        place = part["method"].map(list(STYLES).index)
        cell = part.groupby(inside, sort=False).ngroup() if inside else 0
        part = part.assign(place=place, cell=cell).sort_values(["cell", "place"])
        columns: dict[str, Any] = _shown_columns(part, inside)
        columns["method"] = [STYLES[method].label for method in part["method"]]
        for title, name in numbers.items():
            pairs = zip(part[name], part[f"{name}_error"], strict=True)
            columns[title] = [with_error(*pair) for pair in pairs]
        title = shown(unfold, value)
        if isinstance(value, (int, float)):
            title = f"{unfold.replace('_', ' ')} {title}"
        blocks[title] = table(pd.DataFrame(columns))
    return Blocks(blocks)


class Blocks:
    """Tables under headings that a click unfolds. Made by `errors`."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = dict(tables)

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{part!r}" for title, part in self._tables.items())

    def _repr_html_(self) -> str:
        return "\n".join(
            f"<details><summary>{escape(title)}</summary>{part._repr_html_()}</details>"
            for title, part in self._tables.items()
        )


def spread(replications: pd.DataFrame, truth: float) -> Figure:
    """Draw the spread of each method's estimates: DQ above, the others below on their own scale.

    Parameters
    ----------
    replications : DataFrame
        Of one cell and one variant, with the columns ``method, value``.
    truth : float
        The true effect.

    Returns
    -------
    matplotlib Figure
    """
    drawn = {
        str(method): part["value"].dropna().to_numpy(np.float64)
        for method, part in replications.groupby("method", sort=False)
    }
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 4.6))
    for axes, wanted in zip(panels, (True, False), strict=True):
        chosen = {m: v for m, v in drawn.items() if m.startswith("dq_") == wanted}
        violins(chosen, truth, axes=axes)
    return figure


def _ordered(methods: Sequence[str]) -> list[str]:
    """Return the methods in the order of figures, each once."""
    for method in methods:
        if method not in STYLES:
            raise validation.refuse("method", method, "one of " + ", ".join(STYLES))
    return [method for method in STYLES if method in methods]


def _truth_line(axes: Axes, truth: float) -> None:
    axes.axvline(truth, color=TRUTH, linewidth=1.4, zorder=2.5)
    axes.annotate(
        "truth",
        (truth, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=10,
    )


def _name_rows(axes: Axes, methods: list[str]) -> None:
    axes.set_yticks(range(len(methods)), [STYLES[method].label for method in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def intervals(frame: pd.DataFrame, truth: float, *, axes: Axes | None = None) -> Axes:
    """Draw estimates with their confidence intervals, a row each, and a line at the truth.

    Parameters
    ----------
    frame : DataFrame
        As `qdq.estimate` returns, with the columns ``method, value, low, high``, one row a method.
    truth : float
        The true effect.
    axes : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If a method is unknown or appears twice.
    """
    methods = _ordered(list(frame["method"]))
    if len(methods) != len(frame):
        raise ValueError(
            f"frame has {len(frame)} rows for {len(methods)} methods: it must have one a method"
        )
    if axes is None:
        axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.45 * len(methods)))[1]
    _truth_line(axes, truth)
    rows = frame.set_index("method").loc[methods, ["value", "low", "high"]]
    for place, (method, row) in enumerate(zip(methods, rows.to_numpy(np.float64), strict=True)):
        value, low, high = row
        _, colour, marker = STYLES[method]
        axes.plot([low, high], [place, place], color=colour, linewidth=2.4)
        axes.plot([value], [place], color=colour, marker=marker, markersize=8)
    _name_rows(axes, methods)
    return axes


def violins(
    replications: Mapping[str, ArrayLike], truth: float, *, axes: Axes | None = None
) -> Axes:
    """Draw the spread of each method's estimates over replications, and a line at the truth.

    A violin shows the density, a bar in it the middle half, the method's marker the mean.

    Parameters
    ----------
    replications : mapping of str to array_like of float
        The estimates of each method, at least two.
    truth : float
        The true effect.
    axes : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If a method is unknown, or has fewer than two estimates.
    """
    methods = _ordered(list(replications))
    samples = [np.asarray(replications[method], dtype=np.float64).ravel() for method in methods]
    for method, sample in zip(methods, samples, strict=True):
        if sample.size < 2:
            raise ValueError(f"{method} has {sample.size} estimates: a violin needs at least 2")
    if axes is None:
        axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.55 * len(methods)))[1]
    _truth_line(axes, truth)
    sns.violinplot(
        data=samples,
        orient="h",
        palette=[STYLES[method].colour for method in methods],
        # Equal widths: some methods spread a hundred times as far as others.
        density_norm="width",
        inner=None,
        saturation=1.0,
        linewidth=0.8,
        cut=0,
        ax=axes,
    )
    for place, (method, sample) in enumerate(zip(methods, samples, strict=True)):
        axes.plot(np.quantile(sample, [0.25, 0.75]), [place, place], color="#222222", linewidth=3)
        axes.plot(
            [sample.mean()],
            [place],
            color="white",
            markeredgecolor="#222222",
            marker=STYLES[method].marker,
            markersize=7,
        )
    _name_rows(axes, methods)
    return axes


def small_multiples(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    panel: str,
    error: str | None = None,
    log: bool = False,
    level: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Draw a line per method in one panel for each value of a column, two panels a row.

    Parameters
    ----------
    frame : DataFrame
        One row for each method, panel and x, with the column ``method``.
    x, y, panel : str
        Columns: along each panel, up each panel, and what sets the panels apart, in order of first
        appearance.
    error : str, optional
        Column of the standard errors of y; bars of two standard errors either way are drawn.
    log : bool, default False
        Whether y is on a logarithmic axis.
    level : float, optional
        Where to draw a black line across each panel, such as 0 for a bias.
    labels : mapping of str to str, optional
        What to write for the columns x and y, by default their names.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        If a method is unknown.
    """
    names = dict(labels or {})
    methods = _ordered(list(frame["method"]))
    titles = list(dict.fromkeys(frame[panel]))
    n_rows = (len(titles) + 1) // 2
    figure, grid = plt.subplots(
        n_rows, 2, figsize=(WIDTH, 0.8 + 2.3 * n_rows), sharex=True, sharey=True, squeeze=False
    )
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    # Beside each other, so that methods that agree do not hide each other.
    step = 0.008 * float(frame[x].max() - frame[x].min())
    shifts = step * (np.arange(len(methods)) - 0.5 * (len(methods) - 1))
    drawn: dict[str, Any] = {}
    for axes, title in zip(grid.flat, titles, strict=False):
        inside = frame[frame[panel] == title]
        for method, shift in zip(methods, shifts, strict=True):
            line = inside[inside["method"] == method].sort_values(x)
            label, colour, marker = STYLES[method]
            bars = None if error is None else 2.0 * line[error]
            drawn[label] = axes.errorbar(
                line[x] + shift,
                line[y],
                yerr=bars,
                color=colour,
                marker=marker,
                linewidth=1.5,
                markersize=5,
            )
        axes.set_title(str(title))
        if log:
            axes.set_yscale("log")
        if level is not None:
            axes.axhline(level, color=TRUTH, linewidth=1.2, zorder=1.5)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(frame[x]))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.tick_params(axis="x", labelrotation=60)
    figure.supxlabel(names.get(x, x), fontsize=11)
    figure.supylabel(names.get(y, y), fontsize=11)
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=3)
    return figure


def response_by_share(
    shares: ArrayLike,
    control: ArrayLike,
    treated: ArrayLike,
    *,
    slope: float | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the mean response of each arm, and of all tasks, against the treated share.

    The naive comparison is the vertical distance of the arms at one half, the global effect the
    descent of all tasks from the left end to the right one: both are drawn as arrows.

    Parameters
    ----------
    shares : array_like of float, shape (n,)
        Treated shares, rising from 0 to 1, with 1/2 among them.
    control, treated : array_like of float, shape (n,)
        Mean response of the tasks of each arm; NaN where there are none.
    slope : float, optional
        Slope of the mean response of all tasks at one half; if given, the tangent there and the
        chord from end to end are drawn.
    axes : matplotlib Axes, optional
        Where to draw, by default on a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If the shares do not hold 0, 1/2 and 1.
    """
    p = np.asarray(shares, np.float64)
    arms = {"control": np.asarray(control, np.float64), "treated": np.asarray(treated, np.float64)}
    if not {0.0, 0.5, 1.0} <= set(p.tolist()):
        raise validation.refuse("shares", shares, "treated shares that hold 0, 1/2 and 1")
    mean = np.where(p < 1.0, (1.0 - p) * arms["control"], 0.0)
    mean += np.where(p > 0.0, p * arms["treated"], 0.0)
    if axes is None:
        axes = plt.subplots(figsize=(WIDTH, 4.2))[1]
    half = int(np.flatnonzero(p == 0.5)[0])
    ends = float(mean[0]), float(mean[-1])
    for (arm, values), colour in zip(arms.items(), ARMS.values(), strict=True):
        axes.plot(p, values, color=colour, label=f"{arm} tasks")
    axes.plot(p, mean, color=TRUTH, linewidth=2.4, label="all tasks")
    if slope is not None:
        axes.plot([0.0, 1.0], ends, color=TRUTH, linestyle=":", linewidth=1.4)
        colour = METHODS["dq_response"].colour
        tangent = mean[half] + slope * np.array([-0.5, 0.5])
        axes.plot(
            [0.0, 1.0], tangent, "--", color=colour, label=f"slope at one half: {_signed(slope)}"
        )
    at_half = float(arms["control"][half]), float(arms["treated"][half])
    for place, (start, end), colour, label in (
        (0.5, at_half, METHODS["naive"].colour, "difference of the arms"),
        (1.06, ends, TRUTH, "true effect"),
    ):
        axes.annotate(
            "",
            (place, end),
            (place, start),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 2.4,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        axes.plot([], [], color=colour, linewidth=2.4, label=f"{label}: {_signed(end - start)}")
    axes.plot([0.0, 1.06], [ends[0]] * 2, color="#666666", linewidth=0.8)
    axes.set(xlabel="treated share p", ylabel="mean response time")
    axes.figure.legend(loc="outside upper center", ncols=2)
    return axes


def _signed(value: float) -> str:
    return f"{value:z.2f}".replace("-", "−")


def power(plan: Plan, n_tasks: ArrayLike | None = None, *, axes: Axes | None = None) -> Axes:
    """Draw the power of each method against the number of tasks.

    Parameters
    ----------
    plan : Plan
        As `qdq.plan` returns it.
    n_tasks : array_like of float, optional
        Numbers of tasks, rising; by default from a tenth of the least number needed to ten times
        the largest.
    axes : matplotlib Axes, optional
        Where to draw, by default on a new figure.

    Returns
    -------
    matplotlib Axes
    """
    if n_tasks is None:
        needed = plan.table["n_tasks"].replace(np.inf, np.nan).dropna()
        low, high = (float(needed.min()), float(needed.max())) if len(needed) else (1e3, 1e6)
        n_tasks = np.geomspace(max(low / 10.0, 100.0), min(high * 10.0, 1e12), 200)
    along = np.asarray(n_tasks, np.float64)
    if axes is None:
        axes = plt.subplots(figsize=(WIDTH, 3.4))[1]
    for curve, method in zip(plan.power_at(along), plan.table["method"], strict=True):
        label, colour, _ = STYLES[method]
        axes.plot(along, 100.0 * curve, color=colour, linewidth=2, label=label)
    axes.axhline(100.0 * plan.power, color=TRUTH, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_ylim(0.0, 102.0)
    axes.set_xlabel("number of tasks")
    axes.set_ylabel("power, %")
    axes.figure.legend(loc="outside upper center", ncols=3)
    return axes


def twin(result: LogTwin) -> Figure:
    """Draw how well a log's twin fits: moments, requirements by queue length, loads.

    Parameters
    ----------
    result : LogTwin
        As `qdq.log_twin` returns it.

    Returns
    -------
    matplotlib Figure
        From top to bottom: the twin's moments relative to the log's, with two standard errors of
        the difference of two such logs either way; the mean requirement of tasks by the number of
        tasks that they find at their server, with two standard errors; the servers' loads under
        either arm alone, in order, and the load from which the twin is not trusted.
    """
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(WIDTH, 8.0), height_ratios=(1.3, 1.0, 1.0)
    )
    moments = result.moments
    log = np.array([moment.log for moment in moments])
    apart = 100.0 * (np.array([moment.twin for moment in moments]) / log - 1.0)
    error = 100.0 * math.sqrt(2.0) * np.array([moment.log_error for moment in moments]) / log
    rows = np.arange(len(moments))
    top.errorbar(apart, rows, xerr=2.0 * error, fmt="o", color=_TWIN[0], capsize=3)
    top.axvline(0.0, color=TRUTH, linewidth=1.2, zorder=1.5)
    top.set_yticks(rows, [moment.name for moment in moments])
    top.set_ylim(len(moments) - 0.5, -0.5)
    top.set_xlabel("twin against log, %")

    queue, requirement, error = result.by_queue
    middle.errorbar(queue, requirement, yerr=2.0 * error, fmt="o", color=_TWIN[0], capsize=3)
    middle.axhline(1.0, color=TRUTH, linewidth=1.2, zorder=1.5)
    middle.xaxis.set_major_locator(MaxNLocator(integer=True))
    middle.set_xlabel("tasks at the server that is joined")
    middle.set_ylabel("relative requirement")

    for name, colour, marker in zip(result.loads._fields, _TWIN, "os", strict=True):
        loads = np.sort(getattr(result.loads, name))
        place = np.arange(1, loads.size + 1)
        bottom.plot(place, loads, marker, color=colour, label=f"{name} alone")
    bottom.axhline(MOST_LOAD, color=TRUTH, linewidth=1.2, zorder=1.5)
    bottom.set_ylim(bottom=0.0)
    bottom.set_xlabel("server, in order of its load")
    bottom.set_ylabel("load")
    bottom.legend()
    return figure


# Colours of control (and of what belongs to no arm) and treatment.
_TWIN = (METHODS["dq_response"].colour, METHODS["naive"].colour)
