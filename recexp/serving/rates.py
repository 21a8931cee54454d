"""The measurements of the experiment ``serving``: latency of a real server against the rate of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch
from recexp.config import ExperimentConfig
from recexp.experiments.compare import LIMITS, difference
from recexp.experiments.latency import model_columns
from recexp.experiments.measure import Latency
from recexp.experiments.plots import PALETTE, Plot
from recexp.experiments.record import row, to_frame
from recexp.model import RankingModel
from recexp.serving.builder import build
from recexp.serving.client import Client
from recexp.serving.load import load, summarise
from recexp.serving.server import serve


def rates(
    models: Mapping[str, RankingModel], log: Sequence[SequenceBatch], experiment: ExperimentConfig, quiet: bool = False
) -> pd.DataFrame:
    """A row a model, tier and rate: "mixed" through the cache of ``ranking``, "none" asked for without it. Beside the
    columns of every experiment: rate and answered_per_s (requests a second), p99_ms, lost_share, reused_per_request.

    Each model is served alone; a point whose answers differ from the uncached ones of the same model here has no time.
    Raises ValueError for a log that is too short, and without a serving environment.
    """
    config = experiment.load
    ends = [*accumulate((math.ceil(rate * config.seconds) for rate in config.rates), initial=config.num_warm)]
    if ends[-1] > len(log):
        raise ValueError(f"load needs {ends[-1]} requests, the log has {len(log)}: lower num_warm, rates or seconds")
    rows, more = [], []
    bar = tqdm(total=2 * len(models) * len(config.rates), desc="load", disable=quiet, unit="point")
    for name, model in models.items():
        expected = [model.predict(batch).cpu() for batch in log]
        with TemporaryDirectory() as folder:
            build(model.save(Path(folder, "checkpoint")).parent, Path(folder, "models"), experiment.serving)
            with serve(Path(folder, "models")) as server:
                with Client(server.grpc) as client:
                    for batch in log[: config.num_warm]:
                        client.predict(batch)
                for tier, page_size in (("mixed", experiment.serving.page_size), ("none", None)):
                    columns = model_columns(name, model, page_size) | {"mode": "eager", "tier": tier, "batch_size": 1}
                    for rate, (start, end) in zip(config.rates, pairwise(ends), strict=True):
                        cache = tier == "mixed"
                        frame = load(server.grpc, log[start:end], rate, cache=cache, max_seconds=config.seconds)
                        rows.append(_row(frame, expected[start:end], columns))
                        found = summarise(frame) | {"reused_per_request": frame["tokens_reused"].mean()}
                        wanted = ("answered_per_s", "p99_ms", "lost_share", "reused_per_request")
                        more.append({"rate": rate} | {key: found[key] for key in wanted})
                        bar.update()
    bar.close()
    return to_frame(rows).join(pd.DataFrame(more))


def _row(frame: pd.DataFrame, expected: Sequence[Tensor], columns: Mapping[str, Any]) -> dict[str, Any]:
    found, good = summarise(frame), (frame["status"] == "ok").to_numpy()
    if not good.any():
        return row("failed", reason=str(frame["status"].iloc[0]), **columns)
    answers = torch.cat([torch.tensor(x) for x in frame["logits"][good]])
    error = difference(answers, torch.cat([x for x, ok in zip(expected, good, strict=True) if ok])).relative
    if not error <= LIMITS[torch.float32]:
        return row("wrong", reason="logits differ from those of the same model here", **columns)
    latency = Latency(found["p10_ms"], found["p50_ms"], found["p90_ms"], int(good.sum()), found["p50_ms"], None)
    return row("ok", latency=latency, error=error, **columns)


def plot_rates(points: pd.DataFrame, title: str) -> Plot:
    """Rows of ``rates``: median and p99 against the rate, and the share of requests that were lost."""
    figure = Plot(8, 5)
    axes = figure.subplots()
    for i, ((name, tier), rows) in enumerate(points.groupby(["backbone", "tier"], sort=False)):
        colour, line = PALETTE[i // 2], "-" if tier != "none" else "--"
        label = f"{name}, {'cached' if tier != 'none' else 'uncached'}"
        at, p50, p99 = (rows[c].to_numpy(float, na_value=np.nan) for c in ("rate", "p50_ms", "p99_ms"))
        axes.plot(at, p50, line, marker="o", color=colour, label=f"{label}: median")
        axes.plot(at, p99, line, marker="^", color=colour, alpha=0.4, label=f"{label}: p99")
        for lost in rows[rows["lost_share"] > 0].to_dict("records"):
            axes.annotate(f"{lost['lost_share']:.0%} lost", (lost["rate"], lost["p50_ms"]), fontsize=8, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="requests a second", ylabel="latency, ms, from when a request was due")
    axes.set_xticks(sorted(points["rate"].unique()), [f"{rate:g}" for rate in sorted(points["rate"].unique())])
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
