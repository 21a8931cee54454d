"""What numerical_diff shows: who keeps the rule, how errors grow, what rankings notice, and each in words."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from recexp.experiments.plots import MARKERS, PALETTE, Plot, brief, style

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16")
COLOURS = dict(zip(DTYPES, ("#000000", *PALETTE[0:4:3], *PALETTE[1:3]), strict=True))
MARKS = dict(zip(DTYPES, MARKERS, strict=False))


@style
def plot_verdicts(differences: pd.DataFrame, title: str) -> Plot:
    """Logits of every pair as a share of what the rule allows, a panel a model, a mark a dtype, the largest's number at
    the right; beyond the line at 1 the rule is broken. Equal bit for bit: at the left edge; infinitely far off: at the
    right one."""
    logits = differences[differences["layer"] == "model"].sort_values("kind", kind="stable")
    share = (logits["looked_at"] / logits["limit"]).fillna(0)  # 0 of 0
    logits = logits.assign(share=share, pair=logits["kind"] + ": " + logits["tested"])
    models, pairs = list(logits["model"].unique()), list(logits["pair"].unique())
    edge, end = share.where(share > 0, 1).min() / 3, 3 * max(1, share.where(share < np.inf, 1).max())
    figure = Plot(10, 1.7 + 0.22 * len(pairs))
    for axes, model in zip(figure.panels(len(models)), models, strict=True):
        mine = logits[logits["model"] == model].assign(at=lambda frame: frame["share"].clip(edge, end))
        for dtype in (dtype for dtype in COLOURS if dtype in set(logits["dtype"])):
            some = mine[mine["dtype"] == dtype]
            at, colour = some["pair"].map(pairs.index), COLOURS[dtype]
            axes.plot(some["at"], at, MARKS[dtype], color=colour, alpha=0.8, label=dtype)
        largest = mine.groupby("pair")["at"].max().reindex(pairs).dropna()
        texts = ["0" if at == edge else "inf" if at == end else f"{at:.2g}" for at in largest]
        axes.secondary_yaxis("right").set_yticks([pairs.index(pair) for pair in largest.index], texts)
        axes.axvline(1, color="#CC0000")
        axes.set(xscale="log", title=model, xlabel="difference, as a share of the limit", xlim=(edge / 2, None))
        axes.set_yticks(range(len(pairs)), pairs)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    figure.key()
    return figure.titled(f"{title} (at the right: the largest)")


@style
def plot_growth(stream: pd.DataFrame, title: str) -> Plot:
    """The error of the residual stream against layers, a panel a model, a line a dtype, its ends in numbers."""
    models = list(stream["model"].unique())
    figure = Plot(10, 4)
    for axes, model in zip(figure.panels(len(models)), models, strict=True):
        for dtype, line in stream[stream["model"] == model].groupby("dtype", sort=False):
            layers, error, look = line["layer"].astype(int) + 1, line["error"], str(dtype)
            axes.plot(layers, error, color=COLOURS[look], marker=MARKS[look], label=dtype)
            for end in (0, -1):
                figure.beside(axes, f"{error.iloc[end]:.1e}", (layers.iloc[end], error.iloc[end]), COLOURS[look])
        axes.set(yscale="log", xlabel="layers", title=model)
        axes.margins(0.1, 0.1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].set_ylabel("error against float64, ‖a − r‖ / ‖r‖")
    figure.key()
    return figure.titled(title)


@style
def plot_rankings(rankings: pd.DataFrame, title: str) -> Plot:
    """Rows of ``rankings``, without float64: a panel a quantity, a bar a model and dtype, with its number."""
    shown = rankings[rankings["dtype"] != "float64"]
    quantities = [column for column in map(str, shown) if column.endswith((", %", "change"))]
    figure = Plot(10, 1 + (0.6 + 0.22 * len(shown)) * -(-len(quantities) // 3))
    for axes, quantity in zip(figure.panels(len(quantities)), quantities, strict=True):
        colours = [COLOURS[dtype] for dtype in shown["dtype"]]
        bars = axes.barh(list(shown["model"] + ", " + shown["dtype"]), shown[quantity], color=colours)
        axes.bar_label(bars, [f"{value:.2g}" for value in shown[quantity]], padding=3)
        axes.margins(x=0.5)
        axes.set_xlabel(quantity)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter("{x:g}")
    figure.axes[0].invert_yaxis()
    return figure.titled(title)


def say_ways(rows: pd.DataFrame, differences: pd.DataFrame) -> str:
    """Whether every way keeps the rule, what could not run, and how many single operations go beyond the rule."""
    name = rows["backbone"] + " " + rows["dtype"] + " " + rows["backend"] + ": " + rows["reason"].map(brief, "ignore")
    bad, counts = {s: name[rows["status"] == s] for s in ("wrong", "failed")}, rows["status"].value_counts()
    missing = f"{counts.get('refused', 0)} were refused, {len(bad['failed'])} failed"
    missing += "".join(f"; {one}" for one in bad["failed"])
    if len(bad["wrong"]):
        return f"**{len(bad['wrong'])} of {len(rows)} ways are wrong.** {'; '.join(bad['wrong'])} ({missing})."
    beyond = differences[~differences["equal"] & differences["looked_at"].notna()]
    said = f"All {counts.get('ok', 0)} ways that ran keep the rule ({missing})"
    names = f" ({', '.join((beyond['tested'] + ': ' + beyond['operation']).unique())})" if len(beyond) else ""
    return f"{said}; {len(beyond):,} of {len(differences):,} single operations exceed their limit{names}."


def say_growth(stream: pd.DataFrame) -> str:
    """How much larger the error behind the last layer is than behind the first, over all dtypes."""
    lines = stream.groupby(["model", "dtype"], sort=False)["error"]
    times = (lines.last() / lines.first()).groupby("model", sort=False)
    said = [f"{model} {x.min():.1f} to {x.max():.1f} times" for model, x in times]
    return f"From the first to the last of {lines.size().max()} layers the error grows: {', '.join(said)}."


def say_rankings(rankings: pd.DataFrame) -> str:
    """How many candidate pairs each dtype moves, and what becomes of AUC."""
    said = []
    for dtype, some in rankings[rankings["dtype"] != "float64"].groupby("dtype", sort=False):
        moved = [f"1 in {100 / x:,.0f}" if x > 0 else "none" if x == 0 else "all" for x in some["pairs moved, %"]]
        parts = ", ".join(f"{count} of {model}" for count, model in zip(moved, some["model"], strict=True))
        parts += ", whose logits are not finite" if some["pairs moved, %"].isna().any() else ""
        said.append(f"{dtype} {parts} (AUC by at most {some['AUC change'].abs().max():.0e})")
    return f"Pairs of candidates that change places: {'; '.join(said)}."


def say_saved(differences: pd.DataFrame, other: str) -> str:
    """How far the logits lie from those of another run, and whether the rule allows it."""
    logits = differences[differences["layer"] == "model"]
    largest = logits.groupby("dtype", sort=False)["relative"].max()
    verdict = "which the rule allows" if logits["equal"].all() else "**more than the rule allows**"
    said = ", ".join(f"{x:.1e} in {dtype}" for dtype, x in largest.items())
    return f"Logits differ from those of {other} by at most {said}, {verdict}."
