"""The measurements of numerical_diff: every operation of a model in two ways, and what a user sees of the difference.

The truth is float64 with the plain attention and without a cache; the plain way of a dtype is the same in that dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch
from recexp.config import DifferenceConfig, GraphConfig, ModelConfig, TaskConfig
from recexp.data.interactions import Interactions
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import Requests, candidate_rows, labels, make_batch
from recexp.experiments import compare
from recexp.experiments.compare import Trace, trace_differences
from recexp.experiments.latency import backend_of, in_dtype, model_columns, reference_of
from recexp.experiments.record import row
from recexp.graphs import num_capture_pages
from recexp.layers import Attention, attention_backends
from recexp.layers.sequence import token_layout
from recexp.model import RankingModel
from recexp.train import predict_requests

LOGITS, LOOKUP = ("model", "output"), ("sequence", "item_embedding")
# of each dtype as torch.testing has it
RTOL = {"float64": 1e-7, "float32": 1.3e-6, "tf32": 1e-3, "bfloat16": 1.6e-2, "float16": 1e-3}
SAMPLE = 128  # elements that a saved trace keeps of an operation


@dataclass(frozen=True)
class Way:
    """One way to the same logits. dtype "tf32": float32 whose matrix products CUDA may round to TF32."""

    dtype: str = "float64"
    backend: str = "reference"
    page_size: int | None = None  # None: without a cache
    mode: str = "eager"
    fused: bool = False

    def __str__(self) -> str:
        pages = f", pages of {self.page_size}" if self.page_size else ""
        return self.backend + ", fused layer" * self.fused + pages + f", {self.mode}" * (self.mode != "eager")

    def columns(self) -> dict[str, Any]:
        """Of a row of results."""
        found = {"dtype": self.dtype, "backend": self.backend + ", fused layer" * self.fused, "mode": self.mode}
        return found | {"page_size": self.page_size, "tier": "device" if self.page_size else "none"}

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)


@dataclass(frozen=True)
class Probe:
    """Requests on which ways are compared; the same with half of every history, cached beforehand in ways with a cache;
    and which of the batch's tokens then remain, bool [T]."""

    batch: SequenceBatch
    prefix: SequenceBatch
    is_new: Tensor


def make_probe(interactions: Interactions, requests: Requests, config: ModelConfig, count: int) -> Probe:
    """Of the requests that fit a model's window, the ``count`` with the longest histories."""
    fit = requests.select(np.flatnonzero(requests.split <= config.max_history_pairs))
    longest = fit.select(np.argsort(-fit.split, kind="stable")[:count])
    half = Requests(longest.user_rows, longest.split // 2, longest.split // 2 + 1)
    batch, prefix = (make_batch(interactions, some)[0] for some in (longest, half))
    layout = token_layout(batch, len(config.context))
    cached = np.repeat(len(config.context) + 2 * half.split, np.diff(layout.seq_offsets))
    return Probe(batch, prefix, torch.from_numpy(layout.positions >= cached))


@contextmanager
def on_way(model: RankingModel, way: Way) -> Iterator[RankingModel]:
    """A copy of the model that computes so; float32 products are IEEE inside, or TF32. ValueError where it cannot."""
    if way.dtype == "tf32" and model.device.type != "cuda":
        raise ValueError("TF32 is a mode of CUDA's matrix products")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if way.dtype == "tf32" else "highest")
    try:
        yield in_dtype(model, way.torch_dtype, attention_backend=way.backend, fused_layers=way.fused)
    finally:
        torch.set_float32_matmul_precision(before)


def answer(model: RankingModel, way: Way, probe: Probe) -> Trace:
    """The trace of ``predict`` on the probe, or of ``predict_cached`` behind its prefix, rows that pad cut off; of a
    CUDA graph the logits only. ValueError, with the reason, where the way is refused."""
    with on_way(model, way) as copy:
        if way.page_size is None:
            return compare.trace(copy, partial(copy.predict, probe.batch))
        users, tokens, size = probe.batch.batch_size, int(probe.is_new.sum()), way.page_size
        graphs = GraphConfig(batch_sizes=[users], tokens_per_user=[tokens // users + 1])
        reserved = num_capture_pages(graphs.buckets(copy.config), size)
        num_pages = 1 + reserved + users * -(-copy.config.max_history_tokens // size)
        kept = copy.make_cache(num_pages=num_pages, page_size=size, num_capture_pages=reserved)
        copy.predict_cached(probe.prefix)
        if way.mode != "eager":
            mode = "static" if way.mode == "static" else "graph"
            copy.make_graphs(graphs, segmented=way.mode == "segmented", mode=mode)
        found = compare.trace(copy, partial(copy.predict_cached, probe.batch))
        computed = int(kept.statistics()["tokens_computed"].tail(users).sum())
        assert computed == tokens - int(probe.batch.num_candidates.sum()), "the prefix was not reused"
        return _rows(found, slice(tokens))


def _rows(found: Trace, rows: slice | Tensor) -> Trace:
    """Of a trace the given tokens and all candidates; the lookups, of which a cache makes fewer, are left out."""
    candidates = len(found[LOGITS])
    kept = {key: x for key, x in found.items() if key[0] != "sequence" or key[1] == "output"}
    return {key: x[:candidates] if key[0] in ("head", "model") else x[rows] for key, x in kept.items()}


def ways(model: RankingModel, config: DifferenceConfig) -> list[tuple[str, Way, Way]]:
    """What is compared with what: (kind, tested, reference)."""
    modes = ("static", "graph", "segmented") if model.device.type == "cuda" else ("static",)
    found = []
    for dtype in config.dtypes:
        plain, copy = Way(dtype), in_dtype(model, Way(dtype).torch_dtype, attention_backend="auto")
        auto, *paged = (Way(dtype, backend_of(copy, size), size) for size in (None, *config.page_sizes))
        attends = auto.backend != "none"  # else there are no backends to compare, nor a cache
        found += [("dtype", auto if attends else plain, Way())] if dtype != "float64" else []
        if dtype == "tf32" or not attends:
            continue
        found += [("backend", Way(dtype, name), plain) for name in attention_backends if name != "reference"]
        found += [("fused layer", replace(auto, fused=True), plain)] if model.config.backbone == "hstu" else []
        found += [("cache", way, auto) for way in paged]
        found += [("page size", way, paged[0]) for way in paged[1:]]
        eager = paged[0] if attention_backends[paged[0].backend].capturable else replace(paged[0], backend="paged")
        found += [("graph", replace(eager, mode=mode), eager) for mode in modes]
    return found


def judged(dtype: str, a: Trace, r: Trace, truth: Trace, plain: Trace) -> pd.DataFrame:
    """``trace_differences`` of a and r, and the rule of ``compare.equal`` for each operation: error and plain_error
    (relative, of a and of the plain way against the truth), what the rule looks at (relative in float64 and float32,
    error in others, TF32 too), its limit, and whether it is kept (equal)."""
    keys, fixed = ["layer", "operation"], compare.LIMITS.get(getattr(torch, dtype, torch.bfloat16))
    frame = trace_differences(a, r, 1e-5, RTOL[dtype])
    for column, tested in (("error", a), ("plain_error", plain)):
        errors = trace_differences(tested, truth)[[*keys, "relative"]].rename(columns={"relative": column})
        frame = frame.merge(errors, on=keys, how="left")
    frame["looked_at"], frame["limit"] = frame["relative" if fixed else "error"], fixed or 2 * frame["plain_error"]
    return frame.assign(equal=frame["looked_at"] <= frame["limit"])


def compare_ways(
    name: str, model: RankingModel, probe: Probe, config: DifferenceConfig, quiet: bool = False
) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Rows of results, one a tested way (error: of its logits against the truth; "wrong" where they break the rule in
    any of its pairs), and the judged operations of every pair of ``ways`` that ran."""

    @cache
    def answers(way: Way) -> tuple[Trace, str, str]:
        try:
            return answer(model, way, probe), "ok", ""
        except ValueError as error:
            return {}, "refused", str(error).rpartition(": ")[2]
        except Exception as error:  # of a backend: a row, not the end of the run
            return {}, "failed", f"{type(error).__name__}: {error}"

    frames, outcomes = [], dict[Way, list[tuple[str, str, float | None]]]()
    for kind, tested, reference in tqdm(ways(model, config), desc=name, disable=quiet, unit="pair"):
        found = [answers(way) for way in (tested, reference, Way(), Way(tested.dtype))]
        outcome = next(((status, reason, None) for _, status, reason in found if status != "ok"), None)
        if outcome is None:
            cut = [_rows(t, probe.is_new) if tested.page_size and LOOKUP in t else t for t, _, _ in found]
            against = f"{reference.dtype}, {reference}"
            pair = {"model": name, "kind": kind, "dtype": tested.dtype, "tested": str(tested), "reference": against}
            frames.append(judged(tested.dtype, *cut).assign(**pair))
            last: Any = frames[-1].query("layer == 'model'").iloc[0]
            wrong = f"{kind}: logits off by {last.looked_at:.1e}, limit {last.limit:.1e}, against {against}"
            outcome = ("ok", "", last.error) if last.equal else ("wrong", wrong, last.error)
        outcomes.setdefault(tested, []).append(outcome)
    shape = model_columns(name, model) | {"num_tokens": len(probe.is_new)}
    shape |= {"batch_size": probe.batch.batch_size, "num_candidates": len(probe.batch.candidate_ids)}
    if not frames:
        raise ValueError(
            f"models.{name}: no pair of ways could be compared: {[pairs[0] for pairs in outcomes.values()]}"
        )
    rows = []
    for way, pairs in outcomes.items():
        status, _, error = max(pairs, key=lambda outcome: outcome[0] != "ok")  # the first that is not, if any
        reason = "; ".join(dict.fromkeys(reason for _, reason, _ in pairs if reason)) or None
        rows.append(row(status, reason=reason, error=error, **shape | way.columns()))
    return rows, pd.concat(frames, ignore_index=True)


def growth(
    name: str, model: RankingModel, probe: Probe, dtypes: Sequence[str], depth: int
) -> tuple[pd.DataFrame, dict[tuple[str, str], Trace], str]:
    """Every dtype against the truth along ``depth`` layers with seeded, untrained weights, the same on every machine:
    the judged operations; the traces by (name, dtype); and the hash of weights and requests."""
    deep = RankingModel(model.config.model_copy(update={"num_layers": depth}), model.device)
    content = (*deep.state_dict().values(), probe.batch.item_ids, probe.batch.action_ids, probe.batch.candidate_ids)
    digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in content)).hexdigest()
    truth, traces, frames = answer(deep, Way(), probe), dict[tuple[str, str], Trace](), []
    for dtype in dtypes:
        found, plain = (answer(deep, Way(dtype, backend), probe) for backend in ("auto", "reference"))
        frames.append(judged(dtype, found, truth, truth, plain).assign(model=name, dtype=dtype))
        traces[name, dtype] = found
    return pd.concat(frames, ignore_index=True), traces, digest


def save_traces(run: Path, traces: Mapping[tuple[str, str], Trace], identity: Mapping[str, str]) -> None:
    """A sample of every operation, evenly spread, into a run's traces.safetensors, as ``growth`` gives them; identity:
    each model's hash."""
    flat = {"/".join((*key, *part)): x.flatten() for key, found in traces.items() for part, x in found.items()}
    sample = {name: x[torch.linspace(0, len(x) - 1, min(SAMPLE, len(x))).long()] for name, x in flat.items()}
    save_file(sample, run / "traces.safetensors", dict(identity))


def compare_saved(tested: Path, reference: Path) -> pd.DataFrame:
    """``judged`` operations of two saved runs, of each model and dtype that both have; indices are of the samples. The
    truth and the plain way are the reference run's. ValueError where the runs did not compute the same."""
    (a, identity), (r, expected) = _load_traces(tested), _load_traces(reference)
    both = [key for key in r if key in a and identity[key[0]] == expected[key[0]]]
    if not both:
        raise ValueError(f"{tested} and {reference} computed other things: their weights or requests differ")
    frames = [judged(d, a[m, d], r[m, d], r[m, "float64"], r[m, d]).assign(model=m, dtype=d) for m, d in both]
    return pd.concat(frames, ignore_index=True)


def _load_traces(run: Path) -> tuple[dict[tuple[str, str], Trace], dict[str, str]]:
    traces: dict[tuple[str, str], Trace] = {}
    with safe_open(run / "traces.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            model, dtype, layer, operation = name.split("/")
            traces.setdefault((model, dtype), {})[layer, operation] = file.get_tensor(name)
        return traces, file.metadata()


def isolate(
    model: RankingModel, dtype: str, probe: Probe, layer: str, operation: str, index: Sequence[int]
) -> tuple[nn.Module, nn.Module, list[Tensor], tuple[int, ...]]:
    """One operation of a layer in this dtype and in float64, the inputs in this dtype that decide one element of its
    output (a row; for attention a user's rows), and the element's index in the output for just these."""
    name, calls = f"backbone.layers.{layer}.{operation}", list[tuple[Tensor, ...]]()
    with on_way(model, Way(dtype, "auto")) as low:
        part = low.get_submodule(name)
        with part.register_forward_hook(lambda module, inputs, output: calls.append(inputs)):
            low.predict(probe.batch)
    start, end, lengths = index[0], index[0] + 1, list[Tensor]()
    if isinstance(part, Attention):
        user = int(torch.searchsorted(calls[0][3], start, right=True)) - 1
        ends = calls[0][3][user : user + 2]
        (start, end), lengths = ends.tolist(), [ends - ends[0], calls[0][4][[user]]]
    inputs = [x[start:end] for x in calls[0][:3]] + lengths
    return part, reference_of(model).get_submodule(name), inputs, (index[0] - start, *index[1:])


def rankings(
    model: RankingModel, dtypes: Sequence[str], interactions: Interactions, requests: Requests, task: TaskConfig, k: int
) -> pd.DataFrame:
    """What a dtype costs a user, a row a dtype, against the truth: the order of each request's candidates by the first
    task, and the change of that task's AUC, GAUC and NDCG@10; neither where a logit is not finite."""
    actions = interactions.action_ids[candidate_rows(interactions, requests)]
    wanted, users = labels(actions, [task], interactions.action_values)[:, 0], requests.candidate_users
    expected = predict_requests(reference_of(model), interactions, requests)
    before, rows = ranking_metrics(expected[:, 0], wanted, users), []
    for dtype in dtypes:
        with on_way(model, Way(dtype, "auto")) as copy:
            found = predict_requests(copy, interactions, requests)
        error = compare.difference(torch.from_numpy(found), torch.from_numpy(expected)).relative
        if not np.isfinite(found).all():  # no order, then
            rows.append({"dtype": dtype, "relative error of logits": error})
            continue
        after = ranking_metrics(found[:, 0], wanted, users)
        order = compare.ranking_difference(found[:, 0], expected[:, 0], requests.end - requests.split, k)
        change = {f"{key.upper()} change": round(after[key] - before[key], 12) for key in ("auc", "gauc", "ndcg")}
        rows.append({"dtype": dtype, "relative error of logits": error, **order, **change})
    return pd.DataFrame(rows)
