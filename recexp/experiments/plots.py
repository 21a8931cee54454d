"""Frames to figures: units on axes, device and tier in the title, medians with their spread, numbers on bars.

Figures are objects of their own (no pyplot state), so drawing many neither leaks nor interferes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator
from matplotlib.transforms import Bbox
from pandas.io.formats.style import Styler

from recexp.experiments.record import SHAPES

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
SERIES = ("device", "backbone", "backend", "dtype", "mode", "tier", *SHAPES)
MARKERS = "osD^vPX*"  # a series is told apart by them too, not by its colour alone
PAPER = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}  # behind a number that crosses a line
PLACES = ((0, 6), (0, -6), (6, 6), (-6, 6), (6, -6), (-6, -6), (8, 0), (-8, 0))  # points away
style = matplotlib.rc_context({  # decorates what draws; nobody else's figures change
    "font.size": 8, "axes.titlesize": 9, "figure.titlesize": 10, "legend.fontsize": 8, "axes.grid": True,
    "grid.alpha": 0.3, "axes.axisbelow": True, "lines.markersize": 5, "errorbar.capsize": 3,
})  # fmt: skip


class Plot(Figure):
    """A figure that a notebook shows as it is, without pyplot. Wider than 10 inches it would shrink in a report, and
    its text, of 8 points, with it."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        self.numbers: list[Annotation] = []

    def panels(self, count: int, columns: int = 3, sharey: bool = True) -> list[Axes]:
        rows, columns = -(-count // columns), min(count, columns)
        found = list(self.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
        for spare in found[count:]:
            spare.remove()
        return found[:count]

    def key(self) -> None:
        """One legend of all panels, below them, where it hides nothing."""
        pairs = (pair for axes in self.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True))
        entries = {label: handle for handle, label in pairs}
        widest = max((len(line) for label in entries for line in label.split("\n")), default=0)
        columns = min(len(entries), int(15 * self.get_figwidth() / (widest + 6)) or 1)
        self.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)

    def beside(self, axes: Axes, text: str, at: tuple[float, float], color: str) -> None:
        """A number that ``titled`` puts beside its point, if it hides nothing there; tables have those left out."""
        options: dict[str, Any] = {"textcoords": "offset points", "color": color, "bbox": PAPER, "in_layout": False}
        self.numbers.append(axes.annotate(text, at, (0, 0), **options))

    def titled(self, title: str) -> Plot:
        """Comes last, and puts the numbers of ``beside`` into what room is left."""
        self.suptitle("\n".join(wrapped(line, int(13 * self.get_figwidth())) for line in title.split("\n")))
        self._place_numbers()
        return self

    def _place_numbers(self) -> None:
        """Those at the ends of lines first, and of one x the upper before the lower."""
        self.draw_without_rendering()
        for axes in self.axes:
            paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
            points = np.concatenate([np.zeros((0, 2)), *(np.asarray(path.vertices) for path in paths)])
            taken = [Bbox([point, point]).padded(self.dpi / 18) for point in points]  # half a marker, and a little
            paths = [path for path, line in zip(paths, axes.lines, strict=True) if line.get_linestyle() != "None"]
            paths += [bars.get_transform().transform_path(p) for bars in axes.collections for p in bars.get_paths()]
            mine = [(text, *axes.transData.transform(text.xy).round()) for text in self.numbers if text.axes is axes]
            foot, middle = dict[float, float](), sum(axes.bbox.intervalx) / 2
            for text, at, _ in sorted(mine, key=lambda it: (-abs(it[1] - middle), -it[2])):
                for x, y in PLACES:
                    text.set(position=(x, y), ha=("center", "left", "right")[np.sign(x)])
                    text.set_va(("center", "bottom", "top")[np.sign(y)])
                    box = text.get_window_extent()
                    inside = (axes.bbox.min <= box.min).all() and (box.max <= axes.bbox.max).all()
                    hides = box.count_overlaps(taken) or any(path.intersects_bbox(box, filled=False) for path in paths)
                    if inside and not hides and box.y0 <= foot.get(at, box.y0):
                        taken.append(box)
                        foot[at] = box.y0
                        break
                else:
                    text.set_visible(False)

    @style
    def savefig(self, *args: Any, **options: Any) -> None:
        super().savefig(*args, **options)  # what is made only now, such as ticks, has the style too

    def _repr_png_(self) -> bytes:
        self.savefig(buffer := io.BytesIO(), format="png", dpi=100)
        return buffer.getvalue()


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
    figure = Plot(8, 5) if len(parts) == 1 else Plot(10, 1 + 3.7 * -(-len(parts) // columns))
    at, times = np.unique(floats(frame[x])), floats(frame["p50_ms"].dropna())
    varying, fixed = telling(frame, SERIES, [x, "mode", "tier"] if panels else [x]), _fixed(frame, x)
    order: dict = {}  # a series looks the same in every panel
    for axes, part in zip(figure.panels(len(parts), columns), parts, strict=True):
        _draw_latency(figure, axes, part, x, varying, order)
        axes.set(xlabel=x.replace("_", " "))
        logarithmic(axes.xaxis, at)
        logarithmic(axes.yaxis, times)
        if len(at) <= 12:
            axes.set_xticks(at, [f"{value:g}" for value in at])
            axes.set_xticks([], minor=True)
        if not len(times):
            axes.set_yticks([])
        axes.margins(0.1, 0.1)
        if len(parts) > 1:
            own = {name: value for name, value in _fixed(part, x).items() if name not in fixed}
            axes.set_title(wrapped(in_words(own), 100 // columns))
    for axes in figure.axes[::columns]:
        axes.set_ylabel("latency, ms (median, p10 to p90)")
    if varying or frame["p50_ms"].isna().any():
        figure.key()
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


def _draw_latency(figure: Plot, axes: Axes, frame: pd.DataFrame, x: str, varying: list[str], order: dict) -> None:
    groups = list(frame.groupby(varying, dropna=False, sort=False)) if varying else [((), frame)]
    for key, group in groups:
        name = in_words(dict(zip(varying, key, strict=True)))
        i = order.setdefault(name, len(order))
        colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        timed, lost = group[group["p50_ms"].notna()], group[group["p50_ms"].isna()]
        at, (p50, spread) = floats(timed[x]), medians(timed)
        if len(timed):
            line = ("-", "--", ":")[i // len(PALETTE) % 3]
            axes.errorbar(at, p50, spread, label=name, color=colour, ls=line, marker=marker)
        for point in zip(at, p50, strict=True) if len(groups) <= 4 else ():
            figure.beside(axes, digits(point[1]), point, colour)
        for status, some in lost.groupby("status"):
            reasons = "; ".join(some["reason"].dropna().map(brief).unique())
            foot = np.full(len(some), 0.02 + 0.03 * i)
            label = textwrap.fill(f"{name} {status}: {reasons}".strip(), 45)
            axes.plot(floats(some[x]), foot, "x", color=colour, label=label, transform=axes.get_xaxis_transform())


@style
def plot_error_heatmap(frame: pd.DataFrame, title: str = "Relative difference, ‖a − r‖ / ‖r‖") -> Plot:
    """Columns layer, operation and relative as a map, colours by the logarithm. An exact 0 is white, what could not be
    compared grey, an infinite difference (NaN) red."""
    layers, operations = list(frame["layer"].unique()), list(frame["operation"].unique())
    values = floats(frame["relative"])
    positive = values[np.isfinite(values) & (values > 0)]
    norm = LogNorm(*(positive.min() / 2, positive.max() * 2) if positive.size else (1e-16, 1))
    scale = ScalarMappable(norm, "cividis")
    figure = Plot(max(6, 2.2 + 0.455 * len(operations)), 2.6 + 0.25 * len(layers))
    axes = figure.subplots()
    for layer, operation, value in zip(frame["layer"], frame["operation"], values, strict=True):
        face, text = ("#BBBBBB", "n/a") if np.isnan(value) else ("#CC0000", "inf") if value else ("white", "0")
        if np.isfinite(value) and value:
            face, text = to_hex(scale.cmap(norm(value))), f"{value:.1e}".replace("e-0", "e-")
        ink = "white" if np.isinf(value) or (value > 0 and norm(value) < 0.5) else "black"
        cell(axes, operations.index(operation), layers.index(layer), face, text, ink)
    axes.set(xlim=(-0.5, len(operations) - 0.5), ylim=(len(layers) - 0.5, -0.5), xlabel="operation", ylabel="layer")
    axes.set_xticks(range(len(operations)), operations, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(layers)), [f"layer {name}" if name.isdigit() else name for name in layers])
    axes.grid(False)
    figure.colorbar(scale, ax=axes, label="relative difference", location="bottom", aspect=60)
    return figure.titled(title)


def wrapped(text: str, width: int) -> str:
    """Lines of at most ``width`` letters, none of which ends inside a phrase between commas, if it has any."""
    phrases = text.replace(" ", "\xa0").replace(",\xa0", ", ") if ", " in text else text
    return textwrap.fill(phrases, width, break_long_words=False).replace("\xa0", " ")


def in_words(values: Mapping[str, object]) -> str:
    """`hstu, cpu, tier device, batch size 8`: numbers and tiers say what they are, other names speak for themselves."""
    bare = ("device", "backbone", "backend", "dtype", "mode")
    parts = {name: "?" if pd.isna(value) else str(value) for name, value in values.items()}  # type: ignore[call-overload]
    return ", ".join(value if name in bare else f"{name.replace('_', ' ')} {value}" for name, value in parts.items())


def brief(reason: str) -> str:
    """The first line of a reason, at most 200 characters."""
    return reason.partition("\n")[0][:200]


def digits(value: float) -> str:
    """Three digits that count, zeros among them."""
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:#.3g}"


def floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(dtype=float, na_value=np.nan)


def medians(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Median times [N], and how far p10 and p90 lie from them, [2, N] as error bars take it, in ms."""
    p10, p50, p90 = (floats(rows[column]) for column in ("p10_ms", "p50_ms", "p90_ms"))
    return p50, np.stack([p50 - p10, p90 - p50])


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
    axes.text(x, y, text, ha="center", va="center", color=ink)
