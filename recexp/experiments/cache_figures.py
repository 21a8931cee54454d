"""What kv_cache shows: which tier answers, what of a copy from the host an answer waits for, and both in words."""

from __future__ import annotations

import pandas as pd

from recexp.experiments.kv_cache import OUTCOMES
from recexp.experiments.plots import MARKERS, PALETTE, PAPER, Plot, digits, style

COLOURS = (PALETTE[2], PALETTE[0], PALETTE[5], PALETTE[1], PALETTE[4], "#BBBBBB")
HATCHES = ("", "//", "..", "xx", "\\\\", "")


@style
def plot_outcomes(caches: pd.DataFrame, title: str) -> Plot:
    """Rows of ``summarise`` of one model as bars of 100 %, a part a tier; misses by their reason."""
    figure = Plot(9, 1.9 + 0.42 * len(caches))
    axes = figure.subplots()
    sizes = zip(caches["num_pages"].astype(int), caches["host_pages"].astype(int), strict=True)
    names = [f"{device:,} pages" + (f" + {host:,} on the host" if host else "") for device, host in sizes]
    left = pd.Series(0.0, index=caches.index)
    for outcome, colour, hatch in zip(OUTCOMES, COLOURS, HATCHES, strict=True):
        share = 100 * caches[outcome].astype(float)
        if not share.any():
            continue
        bars = axes.barh(names, share, 0.55, left=left, label=outcome, color=colour, hatch=hatch, ec="white")
        axes.bar_label(bars, [f"{x:.1f}" if x >= 3 else "" for x in share], label_type="center", bbox=PAPER)
        for i, (at, x) in enumerate(zip(left, share, strict=True)):
            if 0.05 <= x < 3:  # too narrow for its number
                axes.text(at + x / 2, i - 0.32, f"{x:.1f}", ha="center")
        left += share
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of requests, %")
    figure.key()
    return figure.titled(title)


@style
def plot_copies(copies: pd.DataFrame, title: str) -> Plot:
    """Rows of ``copies``: the copy alone, and how much longer a host hit takes than a device hit, a colour a model."""
    figure = Plot(8, 4)
    axes = figure.subplots()
    for (name, rows), colour, marker in zip(copies.groupby("model", sort=False), PALETTE, MARKERS, strict=False):
        for column, text, line in (("extra ms", "tier host less tier device", "-"), ("copy ms", "copy alone", ":")):
            axes.plot(rows["history pairs"], rows[column], line, marker=marker, color=colour, label=f"{name}: {text}")
            for point in zip(rows["history pairs"], rows[column], strict=True):
                figure.beside(axes, digits(point[1]), point, colour)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="history pairs", ylabel="ms (difference of medians, median)")
    figure.key()
    return figure.titled(title)


def sentences(caches: pd.DataFrame, points: pd.DataFrame, copies: pd.DataFrame, device_type: str) -> list[str]:
    """What the run showed, in words."""
    small, large = caches.iloc[0], caches.iloc[int(caches["hit rate"].argmax())]
    said = [
        f"Through {small['num_pages']:,} pages and {small['host_pages']:,} on the host, {small['hit rate']:.1%} of the "
        f"requests found their history and {small['tokens saved']:.1%} of its tokens were not computed again; the best "
        f"cache ({large['num_pages']:,} and {large['host_pages']:,}) reached {large['hit rate']:.1%} and "
        f"{large['tokens saved']:.1%}. No logit moved by more than {caches['largest logit difference'].max():.1e}."
    ]
    longest = points[points["history_pairs"] == points.loc[points["tier"] == "device", "history_pairs"].max()]
    for name, mine in longest[longest["status"] == "ok"].groupby("backbone", sort=False):
        times = mine.groupby("tier", sort=False)["p50_ms"].median()
        parts = ", ".join(f"{ms:.2f} ms (tier {tier})" for tier, ms in times.items())
        said.append(f"At {mine['history_pairs'].iloc[0]} pairs {name} answers in {parts}.")
    if device_type == "cpu":
        said.append("On a CPU copies from the host run before the layers, so none is hidden: only CUDA can hide them.")
    elif len(copies):
        said.append(f"Of a copy from the host, {copies['hidden share'].median():.0%} is hidden (median).")
    return said
