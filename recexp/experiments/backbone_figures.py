"""What compare_backbones shows: the data, training, quality, size, and one against the other."""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, MaxNLocator

from recexp.experiments.plots import MARKERS, PALETTE, Plot, cell, digits, floats, logarithmic, medians, style


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
    for (name, history), colour, marker in zip(histories.items(), cycle(PALETTE), cycle(MARKERS), strict=False):
        steps, scores = [h["step"] for h in history], [h["validation_auc"] for h in history]
        best = int(np.argmax(scores))
        label = f"{name}: kept {scores[best]:.4f} at step {steps[best]:g}"
        axes.plot(steps, scores, color=colour, marker=marker, markevery=[best], label=label)
    axes.set(xlabel="training steps", ylabel="validation AUC, first task")
    figure.key()
    return figure.titled("Training, the kept weights marked")


@style
def plot_quality(frame: pd.DataFrame, chance: Mapping[str, float], title: str = "Quality on the test requests") -> Plot:
    """Columns model, metric, value, and optionally seed: a panel a metric, a bar a model from chance[metric] (0 if not
    given) to the mean, its number, and the values of all seeds as dots with their range."""
    models, metrics = list(frame["model"].unique()), frame["metric"].unique()
    figure = Plot(10, 1.4 + 0.4 * len(models))
    for axes, metric in zip(figure.panels(len(metrics)), metrics, strict=True):
        seeds = frame[frame["metric"] == metric].groupby("model")["value"].agg(["mean", "min", "max", list])
        base = chance.get(metric, 0.0)
        for i, (model, colour) in enumerate(zip(models, cycle(PALETTE), strict=False)):
            if model not in seeds.index:
                continue
            mean, low, high, values = seeds.loc[model]
            axes.barh(i, mean - base, left=base, color=colour, alpha=0.8)
            if high > low:
                axes.plot(values, [i] * len(values), "o-", color="black", markersize=3, linewidth=1)
            text = f"{mean:.3f}\n({low:.3f} to {high:.3f})" if f"{high:.3f}" > f"{low:.3f}" else f"{mean:.3f}"
            axes.annotate(text, (max(high, base), i), (5, 0), textcoords="offset points", va="center")
        low, high = min(seeds["min"].min(), base), max(seeds["max"].max(), base)
        axes.set_xlim(low, high + 0.9 * (high - low) or 1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
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
    figure = Plot(0.8 + 2.9 * min(len(quantities), 3), (1.3 + 0.35 * len(frame)) * -(-len(quantities) // 3))
    for axes, quantity in zip(figure.panels(len(quantities)), quantities, strict=True):
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
    figure = Plot(10, 4.8)
    left, right = figure.panels(2)
    paths = dict(zip(frame["path"].unique(), ("o", "s", "^", "D"), strict=False))
    for (layer, mine), colour in zip(frame.groupby("layer", sort=False), cycle(PALETTE), strict=False):
        for path, rows in mine[mine["p50_ms"].notna()].groupby("path", sort=False):
            p50, spread = medians(rows)
            left.errorbar(p50, rows["AUC"], xerr=spread, marker=paths[path], color=colour, lw=1)
            for model, *at in zip(rows["model"], p50, rows["AUC"], strict=True):
                figure.beside(left, f"{model} {digits(at[0])}", (at[0], at[1]), colour)
        sizes = mine.drop_duplicates("model")
        right.plot(sizes["MB"], sizes["AUC"], "o-", color=colour, label=f"layer {layer}")
        for row in sizes.to_dict("records"):
            text = f"{row['model']}\n{row['AUC']:.3f}, {row['MB']:.3g} MB"
            figure.beside(right, text, (row["MB"], row["AUC"]), colour)
    for axes, column in ((left, "p50_ms"), (right, "MB")):
        values = floats(frame[column].dropna())
        logarithmic(axes.xaxis, values)
        axes.margins(0.15, 0.15)
    left.set(xlabel="latency, ms (median, p10 to p90)", ylabel="test AUC")
    right.set(xlabel="weights and 1,000 cached users, MB")
    for path, marker in paths.items():
        right.scatter([], [], marker=marker, color="grey", label=path)
    figure.key()
    return figure.titled(title)
