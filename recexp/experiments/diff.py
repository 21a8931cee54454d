"""Two saved runs of one experiment, point by point: another card, another commit.

On one device a point is judged by its time, between devices by its share of the ceiling that its own run measured:
``change`` is how many times slower that makes it. Its noise is what p10 to p90 of both runs leave open.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

from recexp.experiments.plots import MARKERS, PALETTE, Plot, brief, floats, in_words, logarithmic, style, telling
from recexp.experiments.record import SHAPES, SavedRun, load_run

OWN = ("table", "keys", "cache_ratio", "rate")  # columns some experiments add that tell their points apart
KEYS = ("backbone", "backend", "dtype", "mode", "tier", *SHAPES, *OWN)
SHOWN = ("status", "reason", "device", "p10_ms", "p50_ms", "p90_ms", "tflops_share", "gbps_share", "error")
FAULTS = ("slower", "lost")
COLOURS = {"slower": PALETTE[1], "lost": PALETTE[1], "faster": PALETTE[2], "within noise": "#888888"}
LEAST = 1.03  # times slower: within it two blocks of one warm-up count as equal (recexp.experiments.measure)


def compare_runs(a: SavedRun, b: SavedRun) -> pd.DataFrame:
    """A row a point of either run: what names it, SHOWN of both (_a, _b), change with change_low and change_high, and
    verdict: "slower" and "faster" (beyond noise and 3%), "within noise", "lost" (timed in a and not in b, unless
    another device refuses it), "only in a", "only in b", "" where there is nothing to compare.

    Backends tell points apart only where a run has several for one. ValueError for runs of different experiments, or
    without a point in common.
    """
    names = [run.manifest["experiment"] for run in (a, b)]
    if names[0] != names[1]:
        raise ValueError(f"{a.path} is a run of {names[0]}, {b.path} of {names[1]}: compare runs of one experiment")
    keys = [key for key in KEYS if all(key in run.measurements for run in (a, b))]
    frames = [run.measurements.reindex(columns=[*keys, *SHOWN]) for run in (a, b)]
    frames = [frame.astype(dict.fromkeys(SHOWN[3:], "Float64")) for frame in frames]
    if len({run.manifest["schema_version"] < 2 for run in (a, b)}) > 1:
        frames[0]["tflops_share"] = np.nan  # version 1 counted FLOPs of masked pairs too
    plain = [key for key in keys if key != "backend"]
    if not any(frame.duplicated(plain).any() for frame in frames):
        keys = plain
    left, right = (frame.assign(repeat=frame.groupby(keys, dropna=False).cumcount()) for frame in frames)
    right = right[[*keys, "repeat", *SHOWN]]  # the other's backend is none of its columns where it is no key
    found = left[right.columns].merge(right, "outer", [*keys, "repeat"], suffixes=("_a", "_b"), indicator="where")
    if not (found["where"] == "both").any():
        raise ValueError(f"{a.path} and {b.path} have no point in common: they were run with other configurations")
    elsewhere = (found["device_a"] != found["device_b"]).fillna(True)
    slower = found["p50_ms_b"] / found["p50_ms_a"]
    shares = [found[f"{kind}_share_a"] / found[f"{kind}_share_b"] for kind in ("tflops", "gbps")]
    by_copies = (found["gbps_share_a"].fillna(0) > found["tflops_share_a"].fillna(0)).astype(bool)  # what bounds it
    found["change"] = slower.where(~elsewhere, shares[0].where(~by_copies, shares[1])).astype(float)
    found["change_low"] = found["change"] * (found["p10_ms_b"] / found["p90_ms_a"] / slower).astype(float)
    found["change_high"] = found["change"] * (found["p90_ms_b"] / found["p10_ms_a"] / slower).astype(float)
    lost = (found["status_a"] == "ok") & (found["status_b"] != "ok") & ~((found["status_b"] == "refused") & elsewhere)
    rules = {
        "only in a": found["where"] == "left_only",
        "only in b": found["where"] == "right_only",
        "lost": lost,
        "slower": (found["change_low"] > 1) & (found["change"] > LEAST),
        "faster": (found["change_high"] < 1) & (found["change"] < 1 / LEAST),
        "within noise": found["change"].notna(),
    }
    conditions = [rule.fillna(False).to_numpy(bool) for rule in rules.values()]
    found["verdict"] = np.select(conditions, list(rules), default="")
    return found.drop(columns=["where", *(["repeat"] if not found["repeat"].any() else [])])


@style
def plot_diff(found: pd.DataFrame, title: str) -> Plot:
    """Change against the time in a, with its noise; the twelve points farthest from 1, beyond noise, are named."""
    figure = Plot(10, 5)
    axes = figure.subplots()
    timed = found[found["change"].notna()]
    keys = telling(timed, KEYS)
    for (verdict, rows), marker in zip(timed.groupby("verdict"), MARKERS, strict=False):
        low, change, high = (floats(rows[column]) for column in ("change_low", "change", "change_high"))
        text, ms = f"{verdict}: {len(rows)} points", rows["p50_ms_a"].astype(float)
        axes.errorbar(
            ms, change, np.stack([change - low, high - change]), fmt=marker, elinewidth=1, label=text,
            color=COLOURS[str(verdict)],
        )  # fmt: skip
    far = timed[timed["verdict"].isin(["slower", "faster"])]
    far, names = far.loc[np.log(far["change"]).abs().nlargest(12).index], []
    for i, row in enumerate(far.to_dict("records"), 1):
        name = in_words({key: row[key] for key in keys if pd.notna(row[key])})
        names.append(textwrap.fill(f"{i}: {row['change']:.3g}, {name}", 45))
        axes.annotate(str(i), (row["p50_ms_a"], row["change"]), (6, 0), textcoords="offset points", va="center")
    axes.axhline(1, color="black", linewidth=0.8)
    logarithmic(axes.xaxis, floats(timed["p50_ms_a"]), 1)
    noise = np.concatenate([floats(timed["change_low"]), floats(timed["change_high"])])
    logarithmic(axes.yaxis, noise, 1)  # half and twice lie as far from 1
    if len(timed):
        figure.legend(loc="outside right center", title="\n".join(names), alignment="left")
    axes.set(xlabel="median in a, ms", ylabel="times slower in b (medians; noise: p10 to p90 of both)")
    return figure.titled(title)


def diff(run_a: Path, run_b: Path, out: Path | None = None) -> bool:
    """Compare, print, and write diff.csv and diff.png and .svg to out (unless given: beside run_b). Returns whether b
    has no regression beyond noise. ValueError for what is no whole run or of another experiment."""
    a, b = load_run(run_a), load_run(run_b)
    found = compare_runs(a, b)
    names = [f"{run.path.name} ({run.manifest['environment']['git_revision'] or '?'!s:.8})" for run in (a, b)]
    device = [", ".join(found[column].dropna().unique()) for column in ("device_a", "device_b")]
    by = "times" if device[0] == device[1] else "shares of each run's own ceilings"
    title = f"{a.manifest['experiment']}, by {by}\na: {names[0]}, {device[0]}\nb: {names[1]}, {device[1]}"
    out = out or b.path.parent / f"diff_{a.path.name}_{b.path.name}"
    out.mkdir(parents=True, exist_ok=True)
    found.to_csv(out / "diff.csv", index=False)
    figure = plot_diff(found, title)
    for kind in ("png", "svg"):
        figure.savefig(out / f"diff.{kind}", dpi=150)
    told = found[~found["verdict"].isin(["", "within noise"])].sort_values("change", ascending=False)
    told = told.assign(reason_b=told["reason_b"].map(brief, "ignore")).dropna(axis=1, how="all")
    told = told.loc[:, ~told.columns.str.contains("p10|p90|device|status_a|reason_a|error|gbps")]
    print(title, *([told.to_string(index=False)] if len(told) else []), sep="\n")
    print(", ".join(f"{n} {v or 'not compared'}" for v, n in found["verdict"].value_counts().items()) + f"; see {out}")
    return not found["verdict"].isin(FAULTS).any()
