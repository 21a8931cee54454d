"""What compare_backbones shows: the data, training, quality, size, and one against the other."""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice, zip_longest

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from recexp.experiments.plots import PALETTE, Plot, cell, floats, logarithmic, note, style


@style
def plot_data(lengths: np.ndarray, actions: np.ndarray, example: Sequence[tuple[str, str]], name: str) -> Plot:
    """The data and the task in one picture: interactions per user, shares of the ratings, and one request as the model
    reads it: example holds (kind, text) a token, kind being context, item, action or candidate."""
    figure = Plot(10, 5.2)
    mosaic = figure.subplot_mosaic([["lengths", "ratings"], ["request", "request"]], height_ratios=(2, 1))
    axes = mosaic["lengths"]
    axes.hist(lengths, list(np.geomspace(max(lengths.min(), 1), lengths.max() + 1, 25)), color=PALETTE[0])
    axes.axvline(np.median(lengths), color=PALETTE[1], label=f"median {np.median(lengths):g}, longest {lengths.max()}")
    axes.set(xlabel="interactions of a user", ylabel="users")
    axes.set_title(f"{name}: {len(lengths):,} users, {lengths.sum():,} interactions")
    logarithmic(axes.xaxis, lengths, 1)
    axes.legend()
    axes = mosaic["ratings"]
    kinds, counts = np.unique(actions, return_counts=True)
    bars = axes.bar([f"{kind:g}" for kind in kinds], 100 * counts / counts.sum(), color=PALETTE[2])
    axes.bar_label(bars, fmt="%.1f%%")
    axes.margins(y=0.1)
    axes.set(xlabel="rating", ylabel="share of interactions, %", title="How users rate")
    axes = mosaic["request"]
    faces = {"context": PALETTE[3], "item": PALETTE[5], "action": PALETTE[4], "candidate": PALETTE[2]}
    for i, (kind, text) in enumerate(example):
        cell(axes, i, 0, faces[kind], text)
    for kind in (kind for kind in faces if kind in dict(example)):
        axes.scatter([], [], marker="s", color=faces[kind], label=kind)
    axes.set(xlim=(-0.6, len(example) - 0.4), ylim=(-0.6, 0.6))
    axes.set_axis_off()
    axes.set_title("One request, token by token: which of the candidates will this user like?")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.05), frameon=False)
    return figure


@style
def plot_training(histories: Mapping[str, Sequence[Mapping[str, float]]]) -> Plot:
    """Validation AUC of the averaged weights against training steps, a line a model; the kept weights are marked."""
    figure = Plot(8, 3.5)
    axes = figure.subplots()
    for (name, history), colour in zip(histories.items(), cycle(PALETTE), strict=False):
        steps, scores = [h["step"] for h in history], [h["validation_auc"] for h in history]
        best = int(np.argmax(scores))
        axes.plot(steps, scores, color=colour, label=f"{name}: kept {scores[best]:.4f} at step {steps[best]:g}")
        axes.plot(steps[best], scores[best], "o", color=colour)
    axes.set(xlabel="training steps", ylabel="validation AUC, first task")
    axes.legend()
    return figure


@style
def plot_quality(frame: pd.DataFrame, chance: Mapping[str, float], title: str = "Quality on the test requests") -> Plot:
    """Columns model, metric, value, and optionally seed: a panel a metric, a bar a model from chance[metric] (0 if not
    given) to the mean, its number, and the values of all seeds as dots with their range."""
    models, metrics = list(frame["model"].unique()), frame["metric"].unique()
    figure = Plot(3.6 * len(metrics) + 1, 1.6 + 0.4 * len(models))
    for axes, metric in zip(figure.panels(1, len(metrics), sharey=True), metrics, strict=True):
        seeds = frame[frame["metric"] == metric].groupby("model")["value"].agg(["mean", "min", "max", list])
        base = chance.get(metric, 0.0)
        for i, (model, colour) in enumerate(zip(models, cycle(PALETTE), strict=False)):
            if model not in seeds.index:
                continue
            mean, low, high, values = seeds.loc[model]
            axes.barh(i, mean - base, left=base, color=colour, alpha=0.8)
            if high > low:
                axes.plot(values, [i] * len(values), "o-", color="black", markersize=3, linewidth=1)
            text = f"{mean:.3f} ({low:.3f} to {high:.3f})" if high > low else f"{mean:.3f}"
            note(axes, text, (max(high, base), i), (5, 0), va="center", ha="left")
        low, high = min(seeds["min"].min(), base), max(seeds["max"].max(), base)
        axes.set_xlim(low, high + 0.7 * (high - low) or 1)
        axes.set_xlabel(f"{metric} (bars start at chance, {base:g})" if base else metric)
        axes.set_yticks(range(len(models)), models)
        axes.axvline(base, color="black", linewidth=1)
    figure.axes[0].invert_yaxis()
    count = frame["seed"].nunique() if "seed" in frame else 1
    return figure.titled(f"{title}, {f'mean and range of {count} seeds' if count > 1 else 'one seed'}")


@style
def plot_sizes(frame: pd.DataFrame, title: str = "What a model costs") -> Plot:
    """Column model, and a column a quantity with its unit in the name ("KV cache, bytes per token"): a panel each."""
    quantities = [column for column in frame.columns if column != "model"]
    columns = min(len(quantities), 3)
    rows = -(-len(quantities) // columns)
    figure = Plot(2.9 * columns + 0.8, (1.3 + 0.35 * len(frame)) * rows)
    for axes, quantity in zip_longest(figure.panels(rows, columns), quantities):
        if quantity is None:
            axes.set_axis_off()
            continue
        values = floats(frame[quantity])
        bars = axes.barh(frame["model"], values, color=list(islice(cycle(PALETTE), len(frame))), alpha=0.8)
        texts = [f"{x:,.0f}" if x < 1e6 else EngFormatter(places=2)(x) for x in values]
        axes.bar_label(bars, [text if x else "none" for text, x in zip(texts, values, strict=True)], padding=3)
        axes.set_xlim(0, values.max() * 1.4 or 1)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.set_xlabel(quantity)
    figure.axes[0].invert_yaxis()
    return figure.titled(title)


@style
def plot_tradeoffs(frame: pd.DataFrame, title: str) -> Plot:
    """Rows of ``backbones.tradeoffs``: AUC against latency, a marker a path, and against memory. A colour a layer;
    lines join its sizes."""
    figure = Plot(11, 4.6)
    left, right = figure.panels(1, 2, sharey=True)
    paths = dict(zip(frame["path"].unique(), ("o", "s", "^", "D"), strict=False))
    for (layer, mine), colour in zip(frame.groupby("layer", sort=False), cycle(PALETTE), strict=False):
        for path, rows in mine[mine["p50_ms"].notna()].groupby("path", sort=False):
            p10, p50, p90 = (floats(rows[column]) for column in ("p10_ms", "p50_ms", "p90_ms"))
            left.errorbar(p50, rows["AUC"], xerr=[p50 - p10, p90 - p50], marker=paths[path], color=colour, lw=1)
            below = list(paths).index(path) % 2
            for at in zip(p50, rows["AUC"], strict=True):
                note(left, f"{at[0]:.3g}", at, (0, -12 if below else 6), color=colour)
        sizes = mine.drop_duplicates("model")
        right.plot(sizes["MB"], sizes["AUC"], "o-", color=colour, label=layer)
        for row in sizes.to_dict("records"):
            note(right, f"{row['model']}\n{row['AUC']:.3f}, {row['MB']:.3g} MB", (row["MB"], row["AUC"]), (0, 7))
    for axes, column in ((left, "p50_ms"), (right, "MB")):
        values = floats(frame[column].dropna())
        logarithmic(axes.xaxis, values)
        axes.margins(0.15, 0.15)
    left.set(xlabel="latency, ms (median, p10 to p90)", ylabel="test AUC")
    right.set(xlabel="weights and 1,000 cached users, MB")
    left.legend([Line2D([], [], ls="", marker=m, color="grey") for m in paths.values()], list(paths))
    right.legend()
    return figure.titled(title)
