"""The measurements of kv_cache: a request log replayed through caches of different sizes, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch, window_start
from recexp.cache import PagedKVCache
from recexp.config import CacheConfig, ExperimentConfig
from recexp.data.interactions import Interactions
from recexp.data.requests import make_batch, replay
from recexp.experiments.compare import LIMITS
from recexp.experiments.latency import model_columns
from recexp.experiments.measure import Latency, achieved, ceilings, measure, request_flops
from recexp.experiments.record import row, to_frame
from recexp.experiments.run import data_of
from recexp.model import RankingModel

OUTCOMES = ("device", "host", "partial", "miss: evicted", "miss: window moved", "miss: new user")
CACHE = ["model", "num_pages", "host_pages"]


def request_log(interactions: Interactions, max_candidates: int, count: int | None) -> list[SequenceBatch]:
    """The first ``count`` requests of the log, in time order: a user's next candidates behind all it did before."""
    log = replay(interactions, max_candidates).select(slice(0, count))
    return [make_batch(interactions, log.select([i]))[0] for i in range(len(log))]


def make_cache(model: RankingModel, config: CacheConfig, num_pages: int, host_pages: int) -> PagedKVCache:
    """The model's cache, with a host tier of so many pages."""
    shape, weight = model.config, model.sequence.item_embedding.weight
    page_bytes = 2 * shape.num_layers * shape.num_heads * shape.head_dim * weight.element_size() * config.page_size
    sizes = {"num_pages": num_pages, "page_size": config.page_size, "host_chunk_pages": config.host_chunk_pages}
    return model.make_cache(**sizes, host_bytes=host_pages * page_bytes)


def replays(
    models: Mapping[str, RankingModel], log: Sequence[SequenceBatch], config: CacheConfig, quiet: bool = False
) -> pd.DataFrame:
    """A row a model, cache and request: the cache's statistics, ms, host_ms, and how far the logits are off.

    Every model first answers the log without a cache (tier "none", no cache size): these answers are the reference.
    outcome is the tier, and of a miss its reason: a new user, whose last visit had no history to keep; a window that
    moved since the last visit; pages that were evicted. Only the last one is for a cache to avoid.
    """
    sizes = list(product(config.num_pages, config.host_pages))
    bar = tqdm(total=len(models) * (1 + len(sizes)) * len(log), desc="replay", disable=quiet, unit="request")
    frames = []
    for name, model in models.items():
        requests = _describe(model, log)
        answers, times = _answer(model, model.predict, log, bar)
        requests["norm"] = [float(a.square().sum()) for a in answers]
        frames.append(requests.assign(model=name, tier="none", outcome="none", **_off(answers, answers), **times))
        for num_pages, host_pages in sizes:
            cache = make_cache(model, config, num_pages, host_pages)
            cached, times = _answer(model, model.predict_cached, log, bar)
            found = cache.statistics().tail(len(log)).reset_index(drop=True).drop(columns=["request", "user"])
            found = requests.join(found).assign(model=name, num_pages=num_pages, host_pages=host_pages, **times)
            found["outcome"] = found["tier"].where(found["tier"] != "miss", "miss: " + found["reason"])
            frames.append(found.assign(**_off(cached, answers)))
    bar.close()
    return pd.concat(frames, ignore_index=True)


def _off(tested: Sequence[Tensor], reference: Sequence[Tensor]) -> dict[str, list[float]]:
    """Per request the largest difference and the sum of squares; infinite where a logit is not a number, since frames
    leave NaN out of their sums."""
    off = [(a - r).abs().nan_to_num(nan=torch.inf) for a, r in zip(tested, reference, strict=True)]
    return {"difference": [float(x.max()) for x in off], "squares": [float(x.square().sum()) for x in off]}


def _describe(model: RankingModel, log: Sequence[SequenceBatch]) -> pd.DataFrame:
    """Per request: user, pairs in the window, candidates, and why a cache would not hold its history."""
    pairs = np.array([int(batch.num_pairs[0]) for batch in log])
    start = window_start(pairs, model.config.max_history_pairs, model.config.window_hop or 1)
    frame = pd.DataFrame({"user": [int(batch.user_ids[0]) for batch in log], "pairs": pairs - start})
    before = pd.DataFrame({"pairs": pairs, "start": start}).groupby(frame["user"]).shift(fill_value=0)
    reasons = np.where(start != before["start"], "window moved", "evicted")
    frame["reason"] = np.where(before["pairs"] == 0, "new user", reasons)
    return frame.assign(candidates=[int(batch.num_candidates[0]) for batch in log])


def _answer(
    model: RankingModel, call: Callable[[SequenceBatch], Tensor], log: Sequence[SequenceBatch], bar: tqdm
) -> tuple[list[Tensor], dict[str, list[float]]]:
    """The logits of every request in float64, and its ms (CUDA events; the clock on a CPU) and host_ms."""
    cuda = model.device.type == "cuda"
    logits, times = [], dict[str, list[float]](ms=[], host_ms=[])
    for batch in log[-20:]:  # untimed: loads kernels
        call(batch)
    if model.cache is not None:
        model.cache.clear()
    for batch in log:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
        start = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        out = call(batch)
        for mark in marks[1:]:
            mark.record()
            mark.synchronize()
        times["host_ms"].append((time.perf_counter() - start) * 1e3)
        times["ms"].append(marks[0].elapsed_time(marks[1]) if cuda else times["host_ms"][-1])
        logits.append(out.double().cpu())
        bar.update()
    return logits, times


def latencies(models: Mapping[str, RankingModel], frame: pd.DataFrame, experiment: ExperimentConfig) -> pd.DataFrame:
    """Rows of results: a point a model, cache, tier and history length, of requests with all their candidates."""
    rows, full = [], data_of(experiment).max_candidates
    for key, group in frame[frame["candidates"] == full].groupby([*CACHE, "tier", "pairs"], dropna=False, sort=False):
        name, num_pages, host_pages, tier, pairs = cast(tuple[str, float, float, str, int], key)
        if len(group) < experiment.measure.min_runs:
            continue
        model, dtype = models[name], models[name].sequence.item_embedding.weight.dtype
        history = len(model.config.context) + 2 * pairs
        new = history if tier == "none" else int(group["tokens_computed"].median())
        columns = model_columns(name, model, None if tier == "none" else experiment.cache.page_size)
        columns |= {"mode": "eager", "tier": tier, "cached_tokens": history - new, "new_tokens": new, "batch_size": 1}
        columns |= {"history_pairs": pairs, "num_candidates": full, "num_tokens": history + full}
        error = float(np.sqrt(group["squares"].sum() / group["norm"].sum()))
        if tier != "none":
            wasted = -history % experiment.cache.page_size
            columns |= {"num_pages": int(num_pages), "host_pages": int(host_pages), "error": error}
            columns["wasted_share"] = wasted / max(history + wasted, 1)
        if not error <= LIMITS[dtype]:
            reason = f"logits differ from uncached ones by more than {LIMITS[dtype]}"
            rows.append(row("wrong", reason=reason, **columns))
            continue
        p10, p50, p90 = (float(p) for p in np.percentile(group["ms"], [10, 50, 90]))
        latency = Latency(p10, p50, p90, len(group), group["host_ms"].median(), None)
        flops = request_flops(model, history - new, new, full)
        rates = achieved(latency, ceilings(model.device, dtype), flops=flops)
        rows.append(row("ok", latency=latency, **columns, **rates))
    return to_frame(rows)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a model and cache: shares of the outcomes, history tokens not computed, MB copied, largest difference."""
    groups = frame[frame["tier"] != "none"].groupby(CACHE)
    shares = groups["outcome"].value_counts(normalize=True).unstack(fill_value=0)
    table = shares.reindex(columns=OUTCOMES, fill_value=0.0)
    table["hit rate"] = 1 - shares.filter(like="miss").sum(axis=1)
    sums = groups[["tokens_reused", "tokens_computed", "bytes_onloaded", "bytes_offloaded"]].sum()
    table["tokens saved"] = sums["tokens_reused"] / (sums["tokens_reused"] + sums["tokens_computed"])
    table["MB onloaded"], table["MB offloaded"] = sums["bytes_onloaded"] / 1e6, sums["bytes_offloaded"] / 1e6
    table["wasted pages a request"] = groups["pages_wasted"].mean()
    table["largest logit difference"] = groups["difference"].max()
    return table.reset_index().astype({"num_pages": int, "host_pages": int})


def copies(models: Mapping[str, RankingModel], points: pd.DataFrame, experiment: ExperimentConfig) -> pd.DataFrame:
    """What an onload costs: a row a model and history length timed on both tiers, through the smallest such cache.

    extra ms: median of a host hit less that of a device hit. copy ms: the same pages onloaded alone. hidden share: the
    part of the copy that answers do not wait for; 0 on a CPU, where copies are made before the first layer starts.
    """
    used = points[(points["tier"] == "host") & (points["status"] == "ok")]
    same = (points["num_pages"] == used["num_pages"].min()) & (points["host_pages"] == used["host_pages"].max())
    rows = []
    for name, model in models.items():
        mine = points[same.fillna(False) & (points["backbone"] == name)]
        times = mine.pivot(index="history_pairs", columns="tier", values="p50_ms").reindex(columns=["device", "host"])
        for pairs, (device, host) in times.dropna().astype(float).iterrows():
            before = len(model.config.context) + 2 * (int(pairs) - data_of(experiment).max_candidates)
            num_pages, copy = _onload_alone(model, before, experiment)
            hidden = 0.0 if model.device.type == "cpu" else float(np.clip(1 - (host - device) / copy, 0, 1))
            found = {"model": name, "history pairs": pairs, "pages": num_pages, "device hit ms": device}
            found |= {"host hit ms": host, "extra ms": host - device, "copy ms": copy, "hidden share": hidden}
            rows.append(found)
    return pd.DataFrame(rows)


def _onload_alone(model: RankingModel, num_tokens: int, experiment: ExperimentConfig) -> tuple[int, float]:
    """Pages of a history, and the median ms of their way from the host to the device."""
    config = experiment.cache
    num_pages = -(-num_tokens // config.page_size)
    cache = make_cache(model, config, num_pages + 1, num_pages + config.host_chunk_pages)
    with cache.request([0], [np.zeros(num_tokens, np.int64)], weights_version=0) as plan:
        job = (0, plan.pages[0])

    def onload() -> None:
        cache.host.onload([job])
        cache.host.fence()

    return num_pages, measure(onload, [()], device=model.device, **experiment.measure.limits).p50_ms
