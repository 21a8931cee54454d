"""Latency of the same requests without a cache and with one, eagerly and through static buffers or CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch, offsets
from recexp.config import ExperimentConfig, GraphConfig
from recexp.data.interactions import Interactions
from recexp.data.requests import Requests, make_batch
from recexp.devices import describe_device
from recexp.experiments.compare import difference, equal
from recexp.experiments.measure import achieved, ceilings, measure_undisturbed, request_flops
from recexp.experiments.record import MODEL, row, to_frame
from recexp.graphs import num_capture_pages
from recexp.layers import Attention, attention_backends
from recexp.layers.attention import AttentionRequest
from recexp.layers.backends.auto import select
from recexp.model import RankingModel

PATHS = {  # tier and mode
    "cuda": (("none", "eager"), ("miss", "graph"), ("device", "eager"), ("device", "graph")),
    "cpu": (("none", "eager"), ("device", "eager"), ("device", "static")),
}
NUM_BATCHES = 4  # that take turns
Call = tuple[Callable[..., Tensor], list[tuple[Any, ...]]]  # what is timed, and the inputs that take turns


def in_dtype(model: RankingModel, dtype: torch.dtype, **changes: Any) -> RankingModel:
    """A copy of the model in another dtype, and with another configuration where ``changes`` ask for it."""
    copy = RankingModel(model.config.model_copy(update=changes), model.device, dtype)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def reference_of(model: RankingModel) -> RankingModel:
    """The float64 reference of a model: its weights, the plain attention."""
    return in_dtype(model, torch.float64, attention_backend="reference", fused_layers=False)


def backend_of(model: RankingModel, page_size: int | None = None) -> str:
    """The attention backend of the model's layers at inference, page_size: with a cache; "none" for layers without."""
    attention = next((m for m in model.modules() if isinstance(m, Attention)), None)
    if attention is None or attention.backend != "auto":
        return attention.backend if attention else "none"
    dtype, config = model.sequence.item_embedding.weight.dtype, model.config
    shape = (config.num_heads, config.head_dim, page_size)
    return select(AttentionRequest(attention.weighting, model.device, dtype, *shape))[0]


def model_columns(name: str, model: RankingModel, page_size: int | None = None) -> dict[str, Any]:
    """Columns of a row that the model decides; page_size: with a cache."""
    weight, shape = model.sequence.item_embedding.weight, {c: getattr(model.config, c, page_size) for c in MODEL}
    place = {"device": describe_device(model.device), "device_id": str(model.device), "backbone": name}
    kind = {"backend": backend_of(model, page_size), "dtype": str(weight.dtype).removeprefix("torch.")}
    return place | kind | shape


def requests_of_length(
    interactions: Interactions, num_pairs: int, num_candidates: int, count: int, skip: int = 0
) -> Requests:
    """``count`` real requests with exactly ``num_pairs`` pairs of history; few users come round again."""
    users = np.flatnonzero(interactions.lengths >= num_pairs + num_candidates)
    if not len(users):
        raise ValueError(
            f"no user of {interactions.name} has {num_pairs} + {num_candidates} interactions; "
            f"the longest history has {interactions.lengths.max()}: lower history_pairs"
        )
    rows = users[(np.arange(count) + skip) % len(users)]
    split = np.full(count, num_pairs)
    return Requests(rows, split, split + num_candidates)


def latencies(
    models: Mapping[str, RankingModel], interactions: Interactions, experiment: ExperimentConfig, quiet: bool = False
) -> pd.DataFrame:
    """Every model at every batch size and history length, in ``replay.dtype``, along the device's PATHS: without a
    cache; into an empty cache, as a graph; with all but the newest pairs cached on the device, eagerly and as a graph.

    A point covers ids in, logits out. It is first checked against float64; a point that fails has no time. Graphs are
    captured for exactly the point's tokens, so nothing is padded; a CPU uses their buffers eagerly, mode "static".
    What a layer or backend refuses is a row with its reason.
    """
    setting, dtype = experiment.measure, getattr(torch, experiment.replay.dtype)
    paths = PATHS[next(iter(models.values())).device.type]
    plain = {"attention_backend": "reference", "fused_layers": False}
    ready = {n: (in_dtype(m, dtype), reference_of(m), in_dtype(m, dtype, **plain)) for n, m in models.items()}
    points = list(product(setting.batch_sizes, setting.history_pairs, models))
    rows = []
    with tqdm(total=len(paths) * len(points), desc="latency", disable=quiet, unit="point") as bar:
        for batch_size, pairs, name in points:
            requests = (
                requests_of_length(interactions, pairs, setting.num_candidates, batch_size, i * batch_size)
                for i in range(NUM_BATCHES)
            )
            batches = [make_batch(interactions, some)[0] for some in requests]
            model, *yardsticks = ready[name]
            answers = [yardstick.predict(batches[0]) for yardstick in yardsticks]
            for path in paths:
                rows.append(_point(name, model, batches, experiment, path, *answers))
                bar.update()
    return to_frame(rows)


def _point(
    name: str, model: RankingModel, batches: list[SequenceBatch], experiment: ExperimentConfig, path: tuple[str, str],
    expected: Tensor, plain: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """One row. expected, plain: logits of the first batch in float64, and in the model's dtype by the plain path."""
    tier, mode = path
    setting, page_size = experiment.measure, None if tier == "none" else experiment.replay.page_size
    dtype, batch_size, pairs = plain.dtype, batches[0].batch_size, int(batches[0].num_pairs[0])
    if mode != "eager":  # static buffers for just these candidates, and a backend that leaves lengths on the device
        used, changes = backend_of(model, page_size), {"max_candidates": setting.num_candidates}
        plainest = used in attention_backends and not attention_backends[used].capturable
        model = in_dtype(model, dtype, **changes, **({"attention_backend": "paged"} if plainest else {}))
    new_pairs = experiment.replay.new_pairs if tier == "device" else pairs
    context = 0 if tier == "device" else len(model.config.context)
    new, history = context + 2 * new_pairs, len(model.config.context) + 2 * pairs
    columns = model_columns(name, model, page_size) | {"tier": tier, "mode": mode, "batch_size": batch_size}
    columns |= {"history_pairs": pairs, "cached_tokens": max(0, history - new), "new_tokens": new}
    columns["num_candidates"] = batch_size * setting.num_candidates
    columns["num_tokens"] = batch_size * history + columns["num_candidates"]
    try:
        if tier == "device" and pairs <= new_pairs:
            raise ValueError(f"nothing is cached of {pairs} pairs but for {new_pairs} new ones; lower replay.new_pairs")
        fn, inputs = (
            (model.predict, [(b,) for b in batches])
            if tier == "none"
            else _cached(model, batches, new_pairs, experiment.replay.page_size, tier, mode)
        )
        tested = fn(*inputs[0])
        columns["error"] = difference(tested, expected).relative
        if not equal(tested, expected, dtype, plain):
            return row("wrong", reason=f"logits differ from float64 by {columns['error']:.1e}", **columns)
        latency = measure_undisturbed(fn, inputs, device=model.device, **setting.limits)
    except ValueError as error:
        return row("refused", reason=str(error), **columns)
    except torch.OutOfMemoryError as error:
        return row("out of memory", reason=str(error).splitlines()[0], **columns)
    flops = batch_size * request_flops(model, history - new, new, setting.num_candidates)
    return row("ok", latency=latency, **columns, **achieved(latency, ceilings(model.device, dtype), flops=flops))


def _cached(
    model: RankingModel, batches: list[SequenceBatch], new_pairs: int, page_size: int, tier: str, mode: str
) -> Call:
    """``predict_cached`` of the batches, each with users of its own, all of whom the cache holds.

    A device hit: each batch takes turns with one whose newest pairs begin with another item, so that every call finds
    just the pairs before them and computes what is new; to the cache that is tier "partial". A miss: a cleared cache.
    """
    config, batch_size, candidates = model.config, batches[0].batch_size, int(batches[0].num_candidates[0])
    history = len(config.context) + 2 * int(batches[0].num_pairs[0])
    tokens = (2 * new_pairs if tier == "device" else history) + candidates
    graphs = GraphConfig(batch_sizes=[batch_size], tokens_per_user=[tokens])
    reserved = 0 if mode == "eager" else num_capture_pages(graphs.buckets(config), page_size)
    num_pages = 1 + reserved + len(batches) * batch_size * -(-history // page_size)
    cache = model.make_cache(num_pages=num_pages, page_size=page_size, num_capture_pages=reserved)
    users = torch.arange(len(batches) * batch_size).split(batch_size)
    inputs = list(zip(batches, users, strict=True))
    if tier == "device":
        inputs += [(other_newest(batch, new_pairs, config.num_items), ids) for batch, ids in inputs]
        for batch, ids in inputs:
            model.predict_cached(batch, ids)
    if mode != "eager":
        model.make_graphs(graphs)
    if tier == "device":
        model.predict_cached(*inputs[1])  # the first is kept for the numerical check
        found = cache.statistics()["tokens_computed"].tail(batch_size)
        assert (found == 2 * new_pairs).all(), found.tolist()
        return model.predict_cached, inputs

    def miss(batch: SequenceBatch, ids: Tensor) -> Tensor:
        cache.clear()
        return model.predict_cached(batch, ids)

    return miss, inputs


def other_newest(batch: SequenceBatch, new_pairs: int, num_items: int) -> SequenceBatch:
    """The batch with another item in the first of each user's newest pairs."""
    items, first = batch.item_ids.clone(), offsets(batch.num_pairs)[1:] - new_pairs
    items[first] = (items[first] + 1) % num_items
    return replace(batch, item_ids=items)
