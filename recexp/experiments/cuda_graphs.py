"""The measurements of cuda_graphs: the same cached requests eagerly, as one graph, and as a graph a layer.

A point is a batch of users whose longest history is cached but for its newest pairs. Timed are the copies of the
request, layers and head; the sequence stage, and planning on the host, are the same for all modes and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import TokenBatch
from recexp.config import ExperimentConfig, GraphConfig
from recexp.experiments.compare import LIMITS, difference
from recexp.experiments.latency import model_columns
from recexp.experiments.measure import achieved, ceilings, measure, request_flops
from recexp.experiments.record import row, to_frame
from recexp.graphs import GraphedModel, num_capture_pages
from recexp.metadata import KVCapacity, KVMetadata
from recexp.model import RankingModel, evaluating


@dataclass(frozen=True)
class Request:
    """An open request: eager and replay give its logits from the same embeddings and metadata."""

    eager: Callable[[Tensor], Tensor]
    replay: Callable[[GraphedModel, Tensor], Tensor]
    inputs: list[tuple[Tensor]]  # embeddings [T, D] that take turns


def make_model(name: str, experiment: ExperimentConfig, device: torch.device) -> RankingModel:
    """The model with a cache of random keys and values for the largest batch, and pages set aside for capture."""
    config, size = experiment.models[name], experiment.replay.page_size
    model = RankingModel(config, device, getattr(torch, experiment.replay.dtype))
    reserved = num_capture_pages(experiment.graphs.buckets(config), size)
    pages = -(-config.max_history_tokens // size) * max(experiment.measure.batch_sizes)
    cache = model.make_cache(num_pages=1 + reserved + pages, page_size=size, num_capture_pages=reserved)
    for table in cache.tables:
        table.normal_()
    return model


def capture(model: RankingModel, experiment: ExperimentConfig) -> dict[str, GraphedModel]:
    """The modes beside eager: on CUDA one graph and a graph a layer, elsewhere the static buffers."""
    names = ("graph", "segmented") if model.device.type == "cuda" else ("static",)
    return {name: model.make_graphs(experiment.graphs, segmented=name == "segmented") for name in names}


@contextmanager
def cached_request(model: RankingModel, batch_size: int, new: int, candidates: int) -> Iterator[Request]:
    """Users whose longest history is cached but for ``new`` tokens, with so many candidates each."""
    cache, config = model.cache, model.config
    assert cache is not None
    users, history = range(batch_size), np.arange(config.max_history_tokens)
    cache.clear()
    with cache.request(users, [history[: len(history) - new]] * batch_size, weights_version=0):
        pass  # its keys and values are what the tables hold
    with evaluating(model), cache.request(users, [history] * batch_size, weights_version=0) as plan:
        counts = [candidates] * batch_size
        offsets = torch.arange(batch_size + 1, dtype=torch.int32) * (new + candidates)
        rows = (offsets[:-1, None] + new + torch.arange(candidates)).flatten().to(model.device)
        lengths = offsets.to(model.device), torch.tensor(counts, dtype=torch.int32, device=model.device)
        plain, built = plan.metadata(counts), dict[KVCapacity, KVMetadata]()

        def eager(values: Tensor) -> Tensor:
            tokens = TokenBatch(values, *lengths, new + candidates)
            return model.head(model.backbone(tokens, cache.tables, plain.to(model.device))[rows])

        def replay(graphs: GraphedModel, values: Tensor) -> Tensor:
            static = graphs.fit(batch_size, len(values))
            assert static is not None, "fit raises"
            if static.capacity not in built:
                built[static.capacity] = plan.metadata(counts, static.capacity)
            return graphs.replay(static, values, built[static.capacity])

        make = torch.Generator(model.device).manual_seed(0)
        shape = (int(offsets[-1]), config.hidden_size)
        values = [torch.randn(shape, device=model.device, generator=make).to(cache.tables[0].dtype) for _ in range(4)]
        yield Request(eager, replay, [(x,) for x in values])


def latencies(
    model: RankingModel, name: str, modes: Mapping[str, GraphedModel], experiment: ExperimentConfig, quiet: bool = False
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of results, and per point on CUDA: launches, their time together (busy_ms), and the share of time idle.

    error is the relative difference from the eager logits. Graphs must give those of the static buffers bit for bit,
    and float32 and float64 no more than their rounding; else a point is wrong and has no time.
    """
    config, setting, device = model.config, experiment.measure, model.device
    dtype = getattr(torch, experiment.replay.dtype)
    new, candidates = 2 * experiment.replay.new_pairs, setting.num_candidates
    cached = config.max_history_tokens - new
    columns = model_columns(name, model, experiment.replay.page_size) | {"tier": "device", "new_tokens": new}
    columns |= {"history_pairs": config.max_history_pairs, "cached_tokens": cached}
    flops = request_flops(model, cached, new, candidates)
    static = modes.get("static") or model.make_graphs(experiment.graphs, mode="static")
    rows, launches = [], []
    for batch_size in tqdm(setting.batch_sizes, desc=name, disable=quiet, unit="batch"):
        columns |= {"batch_size": batch_size, "num_candidates": batch_size * candidates}
        columns["num_tokens"] = batch_size * (cached + new + candidates)
        with cached_request(model, batch_size, new, candidates) as request:
            first = request.inputs[0][0]
            expected, same = request.eager(first), request.replay(static, first)
            for mode in ("eager", *modes):
                call = request.eager if mode == "eager" else partial(request.replay, modes[mode])
                logits = call(first)
                error = difference(logits, expected).relative
                right = mode == "eager" or torch.equal(logits, same)
                if not right or error > LIMITS.get(dtype, np.inf):
                    reason = "logits differ from those of the static buffers" if not right else f"error {error:.1e}"
                    rows.append(row("wrong", mode=mode, reason=reason, error=error, **columns))
                    continue
                latency = measure(call, request.inputs, device=device, **setting.limits)
                rates = achieved(latency, ceilings(device, dtype), flops=batch_size * flops)
                rows.append(row("ok", latency=latency, mode=mode, error=error, **columns, **rates))
                if device.type == "cuda":
                    count, busy = kernels(partial(call, first))
                    point = {"backbone": name, "mode": mode, "batch_size": batch_size, "launches": count}
                    point |= {"busy_ms": busy, "p50_ms": latency.p50_ms, "idle": max(0.0, 1 - busy / latency.p50_ms)}
                    launches.append(point)
    return to_frame(rows), pd.DataFrame(launches)


def kernels(call: Callable[[], object]) -> tuple[int, float]:
    """How many kernels and copies a call puts on the device, and the ms that they take together, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_time_total > 0]
    return sum(event.count for event in events), sum(event.device_time_total for event in events) / 1e3


def memory_alone(model: RankingModel, experiment: ExperimentConfig) -> pd.DataFrame:
    """memory_bytes of every bucket captured into a pool of its own. The model has no graphs afterwards."""
    shapes = [(b.batch_size, b.num_tokens // b.batch_size) for b in experiment.graphs.buckets(model.config)]
    alone = (GraphConfig(batch_sizes=[users], tokens_per_user=[tokens]) for users, tokens in shapes)
    frames = [model.make_graphs(config).report() for config in alone]
    model.graphs = None
    return pd.concat(frames, ignore_index=True)
