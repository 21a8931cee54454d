"""What cuda_graphs shows: idle time, memory of the pool, padding, and the run in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex

from recexp.experiments.plots import MARKERS, PALETTE, Plot, cell, digits, style


@style
def plot_launches(launches: pd.DataFrame, title: str) -> Plot:
    """A bar a point: time the device computes, then the time it idles; beside it the median and the launches."""
    ways = launches["batch_size"].astype(str) + ", " + launches["mode"]
    groups = list(launches.assign(way=ways).groupby("backbone", sort=False))
    figure = Plot(10, 1.6 + 0.2 * ways.nunique())
    for axes, (name, mine) in zip(figure.panels(len(groups)), groups, strict=True):
        axes.barh(mine["way"], mine["busy_ms"], color=PALETTE[0], label="kernels and copies")
        idle = (mine["p50_ms"] - mine["busy_ms"]).clip(lower=0)
        bars = axes.barh(mine["way"], idle, left=mine["busy_ms"], color=PALETTE[4], hatch="///", label="idle")
        texts = zip(mine["p50_ms"].map(digits), mine["launches"], strict=True)
        axes.bar_label(bars, [f"{ms} ({count})" for ms, count in texts], padding=3)
        axes.set(title=name, xlabel="median ms a call (launches)", xlim=(0, 1.35 * launches["p50_ms"].max()))
    figure.axes[0].invert_yaxis()
    figure.axes[0].set_ylabel("users, mode")
    figure.key()
    return figure.titled(title)


@style
def plot_memory(shared: pd.DataFrame, alone: pd.DataFrame, title: str) -> Plot:
    """MB by which a pool grows, users × tokens a user: buckets captured alone, and all in one pool, largest first."""
    frames = [frame.assign(tokens=frame["num_tokens"] // frame["batch_size"]) for frame in (alone, shared)]
    users, tokens = (sorted(frames[0][column].unique()) for column in ("batch_size", "tokens"))
    figure = Plot(10, 1.5 + 0.3 * len(users))
    most = max(frame["memory_bytes"].max() for frame in frames)
    for axes, frame, text in zip(figure.panels(2), frames, ("a pool each", "one pool"), strict=True):
        for batch, length, size in zip(frame["batch_size"], frame["tokens"], frame["memory_bytes"], strict=True):
            face = to_hex(colormaps["Blues"](0.6 * (size / most) ** 0.5))
            cell(axes, tokens.index(length), users.index(batch), face, f"{size / 1e6:,.0f}")
        axes.set(title=f"{text}: {frame['memory_bytes'].sum() / 1e9:.2f} GB together", xlabel="tokens a user")
        axes.set_xticks(range(len(tokens)), [f"{length:,}" for length in tokens])
        axes.set_yticks(range(len(users)), users)
        axes.autoscale(tight=True)
        axes.grid(False)
    figure.axes[0].set_ylabel("users")
    return figure.titled(f"{title}: MB by which the pool grew, a bucket a cell")


@style
def plot_padding(frame: pd.DataFrame, title: str) -> Plot:
    """Rows of ``padding``: the share of computed tokens that pads against the number of buckets, a line a spacing."""
    figure = Plot(7, 3.6)
    axes = figure.subplots()
    for (spacing, rows), colour, marker in zip(frame.groupby("spacing", sort=False), PALETTE, MARKERS, strict=False):
        axes.plot(rows["buckets"], 100 * rows["padding"], color=colour, marker=marker, label=f"sizes: {spacing}")
        for count, share in zip(rows["buckets"], rows["padding"], strict=True):
            figure.beside(axes, f"{100 * share:.0f}", (count, 100 * share), colour)
    axes.set(xlabel="token counts a batch size has", ylabel="padding, % of computed tokens")
    axes.set_ylim(0, 115 * frame["padding"].max() or 1)
    axes.set_xticks(sorted(frame["buckets"].unique()))
    figure.key()
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
