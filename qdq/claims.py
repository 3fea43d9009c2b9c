"""Verdicts on the paper's claims, from the quantities that the book's pages publish.

``claims.yml`` fixes for each claim the statistic, the cells, the threshold and the rule for many
comparisons. What a verdict says is made here of that file and of the quantities: nothing is typed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qdq import publish
from qdq.figures import METHODS, with_error
from qdq.grid import VARIANT
from qdq.provenance import numbers_hash

# What is no coordinate of a cell: the quantity itself, and its size.
_NOT_COORDINATES = {"quantity", "method", "against", "value", "error"}
_NOT_COORDINATES |= {"n_tasks", "gte", "gte_error", "control"}

REPRODUCED = "reproduced"
SOMETIMES = "reproduced when …"
NOT_REPRODUCED = "not reproduced"
NOT_SETTLED = "not settled"
NOT_TESTED = "not tested here"

_WORDS = {
    "group_means": "group means",
    "inverse_propensity": "inverse propensity",
    "in_system": "tasks in system",
    "including_self": "tasks in system including itself",
    "time_average": "time average",
    "arrival_rate": "arrival rate",
    "normalise": "normalisation",
    "own": "own dispatches",
    "either": "either way",
}
_QUANTITIES = {
    "share_found": "the share of the effect that {method} finds",
    "bias_cut": "the cut of absolute bias by {method} against {against}, over the effect,",
    "sd_ratio": "the SD of {method} over that of {against}",
    "rmse_ratio": "the RMSE of {method} over that of {against}",
    "gap": "the gap between both readings over the effect",
    "correlation": "the correlation of the two sums",
    "log_rmse_loss": (
        "the RMSE of {method} at the default horizon over the lowest of the horizons tried"
    ),
}
# What a part is about, where the parts of a claim have cells of their own.
_TOPICS = {"log_rmse_loss": "RMSE", "bias_cut": "bias"}
_OTHERS = {"fixed_alpha": "the best fixed weight"}  # that figures do not draw


def _label(method: str) -> str:
    return METHODS[method].label if method in METHODS else _OTHERS.get(method, method)


def read(path: str | Path | None = None) -> dict[str, Any]:
    """Return the content of claims.yml, by default the one that `qdq.publish.find` finds."""
    import yaml

    content: dict[str, Any] = yaml.safe_load(
        Path(path or publish.find("claims.yml")).read_text("utf-8")
    )
    return content


@dataclass(frozen=True)
class Verdict:
    """What the quantities say of one claim."""

    claim: str
    """Such as ``"C1"``."""
    says: str
    """The claim, in our words."""
    reading: str
    """How it is read here."""
    status: str
    """``REPRODUCED``, ``SOMETIMES``, ``NOT_REPRODUCED``, ``NOT_SETTLED``, ``NOT_TESTED``, or what
    claims.yml gives."""
    cells: pd.DataFrame
    """A row a cell that counts: its page, coordinates and variant, and ``outcome``, "holds",
    "fails" or "open"."""
    left_out: int
    """Cells whose effect is too small for the claim."""
    parts: pd.DataFrame
    """A row a part and cell: ``part`` (its place), ``quantity, method, against, value, error,
    low, high`` (bounds, infinite where there is none), ``outcome``, and the cell's columns."""
    critical: float
    """How many standard errors from a bound settle a part."""

    @property
    def counts(self) -> Counter[str]:
        """How many cells hold, fail and are open."""
        return Counter(self.cells["outcome"]) if len(self.cells) else Counter()

    @property
    def n_tasks(self) -> list[int]:
        """Numbers of tasks that the verdict rests on."""
        return sorted({int(n) for n in self.parts["n_tasks"]}) if len(self.parts) else []

    @property
    def pages(self) -> list[str]:
        """Pages that the verdict rests on."""
        return list(dict.fromkeys(self.parts["page"])) if len(self.parts) else []

    def counted(self) -> str:
        """Say in how many cells it holds, fails and is open.

        Of failures on either side of a range, how many are on which; and the same part by part
        where the parts have cells of their own.
        """
        if not len(self.cells):
            return "No cell counts."
        text = f"It {_counted(self.counts, self._sides())}"
        if self.left_out:
            text += f"; {self.left_out} more have no clear effect and are left out"
        text += "."
        groups = self._groups()
        if len(groups) > 1:
            said = [
                f"that about {_or(list(dict.fromkeys(_TOPICS.get(q, q) for q in quantities)))} "
                f"{_counted(counts).replace(';', ',')}"
                for quantities, counts in groups
            ]
            text += f" Its parts have cells of their own: {'; '.join(said)}."
        return text

    def _keyed(self) -> tuple[pd.Series, pd.Series]:
        """Return a key of the cell of each part, and of each cell."""
        names = [name for name in self.cells if name != "outcome"]
        parts, cells = (
            pd.Series(list(map(str, frame[names].to_numpy(object).tolist())), frame.index)
            for frame in (self.parts, self.cells)
        )
        return parts, cells

    def _sides(self) -> str:
        """Say on which side of a range the cells fail, if all parts have a range."""
        if not np.isfinite(self.parts[["low", "high"]].to_numpy(float)).all():
            return ""
        failing = self.parts[self.parts["outcome"] == "fails"]
        below = failing["value"].astype(float) <= failing["low"].astype(float)
        by_cell = below.groupby(self._keyed()[0].loc[failing.index], sort=False)
        lowest, highest = by_cell.min(), by_cell.max()  # True: below
        counts = {
            "below the range": int((lowest & highest).sum()),
            "above it": int((~lowest & ~highest).sum()),
            "below by one part and above by another": int((lowest != highest).sum()),
        }
        found = {side: count for side, count in counts.items() if count}
        if len(found) == 1:
            return f"all {next(iter(found))}"
        return ", ".join(f"{count} {side}" for side, count in found.items())

    def _groups(self) -> list[tuple[list[str], Counter[str]]]:
        """Return quantities and counts of the parts, together where they share cells."""
        of_part, of_cell = self._keyed()
        groups: list[tuple[list[str], set[str]]] = []
        for _, part in self.parts.groupby("part", sort=False):
            quantities, there = [str(part["quantity"].iloc[0])], set(of_part.loc[part.index])
            for group in [group for group in groups if group[1] & there]:
                groups.remove(group)
                quantities, there = group[0] + quantities, group[1] | there
            groups.append((quantities, there))
        return [(q, Counter(self.cells["outcome"][of_cell.isin(there)])) for q, there in groups]

    def conditions(self) -> list[str]:
        """Say where it holds: conditions under which some cell holds and none fails."""
        found = []
        for page, part in self.cells.groupby("page", sort=False):
            if (part["outcome"] == "holds").any():
                found.append(_condition(str(page), part.drop(columns="page")))
        return found

    def figures(self) -> Iterator[str]:
        """Say the range of each part's quantity over the cells; of a log, that of its ratio."""
        if self.parts.empty:
            return
        for _, part in self.parts.groupby("part", sort=False):
            first = part.iloc[0]
            name = _QUANTITIES.get(first["quantity"], first["quantity"]).format(
                method=_label(first["method"]),
                against=_label(first["against"]),
            )
            value, error = (part[column].astype(float) for column in ("value", "error"))
            low, high = float(first["low"]), float(first["high"])
            fails = part["outcome"] == "fails"
            sides = int((fails & (value <= low)).sum()), int((fails & (value >= high)).sum())
            if str(first["quantity"]).startswith("log_"):
                value = value.map(math.exp)
                error = value * error
            text = f"{name} is {ranged(value, error)}"
            if math.isfinite(low) and math.isfinite(high) and fails.any():
                text += (
                    f"; beyond doubt it is below {low:g} in {sides[0]} of {len(part)} cells and "
                    f"above {high:g} in {sides[1]}"
                )
            yield text


def _counted(counts: Mapping[str, int], sides: str = "") -> str:
    """Say "holds in 3 of 8 cells and fails in 4; 1 can't be told"."""
    total = sum(counts.values())
    cells = "cell" if total == 1 else "cells"
    text = f"holds in {counts.get('holds', 0)} of {total} {cells} and fails in "
    text += f"{counts.get('fails', 0)}"
    if sides:
        text += f" ({sides})"
    if counts.get("open"):
        text += f"; {counts['open']} can't be told"
    return text


def ranged(values: pd.Series, errors: pd.Series) -> str:
    """Say the median and the range of some numbers, each with its standard error.

    The median of an even number is the mean of the two in the middle. Its error is the mean of
    theirs, which is what it is at most.
    """
    order = values.astype(float).to_numpy().argsort()
    value, error = (x.astype(float).to_numpy()[order] for x in (values, errors))
    if len(value) == 1:
        return with_error(value[0], error[0])
    middle = slice((len(value) - 1) // 2, len(value) // 2 + 1)
    centre = with_error(float(value[middle].mean()), float(error[middle].mean()))
    low, high = (with_error(value[i], error[i]) for i in (0, -1))
    return f"{low} to {high}, median {centre}"


def verdict(
    claim: str, quantities: Mapping[str, pd.DataFrame], rules: Mapping[str, Any] | None = None
) -> Verdict:
    """Weigh a claim.

    Parameters
    ----------
    claim : str
        Such as ``"C1"``.
    quantities : mapping of str to DataFrame
        By page, as `qdq.grid.Grid.quantities`; pages that are not there are not weighed.
    rules : mapping, optional
        As `read` returns.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError
        If the rules hold no such claim.
    """
    rules = read() if rules is None else rules
    if claim not in rules["claims"]:
        raise ValueError(f"claim={claim!r} is not one of {', '.join(rules['claims'])}")
    rule = rules["claims"][claim]
    says, reading = rule["says"], rule.get("reading", "")
    there = [page for page in rule.get("pages", ()) if page in quantities]
    frames = [quantities[page].assign(page=page) for page in there]
    if "status" in rule or not frames:
        nothing = pd.DataFrame()
        return Verdict(
            claim, says, reading, rule.get("status", NOT_TESTED), nothing, 0, nothing, math.nan
        )
    rows = pd.concat([frame.astype(object) for frame in frames], ignore_index=True)
    if not rule.get("variants", False):
        rows = _main_variant(rows, rules["main"])
    rows = rows[_inside(rows, rule.get("where", {}))]
    chosen = []
    for place, part in enumerate(rule["parts"]):
        wanted = rows[rows["quantity"] == part["quantity"]]
        for name in ("method", "against"):
            if name in part:
                wanted = wanted[wanted[name] == part[name]]
        wanted = wanted[_inside(wanted, part.get("where", {}))]
        low, high = (
            b if x is None else float(x)
            for x, b in zip(part["between"], (-math.inf, math.inf), strict=True)
        )
        chosen.append(wanted.assign(part=place, low=low, high=high))
    parts = pd.concat(chosen, ignore_index=True)
    parts = parts[parts["value"].notna()].reset_index(drop=True)
    left_out = 0
    keys = ["page", *(name for name in map(str, rows) if name not in {*_NOT_COORDINATES, "page"})]
    if rule.get("clear_effect", False):
        clear = _clear(parts, rules["clear_effect"])
        left_out = len(parts.loc[~clear, keys].drop_duplicates())
        parts = parts[clear].reset_index(drop=True)
    if parts.empty:
        return Verdict(claim, says, reading, NOT_TESTED, parts, left_out, parts, math.nan)

    critical = _critical(rules["significance"] / len(parts))
    numbers = parts[["value", "error", "low", "high"]].astype(float)
    parts["outcome"] = [
        _outcome(value, error, low, high, critical)
        for value, error, low, high in numbers.itertuples(index=False)
    ]
    cells = _cells(parts, keys)
    counts = Counter(cells["outcome"])
    told = counts["holds"] + counts["fails"]
    if told < rules["decided"] * len(cells):
        status = NOT_SETTLED
    elif counts["holds"] >= rules["most"] * told:
        status = REPRODUCED
    elif counts["holds"] <= rules["few"] * told:
        status = NOT_REPRODUCED
    else:
        status = SOMETIMES
    return Verdict(claim, says, reading, status, cells, left_out, parts, critical)


def said(page: str, quantities: pd.DataFrame, rules: Mapping[str, Any] | None = None) -> str:
    """Say what a page's own quantities say of each claim that it bears on.

    Parameters
    ----------
    page : str
        Name of the page.
    quantities : DataFrame
        As `qdq.grid.Grid.quantities`.
    rules : mapping, optional
        As `read` returns.

    Returns
    -------
    str
        Markdown: what the numbers are for, and a list. Empty if no claim lists the page.
    """
    rules = read() if rules is None else rules
    lines = []
    for claim, rule in rules["claims"].items():
        if page in rule.get("pages", ()):
            found = verdict(claim, {page: quantities}, rules)
            says, reading = (text.replace("*", r"\*") for text in (found.says, found.reading))
            line = f"- **{claim}.** *{says}* {reading} **{found.counted()}**"
            if found.status == SOMETIMES:
                where = "; ".join(c.split(": ", 1)[-1] for c in found.conditions())
                line += f" It holds where: {where}."
            lines.append(line)
            lines += [f"  - {_capital(figure)}." for figure in found.figures()]
    return "\n".join([_basis(page, quantities, rules), "", *lines]) if lines else ""


def _basis(page: str, quantities: pd.DataFrame, rules: Mapping[str, Any]) -> str:
    """Say for which number of tasks and which variant the claims are weighed on a page."""
    main = rules["main"]
    normalise, queue = (_WORDS.get(main[name], main[name]) for name in ("normalise", "queue"))
    text = f"For {_number_of_tasks(quantities['n_tasks'])} tasks an experiment, and for DQ with "
    text += f"{normalise} and the queue read as {queue}"
    listed = [
        claim
        for claim, rule in rules["claims"].items()
        if page in rule.get("pages", ()) and rule.get("variants", False)
    ]
    several = any(
        quantities[name].nunique() > 1 for name in VARIANT if name in quantities and name in main
    )
    if listed and several:
        text += f"; {_and(listed)} {'counts' if len(listed) == 1 else 'count'} every variant that "
        text += "the page runs"
    return f"{text}. Standard errors are in parentheses."


def in_short(page: str, rules: Mapping[str, Any] | None = None) -> str:
    """Say in two sentences what a page's kept standard run finds.

    Parameters
    ----------
    page : str
        Name of a page whose quantities compare mixed DQ with all other methods.
    rules : mapping, optional
        As `read` returns.

    Returns
    -------
    str
        Markdown. If none is kept, it says so.
    """
    rules = read() if rules is None else rules
    kept = publish.run_of(page)
    if kept is None:
        return "No run of this page is kept."
    rows = _main_variant(kept.tables["quantities"], rules["main"])

    def middle(values: pd.Series, write: Callable[[float], str]) -> str:
        low, centre, high = map(write, np.quantile(values.astype(float), [0.0, 0.5, 1.0]))
        return f"{centre} ({low} to {high})"

    clear = rows[_clear(rows, rules["clear_effect"])]
    shares = clear[clear["quantity"] == "share_found"]
    naive, mixed = (
        middle(shares.loc[shares["method"] == method, "value"], "{:z.2f}".format)
        for method in ("naive", "dq_mixed")
    )
    ratios = rows[(rows["quantity"] == "rmse_ratio") & (rows["method"] == "dq_mixed")]
    names = [name for name in map(str, rows) if name not in {*_NOT_COORDINATES, *VARIANT}]
    lowest: Counter[str] = Counter()
    for _, cell in ratios.groupby(names, sort=False, dropna=False):
        others = cell.set_index("against")["value"].astype(float)
        # wDQ over one arrival is the naive estimator but for the last task: not a lower error.
        best = next(method for method in METHODS if others.get(method, 0.0) > 0.999 * others.max())
        lowest[best if others.max() > 1.0 else "dq_mixed"] += 1
    cells = sum(lowest.values())
    (first, count), *rest = lowest.most_common()
    leaders = [f"for {_label(first)} in {count} of {cells} cells"]
    leaders += [f"for {_label(method)} in {count}" for method, count in rest]
    if "dq_mixed" not in lowest:
        leaders.append(f"for {_label('dq_mixed')} in none")
    spread = rows[(rows["quantity"] == "sd_ratio") & (rows["against"] == "naive")]
    spread = spread[spread["method"] == "dq_mixed"]
    times = middle(spread["value"], lambda x: f"{float(f'{x:.2g}'):,g}")
    return (
        f"**In short** (the kept run of this page, {_number_of_tasks(rows['n_tasks'])} tasks an "
        f"experiment; medians and, in parentheses, ranges over its cells): on average naive finds "
        f"{naive} of the effect and mixed DQ {mixed}. The root mean squared error (RMSE) is lowest "
        f"{_and(leaders)}; the standard deviation (SD) of mixed DQ is {times} times that of naive."
    )


def _clear(rows: pd.DataFrame, rule: Mapping[str, float]) -> pd.Series:
    """Return which rows are of cells whose effect is large and well known enough."""
    size = rows["gte"].astype(float).abs()
    clear = size >= rule["smallest"] * rows["control"].astype(float)
    return clear & (size >= rule["errors"] * rows["gte_error"].astype(float))


def long_run(page: str, rules: Mapping[str, Any] | None = None) -> str:
    """Say what a page's kept long run says of its claims, and what made it.

    Parameters
    ----------
    page : str
        Name of the page.
    rules : mapping, optional
        As `read` returns.

    Returns
    -------
    str
        Markdown: which parameters differ from those of the kept standard run, the stamp, and the
        claims as `said` has them. If none is kept, it says so.
    """
    kept, standard = (publish.run_of(page, chosen) for chosen in ("paper", "standard"))
    if kept is None:
        return "No long run of this page is kept."
    usual = standard.stamp["parameters"] if standard else {}
    changed = [
        f"`{name}` {value:,}" if isinstance(value, (int, float)) else f"`{name}` {value}"
        for name, value in kept.stamp["parameters"].items()
        if name not in usual or usual[name] != value
    ]
    same = kept.stamp["numbers"] == numbers_hash()
    source = f"`{kept.stamp['numbers'][:12]}` ({'that of' if same else 'another than'} this book)"
    text = f"Other than by default: {', '.join(changed)}." if changed else "All is as by default."
    text += f" Kept under `book/results/paper`, made by the source {source}."
    quantities = kept.tables.get("quantities")
    verdicts = "" if quantities is None else said(page, quantities, rules)
    return f"{text}\n\n{verdicts}".rstrip()


def _critical(level: float) -> float:
    from scipy.stats import norm

    return float(norm.isf(level / 2.0))


def _outcome(value: float, error: float, low: float, high: float, critical: float) -> str:
    margin = critical * error
    if value > low + margin and value < high - margin:
        return "holds"
    if value < low - margin or value > high + margin:
        return "fails"
    return "open"


def _inside(rows: pd.DataFrame, where: Mapping[str, Any]) -> pd.Series:
    """Return which rows have the values asked for; a list is an interval."""
    found = pd.Series(True, index=rows.index)
    for name, wanted in where.items():
        if name not in rows:
            return pd.Series(False, index=rows.index)
        if isinstance(wanted, list):
            low, high = (
                b if x is None else x for x, b in zip(wanted, (-math.inf, math.inf), strict=True)
            )
            values = pd.to_numeric(rows[name], errors="coerce")
            found &= (values >= low) & (values <= high)
        else:
            found &= rows[name] == wanted
    return found


def _main_variant(rows: pd.DataFrame, main: Mapping[str, str]) -> pd.DataFrame:
    """Leave out other variants than the main one; of a cell's arrival rates, keep the first."""
    for name, wanted in main.items():
        if name in rows:
            rows = rows[rows[name].isna() | (rows[name] == wanted)]
    if "arrival_rate" in rows:
        cell = [name for name in rows if name not in {*_NOT_COORDINATES, *VARIANT}]
        # What has no arrival rate of its own does not hide the first one.
        first = rows.groupby(cell, sort=False, dropna=False)["arrival_rate"].transform("first")
        rows = rows[rows["arrival_rate"].isna() | (rows["arrival_rate"] == first)]
    return rows


def _cells(parts: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return a row a cell: it holds if all of its parts do, and fails if one does."""
    rows = []
    for _, part in parts.groupby(list(keys), sort=False, dropna=False):
        outcomes = set(part["outcome"])
        outcome = "fails" if "fails" in outcomes else "open" if "open" in outcomes else "holds"
        rows.append({name: part.iloc[0][name] for name in keys} | {"outcome": outcome})
    return pd.DataFrame(rows)


def _condition(page: str, cells: pd.DataFrame) -> str:
    """Say where on a page it holds: by at most two of the columns, else by a count."""
    holds, fails = cells["outcome"] == "holds", cells["outcome"] == "fails"
    if not fails.any():
        return f"{page}: all cells that can be told"
    names = [
        name
        for name in map(str, cells)
        if name not in ("outcome", "horizon")
        and cells[name].notna().all()
        and cells[name].nunique() > 1
    ]
    best: tuple[int, str] = (0, "")
    for size in (1, 2):
        for chosen in itertools.permutations(names, size):
            key = pd.Series(list(zip(*(cells[name] for name in chosen), strict=True)), cells.index)
            good = [
                k for k in dict.fromkeys(key) if holds[key == k].any() and not fails[key == k].any()
            ]
            covered = int(holds[key.isin(good)].sum())
            text = _listed(chosen, good, set(cells[chosen[-1]])) if good else ""
            if covered > best[0] or (covered == best[0] and len(text) < len(best[1])):
                best = covered, text
        if best[0] == holds.sum():
            break
    covered, text = best
    if covered < holds.sum():
        more = int(holds.sum()) - covered
        rest = f"{more} of the other {len(cells) - covered} cells"
        text = f"{text}, and in {rest}" if text else f"{int(holds.sum())} of {len(cells)} cells"
    return f"{page}: {text}"


def _listed(names: Sequence[str], values: Sequence[tuple[Any, ...]], last: set[Any]) -> str:
    """Write values of columns: "load 0.5 or 0.7", "normalisation group means with load 0.5".

    `last` holds all values of the last column: where each of them will do, it is left out.
    """
    if len(names) == 1:
        return _phrase(names[0], [value[0] for value in values])
    by_first: dict[Any, list[Any]] = {}
    for first, second in values:
        by_first.setdefault(first, []).append(second)
    parts = []
    for first, seconds in by_first.items():
        part = _phrase(names[0], [first])
        if set(seconds) != last:
            part += f" with {_phrase(names[1], seconds)}"
        parts.append(part)
    return ", and ".join(parts)


def _phrase(name: str, values: Sequence[Any]) -> str:
    """Write a column and some of its values: "load 0.5 or 0.7"."""
    words = _or([_word(value) for value in values])
    if name == "horizon_share":
        return f"horizon {words} of 30Nλ"
    return f"{_word(name)} {words}"


def _word(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:g}"
    return _WORDS.get(str(value), str(value).replace("_", " "))


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _number_of_tasks(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# --------------------------------------------------------------------------------------------------
# The scoreboard
# --------------------------------------------------------------------------------------------------


def scoreboard(found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """Return the table of all verdicts, in HTML.

    Parameters
    ----------
    found : mapping of str to mapping of str to Verdict
        The verdicts of each claim, by what the quantities are from, such as "this build".

    Returns
    -------
    str
        A row a claim, with a link to its section in `details`.
    """
    first = next(iter(found.values()))
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", "claim", *found))
    rows = []
    for claim, of_first in first.items():
        cells = [f'<td><a href="#claim-{claim.lower()}">{claim}</a></td>']
        cells.append(f"<td>{escape(of_first.says)}</td>")
        for each in found.values():
            tasks = _tasks(each[claim])
            cells.append(f"<td><strong>{each[claim].status}</strong>{tasks}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def details(found: Mapping[str, Mapping[str, Verdict]], links: Mapping[str, str]) -> str:
    """Return a section for each claim with the figures behind its verdicts, in HTML.

    Parameters
    ----------
    found : mapping of str to mapping of str to Verdict
        As for `scoreboard`.
    links : mapping of str to str
        The address of each page, by name.

    Returns
    -------
    str
    """
    first = next(iter(found.values()))
    parts = []
    for claim, of_first in first.items():
        said = f"<strong>{claim}.</strong> <em>{escape(of_first.says)}</em>"
        parts.append(f'<p id="claim-{claim.lower()}">{said} {escape(of_first.reading)}</p><ul>')
        for source, verdicts in found.items():
            each = verdicts[claim]
            text = f"In {escape(source)}: <strong>{each.status}</strong>{_tasks(each)}."
            if len(each.parts):
                text += f" {each.counted()}"
            inside = []
            if each.status == SOMETIMES:
                inside += [f"It holds on {condition}" for condition in each.conditions()]
            inside += [_capital(figure) for figure in each.figures()]
            if each.pages:
                pages = (f'<a href="{links[page]}">{page}</a>' for page in each.pages)
                inside.append(f"Pages: {', '.join(pages)}")
            listed = "".join(f"<li>{line}.</li>" for line in inside)
            parts.append(f"<li>{text}<ul>{listed}</ul></li>" if listed else f"<li>{text}</li>")
        parts.append("</ul>")
    return "\n".join(parts)


def _tasks(found: Verdict) -> str:
    counts = found.n_tasks
    if not counts:
        return ""
    low, high = (f"{n:,}" for n in (counts[0], counts[-1]))
    return f" (n = {low})" if low == high else f" (n = {low} to {high})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
