from __future__ import annotations

import re
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb, to_rgba
from numpy.testing import assert_allclose
from scipy.spatial.distance import pdist

import qdq
from qdq import estimators, figures


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    """Draw in the book's style, and leave nothing behind."""
    with plt.rc_context():
        figures.use_style()
        yield
        plt.close("all")


def lines(axes: plt.Axes, colour: str) -> list[np.ndarray]:
    """Return the points of the lines of a colour."""
    return [
        np.column_stack(line.get_data()).astype(float)
        for line in axes.lines
        if to_rgba(line.get_color()) == to_rgba(colour)
    ]


def linear(colour: str) -> np.ndarray:
    parts = np.array(to_rgb(colour))
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def test_every_method_has_a_style_of_its_own() -> None:
    assert set(figures.METHODS) == set(estimators.METHODS)
    assert list(figures.STYLES)[:6] == list(figures.METHODS)
    for name in list(figures.STYLES)[6:]:
        assert callable(getattr(qdq, name)), "named as the function whose estimate it draws"
    for part in ("label", "colour", "marker"):
        assert len({getattr(style, part) for style in figures.STYLES.values()}) == 9


# Linear RGB as the eye has it that lacks one kind of cone (Machado, Oliveira, Fernandes 2009).
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


@pytest.mark.parametrize("eye", VISION)
def test_colours_can_be_told_apart(eye: str) -> None:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    lab = []
    for colour in (*(style.colour for style in figures.STYLES.values()), figures.TRUTH):
        x, y, z = to_xyz @ np.clip(VISION[eye] @ linear(colour), 0, 1) / to_xyz.sum(axis=1)
        x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
        lab.append([116 * y - 16, 500 * (x - y), 200 * (y - z)])
    # In CIELAB, where 2.3 can just be told apart side by side; 16 is the least of Okabe and Ito's.
    assert pdist(lab).min() > 15.0


def test_the_ground_is_opaque_white(tmp_path) -> None:
    figure, _ = plt.subplots()
    figure.savefig(tmp_path / "figure.png")
    pixels = plt.imread(tmp_path / "figure.png")
    assert_allclose(pixels[0, 0], [1.0, 1.0, 1.0, 1.0][: pixels.shape[2]])
    # Colours stand out from it by 2 : 1 at least (text, which needs more, is dark).
    for style in figures.STYLES.values():
        assert 1.05 / (luminance(style.colour) + 0.05) > 2.0


def test_type_is_legible_on_a_phone() -> None:
    # A phone shows the figure some 360 px wide: how many of them are the letters of an axis high?
    points = min(plt.rcParams["xtick.labelsize"], plt.rcParams["legend.fontsize"])
    assert points / 72.0 / figures.WIDTH * 360.0 >= 9.0


def frame_of(methods: list[str]) -> pd.DataFrame:
    value = -np.arange(1.0, len(methods) + 1.0)
    columns = {"method": methods, "value": value, "low": value - 0.2, "high": value + 0.1}
    return pd.DataFrame(columns)


def test_intervals_are_where_the_numbers_are() -> None:
    axes = figures.intervals(frame_of(["dq_mixed", "naive"]), truth=-1.5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "mixed DQ"]
    interval, estimate = lines(axes, figures.METHODS["dq_mixed"].colour)
    assert_allclose(interval, [[-1.2, 1.0], [-0.9, 1.0]])
    assert_allclose(estimate, [[-1.0, 1.0]])
    (truth,) = lines(axes, figures.TRUTH)
    assert_allclose(truth[:, 0], -1.5)


def test_intervals_take_the_methods_that_need_policies() -> None:
    methods = ["log_twin", "naive", "lstd_dq", "dq_score"]
    axes = figures.intervals(frame_of(methods), truth=-1.5)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["naive", "score DQ", "LSTD-DQ", "log twin"]
    interval, estimate = lines(axes, figures.STYLES["log_twin"].colour)
    assert_allclose(interval, [[-1.2, 3.0], [-0.9, 3.0]])
    assert_allclose(estimate, [[-1.0, 3.0]])


def test_intervals_go_where_they_are_told() -> None:
    _, axes = plt.subplots()
    assert figures.intervals(frame_of(["naive"]), 0.0, axes=axes) is axes


def test_intervals_refuse_two_rows_of_a_method() -> None:
    with pytest.raises(ValueError, match="frame has 2 rows for 1 methods"):
        figures.intervals(frame_of(["naive", "naive"]), 0.0)


def test_unknown_methods_are_refused() -> None:
    frame = pd.DataFrame({"method": ["dq"], "x": [0.0], "y": [0.0], "panel": ["one"]})
    right = "method='dq' is not allowed: method must be one of naive"
    with pytest.raises(ValueError, match=right):
        figures.intervals(frame_of(["dq"]), 0.0)
    with pytest.raises(ValueError, match=right):
        figures.violins({"dq": [1.0, 2.0]}, 0.0)
    with pytest.raises(ValueError, match=right):
        figures.small_multiples(frame, x="x", y="y", panel="panel")


def test_violins_show_middle_half_mean_and_truth() -> None:
    values = np.arange(101.0)
    axes = figures.violins({"switchback": values - 50.0, "naive": values**2}, truth=3.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "switchback"]
    naive, switchback = lines(axes, "#222222")
    assert_allclose(naive, [[25.0**2, 0.0], [75.0**2, 0.0]])
    assert_allclose(switchback, [[-25.0, 1.0], [25.0, 1.0]])
    means = np.concatenate(lines(axes, "white"))
    assert_allclose(means, [[np.mean(values**2), 0.0], [0.0, 1.0]], atol=1e-12)
    (truth,) = lines(axes, figures.TRUTH)
    assert_allclose(truth[:, 0], 3.0)
    bodies = [to_rgba(body.get_facecolor()[0]) for body in axes.collections]
    assert bodies == [to_rgba(figures.METHODS[m].colour) for m in ("naive", "switchback")]


def test_violins_need_two_estimates() -> None:
    with pytest.raises(ValueError, match="naive has 1 estimates: a violin needs at least 2"):
        figures.violins({"naive": [1.0]}, 0.0)


def test_response_by_share_draws_arms_mean_tangent_and_both_effects() -> None:
    shares, control, treated = [0.0, 0.5, 1.0], [3.0, 2.0, np.nan], [np.nan, 1.0, 1.0]
    axes = figures.response_by_share(shares, control, treated, slope=-2.5)
    for arm, values in (("control", control), ("treatment", treated)):
        assert_allclose(lines(axes, figures.ARMS[arm])[0], np.column_stack((shares, values)))
    mean, chord = lines(axes, figures.TRUTH)[:2]
    assert_allclose(mean, [[0.0, 3.0], [0.5, 1.5], [1.0, 1.0]])
    assert_allclose(chord, [[0.0, 3.0], [1.0, 1.0]])
    assert_allclose(
        lines(axes, figures.METHODS["dq_response"].colour)[0], [[0.0, 2.75], [1.0, 0.25]]
    )
    arrows = [(note.xyann, note.xy) for note in axes.texts]
    assert_allclose(arrows, [((0.5, 2.0), (0.5, 1.0)), ((1.06, 3.0), (1.06, 1.0))])
    said = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert said[3] == "slope at one half: −2.50"
    assert said[4:] == ["difference of the arms: −1.00", "true effect: −2.00"]
    axes = figures.response_by_share(shares, control, treated)
    assert not lines(axes, figures.METHODS["dq_response"].colour)


def test_response_by_share_needs_both_ends_and_the_middle() -> None:
    with pytest.raises(ValueError, match=r"treated shares that hold 0, 1/2 and 1"):
        figures.response_by_share([0.0, 0.4, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0])


def grid_of() -> pd.DataFrame:
    rows = [
        {"method": method, "load": load, "pair": pair, "rmse": load * rank, "error": 0.01}
        for pair in ("2 vs 3", "1 vs 2", "2 vs 5")
        for rank, method in enumerate(("dq_mixed", "naive"), 1)
        for load in (0.9, 0.5)
    ]
    return pd.DataFrame(rows)


def test_small_multiples_draw_each_line_in_its_panel() -> None:
    figure = figures.small_multiples(
        grid_of(), x="load", y="rmse", panel="pair", error="error", log=True, labels={"rmse": "R"}
    )
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["2 vs 3", "1 vs 2", "2 vs 5"]
    assert shown[0].get_yscale() == "log"
    (mixed,) = lines(shown[1], figures.METHODS["dq_mixed"].colour)
    (naive,) = lines(shown[1], figures.METHODS["naive"].colour)
    assert_allclose(mixed[:, 1], [0.5, 0.9])
    assert_allclose(naive[:, 1], [1.0, 1.8])
    # Beside each other, and by no more than the eye needs.
    assert_allclose(mixed[:, 0], [0.5, 0.9], atol=0.01)
    assert (naive[:, 0] < mixed[:, 0]).all()
    (_, bars) = (container.lines[2][0] for container in shown[1].containers)
    assert_allclose(bars.get_segments()[0][:, 1], [0.5 - 0.02, 0.5 + 0.02])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["naive", "mixed DQ"]
    assert figure.get_supylabel() == "R"
    assert figure.get_supxlabel() == "load"


def test_small_multiples_draw_a_line_across_each_panel_where_told() -> None:
    figure = figures.small_multiples(grid_of(), x="load", y="rmse", panel="pair", level=1.0)
    for axes in figure.axes:
        if axes.get_visible():
            (line,) = lines(axes, figures.TRUTH)
            assert_allclose(line[:, 1], 1.0)


def test_small_multiples_take_a_single_x() -> None:
    frame = grid_of()
    figures.small_multiples(frame[frame["load"] == 0.9], x="load", y="rmse", panel="pair")


def test_tables_are_rounded_and_always_the_same() -> None:
    frame = pd.DataFrame({"name": ["<a>", "b"], "value": [1234.5678, np.nan]})
    frame.columns.name = "kind"
    first, second = (figures.table(frame, decimals=2)._repr_html_() for _ in range(2))
    assert first == second
    assert "1,234.57" in first
    assert "NaN" not in first
    assert "kind" not in first
    assert "&lt;a&gt;" in first
    assert "1234" in repr(figures.table(frame))
    assert figures.table(frame.head(0))._repr_html_().count("<th>") == 2
    with pytest.raises(ValueError, match="decimals=-1 is not allowed"):
        figures.table(frame, decimals=-1)


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    texts = {
        "pair": ["1 vs 2", "2 vs 3"],
        "load": ["0.5", "1,000"],
        "bias": ["-0.36 (0.01)", ""],
        "share": ["−51 %", "+2 %"],
        "blank and text": ["", "none"],
    }
    html = figures.table(pd.DataFrame(texts | {"value": [0.1, np.nan]}))._repr_html_()
    right = re.findall('<th style="text-align: right">(.*?)</th>', html)
    assert right == ["load", "bias", "share", "value"]
    assert html.count('<td style="text-align: right">') == 2 * len(right)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.35812, 0.0112, "-0.358 (0.011)"),
        (12.3, 0.25, "12.30 (0.25)"),
        (1234.0, 56.0, "1234 (56)"),
        (0.5, 0.0, "0.5000 (0.0000)"),
        (-0.0001, 0.045, "0.000 (0.045)"),
        (float("nan"), 0.1, ""),
        (0.1, float("inf"), ""),
    ],
)
def test_numbers_are_written_to_the_digits_of_their_error(
    value: float, error: float, text: str
) -> None:
    assert figures.with_error(value, error) == text


def cells() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Results and quantities of two loads and one pair."""
    results, quantities = [], []
    for load in (0.5, 0.95):
        where = {"load": load, "pair": "1 vs 2"}
        for method in ("switchback", "dq_mixed", "naive"):
            numbers = {"mean": -1.0, "bias": 0.25, "sd": 0.5, "rmse": 0.5, "coverage": 0.9}
            errors = {f"{name}_error": 0.01 for name in numbers}
            row = {"method": method, "relative_rmse": load / 2}
            results.append(where | row | numbers | errors)
        for quantity in ("direct", "slope", "gte", "gte_w", "gte_q", "share_found"):
            quantities.append(where | {"quantity": quantity, "value": -load, "error": 0.01})
    return pd.DataFrame(results), pd.DataFrame(quantities)


def text_of(html: str) -> list[list[str]]:
    """Return the cells of each row of the first table."""
    first = html.split("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in first.split("<tr")[1:]]


def test_tables_of_a_grid_have_a_row_a_cell() -> None:
    results, quantities = cells()
    head, *rows = text_of(figures.estimands(quantities, ["pair", "load"])._repr_html_())
    assert head == ["pair", "load", "direct effect", "slope", "GTE", "GTE_w", "GTE_q"]
    assert [row[1] for row in rows] == ["0.5", "0.95"]
    assert [row[4] for row in rows] == ["-0.500 (0.010)", "-0.950 (0.010)"]
    head, *rows = text_of(figures.relative_rmse(results, ["load"])._repr_html_())
    assert head == ["load", "naive", "mixed DQ", "switchback"]
    assert [row[1] for row in rows] == ["0.250", "0.475"]


def test_errors_unfold_a_table_for_each_value_and_keep_the_methods_in_order() -> None:
    results, _ = cells()
    html = figures.errors(results, ["pair", "load"], unfold="load")._repr_html_()
    assert html.count("<details>") == 2
    assert "<summary>load 0.95</summary>" in html
    head, *rows = text_of(html)
    assert head == ["pair", "method", "mean", "bias", "SD", "RMSE", "coverage"]
    assert [row[1] for row in rows] == ["naive", "mixed DQ", "switchback"]
    by_pair = figures.errors(results, ["pair", "load"], unfold="pair")
    assert "<summary>1 vs 2</summary>" in by_pair._repr_html_()
    assert re.search(r"load +method", repr(by_pair))


def test_spread_draws_dq_on_its_own_scale() -> None:
    methods = ("naive", "dq_mixed", "switchback")
    frame = pd.DataFrame({"method": methods * 5, "value": np.arange(15.0)})
    figure = figures.spread(frame, 3.0)
    labels = [[text.get_text() for text in axes.get_yticklabels()] for axes in figure.axes]
    assert labels == [["mixed DQ"], ["naive", "switchback"]]
    plt.close(figure)
