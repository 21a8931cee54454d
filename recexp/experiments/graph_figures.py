"""What cuda_graphs shows: idle time, memory of the pool, padding, and the run in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from recexp.experiments.plots import PALETTE, Plot, note, style


@style
def plot_launches(launches: pd.DataFrame, title: str) -> Plot:
    """A bar a point: time the device computes, and on top the time it idles; the number of launches above."""
    names = list(launches["backbone"].unique())
    figure = Plot(3 + 0.3 * len(launches), 4)
    for axes, name in zip(figure.panels(1, len(names)), names, strict=True):
        mine = launches[launches["backbone"] == name].reset_index(drop=True)
        axes.bar(mine.index, mine["busy_ms"], color=PALETTE[0], label="kernels and copies")
        idle = (mine["p50_ms"] - mine["busy_ms"]).clip(lower=0)
        bars = axes.bar(mine.index, idle, bottom=mine["busy_ms"], color=PALETTE[4], label="idle")
        axes.bar_label(bars, mine["launches"].astype(str))
        axes.set_xticks(mine.index, list(mine["mode"] + ", " + mine["batch_size"].astype(str)), rotation=60, ha="right")
        axes.set_title(name)
    figure.axes[0].set_ylabel("ms a call")
    figure.axes[0].legend()
    return figure.titled(f"{title}; above the bars: launches; below: mode, users")


@style
def plot_memory(shared: pd.DataFrame, alone: pd.DataFrame, title: str) -> Plot:
    """MB of every bucket: captured alone, and what it adds to the shared pool, largest first."""
    figure = Plot(2 + 0.28 * len(shared), 4)
    axes = figure.subplots()
    both = shared.merge(alone, on=["batch_size", "num_tokens"], suffixes=("", "_alone"))
    for offset, column, text in ((-0.2, "memory_bytes_alone", "a pool each"), (0.2, "memory_bytes", "one pool")):
        total = f"{text}: {both[column].sum() / 1e9:.2f} GB together"
        axes.bar(both.index + offset, both[column] / 1e6, 0.4, label=total, color=PALETTE[offset > 0])
    names = both["batch_size"].astype(str) + " x " + (both["num_tokens"] // both["batch_size"]).astype(str)
    axes.set_xticks(both.index, list(names), rotation=90)
    axes.set(xlabel="bucket, users x tokens a user", ylabel="MB by which the pool grew")
    axes.legend()
    return figure.titled(title)


@style
def plot_padding(frame: pd.DataFrame, title: str) -> Plot:
    """Rows of ``padding``: the share of computed tokens that pads against the number of buckets, a line a spacing."""
    figure = Plot(7, 3.6)
    axes = figure.subplots()
    for (spacing, rows), colour in zip(frame.groupby("spacing", sort=False), PALETTE, strict=False):
        axes.plot(rows["buckets"], 100 * rows["padding"], "o-", color=colour, label=f"sizes: {spacing}")
        for count, share in zip(rows["buckets"], rows["padding"], strict=True):
            note(axes, f"{100 * share:.0f}", (count, 100 * share), (6, 4))
    axes.set(xlabel="token counts a batch size has", ylabel="padding, % of computed tokens")
    axes.set_ylim(0, 115 * frame["padding"].max() or 1)
    axes.set_xticks(sorted(frame["buckets"].unique()))
    axes.legend()
    return figure.titled(title)


def padding(lengths: Sequence[int], smallest: int, counts: Sequence[int]) -> pd.DataFrame:
    """Share of computed tokens that only pad requests of such lengths, by how many sizes there are: halving from the
    longest one, or evenly spaced."""
    n, most = np.asarray(lengths), max(lengths)
    rows = []
    for count in counts:
        halving = smallest + (most - smallest) / 2.0 ** np.arange(count)
        even = smallest + (most - smallest) * np.arange(1, count + 1) / count
        for spacing, sizes in (("halving", halving), ("even", even)):
            sizes = np.unique(np.ceil(sizes).astype(int))
            fitted = sizes[np.searchsorted(sizes, n)]
            rows.append({"buckets": count, "spacing": spacing, "padding": 1 - n.sum() / fitted.sum()})
    return pd.DataFrame(rows)


def sentences(latency: pd.DataFrame, report: pd.DataFrame) -> list[str]:
    """What the run showed, in words."""
    said = []
    for name, rows in latency[latency["status"] == "ok"].groupby("backbone", sort=False):
        for batch_size in sorted({rows["batch_size"].min(), rows["batch_size"].max()}):
            ms = rows[rows["batch_size"] == batch_size].set_index("mode")["p50_ms"].astype(float)
            others = [f"{m} {ms[m]:.3f} ms ({ms['eager'] / ms[m]:.2f} times as fast)" for m in ms.index if m != "eager"]
            said.append(f"{name}, {batch_size} at a time: {', '.join([f'eager {ms.eager:.3f} ms', *others])}.")
    for key, rows in report[report["segments"] > 0].groupby(["backbone", "mode"], sort=False):
        seconds = rows["capture_ms"].sum() / 1e3
        said.append(f"{', '.join(map(str, key))}: {len(rows)} buckets were captured in {seconds:.1f} s.")
    return said
