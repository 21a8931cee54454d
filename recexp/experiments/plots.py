"""Frames to figures: units on axes, device and tier in the title, medians with their spread, numbers on bars.

Figures are objects of their own (no pyplot state), so drawing many neither leaks nor interferes.
"""

import io
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, LogLocator

from recexp.experiments.record import SHAPES

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
SERIES = ("device", "backbone", "backend", "dtype", "mode", "tier", *SHAPES)
PAPER = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}  # behind a number that crosses a line


class Plot(Figure):
    """A figure that a notebook shows as it is, without pyplot."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def _repr_png_(self) -> bytes:
        self.savefig(buffer := io.BytesIO(), format="png", dpi=100)
        return buffer.getvalue()


def plot_latency(frame: pd.DataFrame, x: str, title: str = "Latency") -> Plot:
    """Rows of results against column x: the median with p10 to p90 across it, a line a series. What all rows share is
    in the title, what differs in the legend; a point without a time is a cross at the foot, with its reason."""
    frame = frame[frame[x].notna() & (frame["p50_ms"].notna() | (frame["status"] != "ok"))].sort_values(
        x, kind="stable"
    )
    if frame.empty:
        raise ValueError(f"nothing to draw: no row has {x} and either a time or a reason for none")
    used = [name for name in SERIES if name in frame and name != x and frame[name].notna().any()]
    varying = [name for name in used if frame.groupby(x)[name].nunique(dropna=False).max() > 1]
    fixed = {name: frame[name].iloc[0] for name in used if frame[name].nunique(dropna=False) == 1}  # not what x decides
    figure = Plot(8, 5)
    axes = figure.subplots()
    groups = frame.groupby(varying, dropna=False, sort=False) if varying else [((), frame)]
    for i, (key, group) in enumerate(groups):
        name, colour = _label(dict(zip(varying, key, strict=True))), PALETTE[i % len(PALETTE)]
        timed, lost = group[group["p50_ms"].notna()], group[group["p50_ms"].isna()]
        at, p10, p50, p90 = (_floats(timed[column]) for column in (x, "p10_ms", "p50_ms", "p90_ms"))
        if len(timed):
            line = ("-", "--", ":")[i // len(PALETTE) % 3]
            axes.errorbar(at, p50, [p50 - p10, p90 - p50], label=name, color=colour, ls=line, marker="o", capsize=3)
        for value, middle in zip(at, p50, strict=True):
            others = _floats(frame.loc[frame[x] == value, "p50_ms"].dropna())
            above = middle > others.mean() or (
                middle == others.mean() and i == 0
            )  # labels keep out of each other's way
            place = (0, 7 if above else -12)
            text = f"{middle:.3g}"
            axes.annotate(
                text,
                (value, middle),
                place,
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=colour,
                bbox=PAPER,
            )
        for status, some in lost.groupby("status"):
            label = f"{name} {status}: {'; '.join(some['reason'].dropna().unique())}".strip()
            foot = np.full(len(some), 0.02 + 0.03 * i)
            axes.plot(_floats(some[x]), foot, "x", color=colour, label=label, transform=axes.get_xaxis_transform())
    _scales(axes, np.unique(_floats(frame[x])), _floats(frame["p50_ms"].dropna()))
    counts = " to ".join(str(n) for n in sorted({frame["count"].min(), frame["count"].max()} - {pd.NA}))
    runs = f"{counts} runs a point" if counts else "nothing was timed"
    axes.set(xlabel=x.replace("_", " "), ylabel="latency, ms (median, p10 to p90)")
    axes.set_title(f"{title}\n{_label(fixed)}, {runs}", fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    if varying or frame["p50_ms"].isna().any():
        axes.legend(fontsize=8)
    return figure


def plot_error_heatmap(frame: pd.DataFrame, title: str = "Relative difference, ‖a − r‖ / ‖r‖") -> Plot:
    """A frame of layer_differences as layers × operations, colours by the logarithm. An exact 0 is white, what could
    not be compared grey, an infinite difference (NaN) red."""
    layers, operations = list(frame["layer"].unique()), list(frame["operation"].unique())
    values = frame["relative"].to_numpy(dtype=float, na_value=np.nan)
    positive = values[np.isfinite(values) & (values > 0)]
    norm = LogNorm(*(positive.min() / 2, positive.max() * 2) if positive.size else (1e-16, 1))
    colours = ScalarMappable(norm, "cividis")
    figure = Plot(2.5 + 0.75 * len(operations), 1.9 + 0.42 * len(layers))
    axes = figure.subplots()
    for layer, operation, value in zip(frame["layer"], frame["operation"], values, strict=True):
        face, text = ("#BBBBBB", "n/a") if np.isnan(value) else ("#CC0000", "inf") if value else ("white", "0")
        if np.isfinite(value) and value:
            face, text = to_hex(colours.cmap(norm(value))), f"{value:.1e}"
        ink = "white" if np.isinf(value) or (value > 0 and norm(value) < 0.5) else "black"
        _cell(axes, operations.index(operation), layers.index(layer), face, text, ink)
    axes.set(xlim=(-0.5, len(operations) - 0.5), ylim=(len(layers) - 0.5, -0.5), xlabel="operation", ylabel="layer")
    axes.set_xticks(range(len(operations)), operations, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(layers)), [f"layer {name}" if name.isdigit() else name for name in layers], fontsize=8)
    axes.set_title(title, fontsize=9, wrap=True)
    figure.colorbar(colours, ax=axes, label="relative difference")
    return figure


def plot_quality(frame: pd.DataFrame, chance: Mapping[str, float], title: str = "Quality on the test requests") -> Plot:
    """Columns model, metric, value, and optionally seed: a panel a metric, a bar a model from chance[metric] (0 if not
    given) to the mean, its number, and the values of all seeds as dots with their range."""
    metrics, models = frame["metric"].unique(), list(frame["model"].unique())
    figure = Plot(3.6 * len(metrics) + 1, 1.6 + 0.4 * len(models))
    for axes, metric in zip(figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics, strict=True):
        base = chance.get(metric, 0.0)
        longest = base
        for i, model in enumerate(models):
            values = _floats(frame[(frame["metric"] == metric) & (frame["model"] == model)]["value"])
            if not len(values):
                continue
            axes.barh(i, values.mean() - base, left=base, color=PALETTE[i % len(PALETTE)], alpha=0.8)
            text = f"{values.mean():.3f}"
            if np.ptp(values):
                axes.plot(values, np.full(len(values), i), "o-", color="black", markersize=3, linewidth=1)
                text += f" ({values.min():.3f} to {values.max():.3f})"
            end = max(values.max(), base)
            axes.annotate(text, (end, i), (5, 0), textcoords="offset points", va="center", fontsize=8)
            longest = max(longest, end)
        axes.set_xlim(base, base + (longest - base) * 1.7)
        axes.set_xlabel(f"{metric} (bars start at chance, {base:g})" if base else metric)
        axes.set_yticks(range(len(models)), models)
        axes.axvline(base, color="black", linewidth=1)
    axes.invert_yaxis()
    seeds = frame["seed"].nunique() if "seed" in frame else 1
    figure.suptitle(f"{title}, {f'mean and range of {seeds} seeds' if seeds > 1 else 'one seed'}", fontsize=10)
    return figure


def plot_data(lengths: np.ndarray, actions: np.ndarray, example: Sequence[tuple[str, str]], name: str) -> Plot:
    """The data and the task in one picture: interactions per user, shares of the ratings, and one request as the model
    reads it: example holds (kind, text) a token, kind being context, item, action or candidate."""
    figure = Plot(10, 5.2)
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    axes = figure.add_subplot(grid[0, 0])
    axes.hist(lengths, list(np.geomspace(max(lengths.min(), 1), lengths.max() + 1, 25)), color=PALETTE[0])
    axes.axvline(np.median(lengths), color=PALETTE[1], label=f"median {np.median(lengths):g}, longest {lengths.max()}")
    axes.set(xscale="log", xlabel="interactions of a user", ylabel="users")
    axes.set_title(f"{name}: {len(lengths):,} users, {lengths.sum():,} interactions", fontsize=9)
    _plain(axes.xaxis)
    axes.legend(fontsize=8)
    axes = figure.add_subplot(grid[0, 1])
    kinds, counts = np.unique(actions, return_counts=True)
    bars = axes.bar([f"{kind:g}" for kind in kinds], 100 * counts / counts.sum(), color=PALETTE[2])
    axes.bar_label(bars, fmt="%.1f%%", fontsize=8)
    axes.margins(y=0.1)
    axes.set(xlabel="rating", ylabel="share of interactions, %")
    axes.set_title("How users rate", fontsize=9)
    axes = figure.add_subplot(grid[1, :])
    colours = {"context": PALETTE[3], "item": PALETTE[5], "action": PALETTE[4], "candidate": PALETTE[2]}
    for i, (kind, text) in enumerate(example):
        _cell(axes, i, 0, colours[kind], text)
    for kind, colour in ((k, c) for k, c in colours.items() if any(k == kind for kind, _ in example)):
        axes.scatter([], [], marker="s", color=colour, label=kind)
    axes.set(xlim=(-0.6, len(example) - 0.4), ylim=(-0.6, 0.6))
    axes.set_axis_off()
    axes.set_title("One request, token by token: which of the candidates will this user like?", fontsize=9)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.05), frameon=False)
    return figure


def plot_sizes(frame: pd.DataFrame, title: str = "What a model costs") -> Plot:
    """Column model, and a column a quantity with its unit in the name ("KV cache, bytes per token"): a panel each."""
    quantities = [column for column in frame.columns if column != "model"]
    figure = Plot(3.2 * len(quantities) + 0.8, 1.5 + 0.4 * len(frame))
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(frame))]
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        values = _floats(frame[quantity])
        bars = axes.barh(frame["model"], values, color=colours, alpha=0.8)
        texts = [f"{value:,.0f}" if value < 1e6 else EngFormatter(places=2)(value) for value in values]
        axes.bar_label(bars, texts, padding=3, fontsize=8)
        axes.set_xlim(0, values.max() * 1.4)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.set_xlabel(quantity, fontsize=9)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure


def _label(values: Mapping[str, object]) -> str:
    """`hstu, cpu, tier device, batch size 8`: numbers and tiers say what they are, other names speak for themselves."""
    bare = ("device", "backbone", "backend", "dtype", "mode")
    parts = {name: "?" if pd.isna(value) else str(value) for name, value in values.items()}  # type: ignore[call-overload]
    return ", ".join(value if name in bare else f"{name.replace('_', ' ')} {value}" for name, value in parts.items())


def _floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(dtype=float, na_value=np.nan)


def _scales(axes: Axes, at: np.ndarray, times: np.ndarray) -> None:
    """Logarithmic where values span more than a factor of eight; few measured points are the ticks of x."""
    if at[0] > 0 and at[-1] > 8 * at[0]:
        axes.set_xscale("log")
    if len(at) <= 12:
        axes.set_xticks(at, [f"{value:g}" for value in at])
        axes.set_xticks([], minor=True)
    if not len(times):
        axes.set_yticks([])
    elif times.max() > 8 * times.min():
        axes.set_yscale("log")
        _plain(axes.yaxis)
    axes.margins(x=0.08)


def _plain(axis: Axis) -> None:
    """1, 2, 5, 10, … on a logarithmic axis, in place of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _cell(axes: Axes, x: int, y: int, face: str, text: str, ink: str = "black") -> None:
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)


def plot_training(histories: Mapping[str, Sequence[Mapping[str, float]]]) -> Plot:
    """Validation AUC of the averaged weights against training steps, a line a model; the kept weights are marked."""
    figure = Plot(8, 3.5)
    axes = figure.subplots()
    for i, (name, history) in enumerate(histories.items()):
        steps, scores = [h["step"] for h in history], [h["validation_auc"] for h in history]
        best = int(np.argmax(scores))
        axes.plot(steps, scores, color=PALETTE[i], label=f"{name}: kept {scores[best]:.4f} at step {steps[best]:g}")
        axes.plot(steps[best], scores[best], "o", color=PALETTE[i])
    axes.set(xlabel="training steps", ylabel="validation AUC, first task")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
