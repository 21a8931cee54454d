"""The measurements of the experiment ``serving``: latency of a real server against the rate of requests."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch
from recexp.config import ExperimentConfig
from recexp.experiments.compare import LIMITS, difference
from recexp.experiments.latency import model_columns
from recexp.experiments.measure import Latency
from recexp.experiments.plots import PALETTE, Plot, digits, floats, medians, plain, style
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
            with serve(Path(folder, "models")) as server, Client(server.grpc) as client:
                for batch in log[: config.num_warm]:
                    client.predict(batch)
                for tier, page_size in (("mixed", experiment.serving.page_size), ("none", None)):
                    columns = model_columns(name, model, page_size) | {"mode": "eager", "tier": tier, "batch_size": 1}
                    for rate, (start, end) in zip(config.rates, pairwise(ends), strict=True):
                        cache, seconds = tier == "mixed", config.seconds
                        frame = load(server.grpc, log[start:end], rate, cache=cache, max_seconds=seconds)
                        rows.append(_row(frame, expected[start:end], columns))
                        found = {"rate": rate, "reused_per_request": frame["tokens_reused"].mean(), **summarise(frame)}
                        more.append(found)
                        bar.update()
    bar.close()
    extra = pd.DataFrame(more)[["rate", "answered_per_s", "p99_ms", "lost_share", "reused_per_request"]]
    return to_frame(rows).join(extra)


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


@style
def plot_rates(points: pd.DataFrame, title: str) -> Plot:
    """Rows of ``rates``, a panel a backbone: median, p10 to p90, and p99 against the rate; the share that was lost."""
    figure, groups, rates = Plot(10, 4.5), points.groupby("backbone", sort=False), sorted(points["rate"].unique())
    for axes, (name, rows) in zip(figure.panels(len(groups)), groups, strict=True):
        for tier, colour, label in (("mixed", PALETTE[0], "cached"), ("none", PALETTE[1], "uncached")):
            some = rows[rows["tier"] == tier]
            (p50, spread), p99 = medians(some), floats(some["p99_ms"])
            what = f"{label}, median, p10 to p90"
            axes.errorbar(some["rate"], p50, spread, color=colour, marker="os"[tier == "none"], label=what)
            axes.plot(some["rate"], p99, ":", marker="^v"[tier == "none"], color=colour, label=f"{label}, p99")
            lost = [f" ({share:.0%} lost)" if share else "" for share in some["lost_share"]]
            for rate, middle, text in zip(some["rate"], p50, lost, strict=True):
                figure.beside(axes, f"{digits(middle)}{text}", (rate, middle), colour)
        axes.set(xscale="log", yscale="log", xlabel="requests a second", title=name)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        plain(axes.yaxis)
        axes.margins(x=0.15)
    figure.axes[0].set_ylabel("latency, ms, from when a request was due")
    figure.key()
    return figure.titled(title)


def sentences(points: pd.DataFrame) -> list[str]:
    """What the run showed, in words."""
    ends = points[points["rate"].isin([points["rate"].min(), points["rate"].max()])]
    table = ends.pivot(index=["backbone", "rate"], columns="tier", values="p50_ms").reset_index()
    said = [
        f"{at.backbone}, {at.rate:g} requests a second: median {at.mixed:.2f} ms cached, {at.none:.2f} ms uncached."
        for at in table.itertuples()
    ]
    return [*said, f"At most {points['lost_share'].max():.1%} of a point's requests were lost."]
