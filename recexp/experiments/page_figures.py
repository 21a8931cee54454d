"""What page_sizes shows: a heat map, what pages cost beside time, the best size of every row, and all in a sentence."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.patches import Rectangle

from recexp.experiments.plots import MARKERS, PALETTE, PAPER, Plot, cell, digits, floats, style

ROW = ["backbone", "backend", "batch_size", "cached_tokens"]  # what page sizes compete in


def best_pages(frame: pd.DataFrame) -> pd.DataFrame:
    """A line a row: the page size with the lowest median, those whose p10 to p90 meets its own, and how many
    times as slow the worst is."""
    lines = []
    for key, rows in frame[frame["status"] == "ok"].sort_values("p50_ms").groupby(ROW):
        best, worst, ties = rows.iloc[0], rows.iloc[-1], rows[rows["p10_ms"] <= rows["p90_ms"].iloc[0]]
        line = dict(zip(ROW, key, strict=True)) | {"best": best["page_size"], "ms": best["p50_ms"]}
        line |= {"within noise": sorted(ties["page_size"]), "worst": worst["page_size"]}
        lines.append(line | {"times as slow": worst["p50_ms"] / best["p50_ms"], "all tie": len(ties) == len(rows)})
    return pd.DataFrame(lines)


def sentence(frame: pd.DataFrame) -> str:
    """What the run says about page sizes."""
    lines = best_pages(frame)
    if lines.empty:
        return "Nothing was timed."
    waste = frame[frame["status"] == "ok"].groupby("page_size")["wasted_share"].mean()
    if lines["all tie"].all():
        return (
            f"No page size is better than the noise in any of {len(lines)} rows of the map; in waste they differ: "
            f"{waste.min():.1%} of the slots at {waste.idxmin()} tokens a page, {waste.max():.1%} at {waste.idxmax()}."
        )
    tied = pd.Series({size: sum(size in ties for ties in lines["within noise"]) for size in waste.index})
    choice, worst = waste[tied == tied.max()].idxmin(), lines.sort_values("times as slow").iloc[-1]
    return (
        f"Pages of {choice} tokens are within noise of the best in {tied.max()} of {len(lines)} rows of the map, "
        f"which no size exceeds, and waste {waste[choice]:.1%} of their slots; the slowest, {worst['worst']}, takes "
        f"{worst['times as slow']:.2f} times as long as {worst['best']} ({worst['backbone']}, {worst['backend']}, "
        f"batch size {worst['batch_size']}, {worst['cached_tokens']:,} cached tokens)."
    )


@style
def plot_pages(frame: pd.DataFrame, title: str) -> Plot:
    """Page sizes × (users, cached tokens), a panel a backend: a cell has its median in ms; its colour is how many times
    as slow it is as the best of its row, whose cell is framed. Points without a time are hatched, reasons below."""
    sizes, backends = sorted(frame["page_size"].unique()), list(frame["backend"].unique())
    rows = sorted({*frame[ROW[2:]].itertuples(index=False, name=None)})
    frame = frame.assign(reason=frame["reason"].str.replace(r"page_size \d+", "page_size", regex=True))
    letters = {reason: chr(97 + i) for i, reason in enumerate(frame["reason"].dropna().unique())}
    frame["slow"] = frame["p50_ms"] / frame.groupby(ROW)["p50_ms"].transform("min")
    most = float(np.clip(np.nanmax(floats(frame["slow"]), initial=0), 1.25, 4))
    colours = ScalarMappable(LogNorm(1, most), "YlGnBu")
    width = max(10, 2 + 0.9 * len(sizes))
    notes = "\n".join(textwrap.fill(f"{letter}: {reason}", int(13 * width)) for reason, letter in letters.items())
    height = (0.8 + 0.33 * len(rows)) * -(-len(backends) // 2)
    figure = Plot(width, 1 + height + 0.16 * len(notes.splitlines()))
    panels = figure.panels(len(backends), 2)
    for point in frame.to_dict("records"):
        axes, x = panels[backends.index(point["backend"])], sizes.index(point["page_size"])
        y = rows.index((point["batch_size"], point["cached_tokens"]))
        if pd.isna(point["p50_ms"]):
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#999999", hatch="///"))
            axes.text(x, y, letters[point["reason"]], ha="center", va="center", bbox=PAPER)
            continue
        face = to_hex(colours.cmap(np.log(point["slow"]) / np.log(most)))
        cell(axes, x, y, face, digits(point["p50_ms"]), "white" if point["slow"] ** 2 > most else "black")
        if point["slow"] == 1:
            axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=PALETTE[1], lw=2))
    for axes, backend in zip(panels, backends, strict=True):
        axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="page size, tokens", title=backend)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.grid(False)
    panels[0].set_yticks(range(len(rows)), [f"{batch_size} × {cached:,}" for batch_size, cached in rows])
    for axes in panels[::2]:
        axes.set_ylabel("users × cached tokens")
    bar = figure.colorbar(colours, ax=panels, label="times as slow as the row's best", aspect=40, pad=0.01)
    bar.ax.yaxis.set_major_formatter("{x:.3g}")
    bar.ax.yaxis.set_minor_formatter("{x:.3g}")
    figure.supxlabel(notes, fontsize=8, x=0.01, ha="left")
    return figure.titled(title)


@style
def plot_costs(frame: pd.DataFrame, title: str) -> Plot:
    """Against page size: wasted slots, allocation, and the way to the host and back, a line a cached length each; of
    the largest batch and the first backbone and backend that were timed, as they depend on neither."""
    rows = frame[frame["status"] == "ok"]
    rows = rows[rows["batch_size"] == rows["batch_size"].max()]
    rows = rows[(rows[ROW[:2]] == rows[ROW[:2]].iloc[0]).all(axis=1)]
    values = {"wasted slots, %": 100 * rows["wasted_share"], "allocation, µs a call": rows["allocate_us"]}
    values["to the host and back,\nµs per 1,000 tokens"] = 1e3 * rows["host_copy_us"] / rows["page_size"]
    figure, sizes = Plot(10, 3.8), sorted(rows["page_size"].unique())
    for axes, (name, column) in zip(figure.panels(3, sharey=False), values.items(), strict=True):
        for i, (cached, mine) in enumerate(rows.groupby("cached_tokens")):
            at, ys = floats(mine["page_size"]), floats(column[mine.index])
            axes.plot(at, ys, color=PALETTE[i], marker=MARKERS[i], label=f"{cached:,} cached tokens")
            for point in zip(at, ys, strict=True):
                figure.beside(axes, digits(point[1]), point, PALETTE[i])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(xlabel="page size, tokens", ylabel=name, ylim=(-0.1 * column.max(), 1.15 * column.max()))
    figure.key()
    return figure.titled(f"{title}, {rows['batch_size'].iloc[0]} users")
