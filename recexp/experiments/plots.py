"""Frames to figures: units on axes, device and tier in the title, medians with their spread, numbers on bars.

Figures are objects of their own (no pyplot state), so drawing many neither leaks nor interferes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator
from pandas.io.formats.style import Styler

from recexp.experiments.record import SHAPES

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
SERIES = ("device", "backbone", "backend", "dtype", "mode", "tier", *SHAPES)
PAPER = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}  # behind a number that crosses a line
style = matplotlib.rc_context({  # decorates what draws; nobody else's figures change
    "font.size": 8, "axes.titlesize": 9, "figure.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3,
    "axes.axisbelow": True, "lines.markersize": 5, "errorbar.capsize": 3,
})  # fmt: skip


class Plot(Figure):
    """A figure that a notebook shows as it is, without pyplot."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def panels(self, rows: int, columns: int, sharey: bool = True) -> list[Axes]:
        return list(self.subplots(rows, columns, squeeze=False, sharey=sharey).flat)

    def titled(self, title: str) -> Plot:
        self.suptitle(title, wrap=True)
        return self

    @style
    def savefig(self, *args: Any, **options: Any) -> None:
        super().savefig(*args, **options)  # what is made only now, such as ticks, has the style too

    def _repr_png_(self) -> bytes:
        self.savefig(buffer := io.BytesIO(), format="png", dpi=100)
        return buffer.getvalue()


def note(axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **options: Any) -> None:
    """A small text beside a point, ``by`` so many points, readable across lines."""
    axes.annotate(text, at, by, textcoords="offset points", fontsize=7, **({"bbox": PAPER, "ha": "center"} | options))


def table(frame: pd.DataFrame) -> Styler:
    """Every number of a frame, to stand under its plot; what all rows share, or none has, is in the caption or out."""
    shown = frame.dropna(axis=1, how="all")
    shared = [name for name in shown if len(shown) > 1 and shown[name].nunique(dropna=False) == 1]
    styled = shown.drop(columns=shared).style.hide(axis="index")
    styled.format(lambda value: f"{value:,.4g}" if isinstance(value, float) else f"{value}", na_rep="–")
    styled.set_table_styles([{"selector": "td", "props": "white-space: nowrap"}])  # a row a line, long reasons too
    return styled.set_caption(in_words(dict(shown[shared].iloc[0])) if shared else "")


@style
def plot_latency(frame: pd.DataFrame, x: str, title: str = "Latency", panels: bool = False) -> Plot:
    """Rows of results against column x: the median with p10 to p90 across it, a line a series, and with ``panels`` a
    panel a mode and tier. What all rows share is in the title, what differs in the legend; a point without a time is a
    cross at the foot, with its reason."""
    frame = frame[frame[x].notna() & (frame["p50_ms"].notna() | (frame["status"] != "ok"))]
    frame = frame.sort_values(x, kind="stable")
    if frame.empty:
        raise ValueError(f"nothing to draw: no row has {x} and either a time or a reason for none")
    parts = [part for _, part in frame.groupby(["mode", "tier"], sort=False, dropna=False)] if panels else [frame]
    columns = len(parts) if len(parts) < 4 else 2
    rows = -(-len(parts) // columns)
    figure = Plot(8, 5) if len(parts) == 1 else Plot(4 * columns + 1, 4 * rows)
    at, times = np.unique(floats(frame[x])), floats(frame["p50_ms"].dropna())
    fixed, order = _fixed(frame, x), {name: i for i, name in enumerate(frame["backbone"].unique())}
    for axes, part in zip_longest(figure.panels(rows, columns), parts):
        if part is None:
            axes.set_axis_off()
            continue
        _draw_latency(axes, part, x, order)
        axes.set(xlabel=x.replace("_", " "), ylabel="latency, ms (median, p10 to p90)")
        logarithmic(axes.xaxis, at)
        logarithmic(axes.yaxis, times)
        if len(at) <= 12:
            axes.set_xticks(at, [f"{value:g}" for value in at])
            axes.set_xticks([], minor=True)
        if not len(times):
            axes.set_yticks([])
        axes.margins(x=0.1)
        if len(parts) > 1:
            own = {name: value for name, value in _fixed(part, x).items() if name not in fixed}
            axes.set_title(textwrap.fill(in_words(own), 60))
    counts = " to ".join(str(n) for n in sorted({frame["count"].min(), frame["count"].max()} - {pd.NA}))
    runs = f"{counts} runs a point" if counts else "nothing was timed"
    return figure.titled(f"{title}\n{in_words(fixed)}, {runs}")


def _fixed(frame: pd.DataFrame, x: str) -> dict[str, object]:
    """What all rows share, apart from x."""
    used = [name for name in SERIES if name in frame and name != x and frame[name].notna().any()]
    return {name: frame[name].iloc[0] for name in used if frame[name].nunique(dropna=False) == 1}


def telling(frame: pd.DataFrame, names: Iterable[str], within: Sequence[str] = ()) -> list[str]:
    """Of the columns, those that tell rows apart which share the columns ``within``, and no more."""
    found: list[str] = []
    for name in (name for name in names if name in frame and name not in within):
        groups = frame.groupby([*within, *found], dropna=False) if within or found else frame.groupby(lambda row: 0)
        if groups[name].nunique(dropna=False).gt(1).any():
            found.append(name)
    return found


def _draw_latency(axes: Axes, frame: pd.DataFrame, x: str, order: Mapping[Any, int]) -> None:
    varying = telling(frame, SERIES, [x])
    groups = list(frame.groupby(varying, dropna=False, sort=False)) if varying else [((), frame)]
    for i, (key, group) in enumerate(groups):
        at_colour = order[key[0]] if varying == ["backbone"] else i  # it has the same colour in every panel
        name, colour = in_words(dict(zip(varying, key, strict=True))), PALETTE[at_colour % len(PALETTE)]
        timed, lost = group[group["p50_ms"].notna()], group[group["p50_ms"].isna()]
        at, p10, p50, p90 = (floats(timed[column]) for column in (x, "p10_ms", "p50_ms", "p90_ms"))
        if len(timed):
            line = ("-", "--", ":")[at_colour // len(PALETTE) % 3]
            axes.errorbar(at, p50, [p50 - p10, p90 - p50], label=name, color=colour, ls=line, marker="o")
        for value, middle in zip(at, p50, strict=True) if len(groups) <= 4 else ():
            others = floats(frame.loc[frame[x] == value, "p50_ms"].dropna())
            above = middle > others.mean() or (middle == others.mean() and i == 0)  # labels keep apart
            note(axes, f"{middle:.3g}", (value, middle), (0, 7 if above else -12), color=colour)
        for status, some in lost.groupby("status"):
            reasons = "; ".join(some["reason"].dropna().map(brief).unique())
            foot = np.full(len(some), 0.02 + 0.03 * i)
            label = textwrap.fill(f"{name} {status}: {reasons}".strip(), 50)
            axes.plot(floats(some[x]), foot, "x", color=colour, label=label, transform=axes.get_xaxis_transform())
    if varying or frame["p50_ms"].isna().any():
        axes.legend()


@style
def plot_error_heatmap(frame: pd.DataFrame, title: str = "Relative difference, ‖a − r‖ / ‖r‖") -> Plot:
    """Columns layer, operation and relative as a map, colours by the logarithm. An exact 0 is white, what could not be
    compared grey, an infinite difference (NaN) red."""
    layers, operations = list(frame["layer"].unique()), list(frame["operation"].unique())
    values = floats(frame["relative"])
    positive = values[np.isfinite(values) & (values > 0)]
    norm = LogNorm(*(positive.min() / 2, positive.max() * 2) if positive.size else (1e-16, 1))
    scale = ScalarMappable(norm, "cividis")
    figure = Plot(2.5 + 0.75 * len(operations), 1.9 + 0.42 * len(layers))
    axes = figure.subplots()
    for layer, operation, value in zip(frame["layer"], frame["operation"], values, strict=True):
        face, text = ("#BBBBBB", "n/a") if np.isnan(value) else ("#CC0000", "inf") if value else ("white", "0")
        if np.isfinite(value) and value:
            face, text = to_hex(scale.cmap(norm(value))), f"{value:.1e}"
        ink = "white" if np.isinf(value) or (value > 0 and norm(value) < 0.5) else "black"
        cell(axes, operations.index(operation), layers.index(layer), face, text, ink)
    axes.set(xlim=(-0.5, len(operations) - 0.5), ylim=(len(layers) - 0.5, -0.5), xlabel="operation", ylabel="layer")
    axes.set_xticks(range(len(operations)), operations, rotation=40, ha="right")
    axes.set_yticks(range(len(layers)), [f"layer {name}" if name.isdigit() else name for name in layers])
    axes.grid(False)
    figure.colorbar(scale, ax=axes, label="relative difference")
    return figure.titled(title)


def in_words(values: Mapping[str, object]) -> str:
    """`hstu, cpu, tier device, batch size 8`: numbers and tiers say what they are, other names speak for themselves."""
    bare = ("device", "backbone", "backend", "dtype", "mode")
    parts = {name: "?" if pd.isna(value) else str(value) for name, value in values.items()}  # type: ignore[call-overload]
    return ", ".join(value if name in bare else f"{name.replace('_', ' ')} {value}" for name, value in parts.items())


def brief(reason: str) -> str:
    """The first line of a reason, at most 200 characters."""
    return reason.partition("\n")[0][:200]


def floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(dtype=float, na_value=np.nan)


def plain(axis: Axis) -> None:
    """1, 2, 5, 10, … on a logarithmic axis, in place of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def logarithmic(axis: Axis, values: np.ndarray, beyond: float = 8) -> None:
    """A plain logarithmic axis, where positive values span more than so many times."""
    if len(values) and 0 < beyond * values.min() < values.max():
        (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
        plain(axis)


def cell(axes: Axes, x: int, y: int, face: str, text: str, ink: str = "black") -> None:
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)
