"""What page_sizes shows: a heat map, what pages cost beside time, the best size of every row, and all in a sentence."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.patches import Rectangle

from recexp.experiments.plots import PALETTE, Plot, cell, floats, note, style

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
    width = (1.6 + 0.55 * len(sizes)) * len(backends) + 1.2
    notes = "\n".join(textwrap.fill(f"{letter}: {reason}", int(15 * width)) for reason, letter in letters.items())
    figure = Plot(width, 1.8 + 0.36 * len(rows) + 0.16 * len(notes.splitlines()))
    panels = figure.panels(1, len(backends))
    for point in frame.to_dict("records"):
        axes, x = panels[backends.index(point["backend"])], sizes.index(point["page_size"])
        y = rows.index((point["batch_size"], point["cached_tokens"]))
        if pd.isna(point["p50_ms"]):
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#999999", hatch="///"))
            note(axes, letters[point["reason"]], (x, y), (0, -3))
            continue
        face = to_hex(colours.cmap(np.log(point["slow"]) / np.log(most)))
        cell(axes, x, y, face, f"{point['p50_ms']:.3g}", "white" if point["slow"] ** 2 > most else "black")
        if point["slow"] == 1:
            axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=PALETTE[1], lw=2))
    for axes, backend in zip(panels, backends, strict=True):
        axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="page size, tokens", title=backend)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.grid(False)
    panels[0].set_yticks(range(len(rows)), [f"{batch_size} × {cached:,}" for batch_size, cached in rows])
    panels[0].set_ylabel("users × cached tokens")
    bar = figure.colorbar(colours, ax=panels, label="times as slow as the row's best")
    bar.ax.yaxis.set_major_formatter("{x:.3g}")
    bar.ax.yaxis.set_minor_formatter("{x:.3g}")
    figure.suptitle(title)
    figure.supxlabel(notes, fontsize=7, x=0.01, ha="left")
    return figure


@style
def plot_costs(frame: pd.DataFrame, title: str) -> Plot:
    """Against page size: wasted slots, allocation, and the way to the host and back, a line a cached length each; of
    the largest batch and the first backbone and backend that were timed, as they depend on neither."""
    rows = frame[frame["status"] == "ok"]
    rows = rows[rows["batch_size"] == rows["batch_size"].max()]
    rows = rows[(rows[ROW[:2]] == rows[ROW[:2]].iloc[0]).all(axis=1)]
    values = {"wasted slots, %": 100 * rows["wasted_share"], "allocation, µs a call": rows["allocate_us"]}
    values["to the host and back, µs per 1,000 tokens"] = 1e3 * rows["host_copy_us"] / rows["page_size"]
    figure, sizes = Plot(12, 3.8), sorted(rows["page_size"].unique())
    for axes, (name, column) in zip(figure.panels(1, 3, sharey=False), values.items(), strict=True):
        for i, (cached, mine) in enumerate(rows.groupby("cached_tokens")):
            at, ys = floats(mine["page_size"]), floats(column[mine.index])
            axes.plot(at, ys, "o-", color=PALETTE[i], label=f"{cached:,} cached tokens")
            for x, y in zip(at, ys, strict=True):  # numbers of one line above its points, of others below
                text = f"{y:.3g}" if y < 100 else f"{y:,.0f}"
                note(axes, text, (x, y), (0, -11 if i else 5), color=PALETTE[i])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(xlabel="page size, tokens", ylabel=name, ylim=(-0.1 * column.max(), 1.15 * column.max()))
    figure.axes[0].legend(loc="upper left")
    figure.suptitle(f"{title}, {rows['batch_size'].iloc[0]} users")
    return figure
