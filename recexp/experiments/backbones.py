"""The measurements of compare_backbones: size, latency, and where numbers differ between dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch
from recexp.config import MeasureConfig, TaskConfig
from recexp.data.interactions import Interactions
from recexp.data.requests import Requests, candidate_rows, labels, make_batch
from recexp.devices import describe_device
from recexp.experiments.compare import auc_change, difference, equal, layer_differences, ranking_difference
from recexp.experiments.measure import achieved, ceilings, measure_undisturbed
from recexp.experiments.record import row, to_frame
from recexp.layers.attention import Attention, AttentionRequest
from recexp.layers.backends.auto import select
from recexp.model import RankingModel
from recexp.train import predict_requests

TIE = 0.01  # of AUC or GAUC: about what another seed changes


def in_dtype(model: RankingModel, dtype: torch.dtype, **changes: Any) -> RankingModel:
    """A copy of the model in another dtype, and with another configuration where ``changes`` ask for it."""
    copy = RankingModel(model.config.model_copy(update=changes), model.device, dtype)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def reference_of(model: RankingModel) -> RankingModel:
    """The float64 reference of a model: its weights, the plain attention."""
    return in_dtype(model, torch.float64, attention_backend="reference")


def backend_of(model: RankingModel, page_size: int | None = None) -> str:
    """The attention backend of the model's layers at inference, page_size: with a cache; "none" for layers without."""
    attention = next((m for m in model.modules() if isinstance(m, Attention)), None)
    if attention is None or attention.backend != "auto":
        return attention.backend if attention else "none"
    dtype, config = model.sequence.item_embedding.weight.dtype, model.config
    shape = (config.num_heads, config.head_dim, page_size)
    return select(AttentionRequest(attention.weighting, model.device, dtype, *shape))[0]


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


def count_flops(model: RankingModel, batch: SequenceBatch) -> int:
    """FLOPs of one predict as the padded path does it: matrix products only, masked pairs included."""
    # the fused CPU kernel of scaled_dot_product_attention is not counted; its plain form is
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict(batch)
    return counter.get_total_flops()


def sizes(
    models: Mapping[str, RankingModel], interactions: Interactions, measure_config: MeasureConfig
) -> pd.DataFrame:
    """What each model costs: parameters in all and in the layers, FLOPs of a request, KV bytes of a token."""
    pairs = max(measure_config.history_pairs)
    batch, _ = make_batch(interactions, requests_of_length(interactions, pairs, measure_config.num_candidates, 1))
    rows = []
    for name, model in models.items():
        config = model.config
        rows.append(
            {
                "model": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "parameters in layers": sum(p.numel() for p in model.backbone.parameters()),
                f"FLOPs of a request ({pairs} pairs, {measure_config.num_candidates} candidates)": count_flops(
                    model, batch
                ),
                "KV cache, bytes per token (float32)": 2 * config.num_layers * config.num_heads * config.head_dim * 4,
            }
        )
    return pd.DataFrame(rows)


def latencies(
    models: Mapping[str, RankingModel], interactions: Interactions, config: MeasureConfig, quiet: bool = False
) -> pd.DataFrame:
    """predict() of every model at every batch size and history length, in float32, each first checked against float64.

    A point covers ids in, logits out: checks, layout, copies, layers. A point that fails its check has no time.
    """
    points = [(b, n, name) for b in config.batch_sizes for n in config.history_pairs for name in models]
    rows = []
    for batch_size, pairs, name in tqdm(points, desc="latency", disable=quiet, unit="point"):
        model = models[name]
        count = 4  # batches that take turns
        chosen = [
            requests_of_length(interactions, pairs, config.num_candidates, batch_size, skip=i * batch_size)
            for i in range(count)
        ]
        batches = [make_batch(interactions, requests)[0] for requests in chosen]
        tokens = batch_size * (len(model.config.context) + 2 * pairs + config.num_candidates)
        columns: dict[str, Any] = {
            "device": describe_device(model.device),
            "backbone": name,
            "backend": backend_of(model),
            "dtype": "float32",
            "mode": "eager",
            "tier": "none",
            "num_layers": model.config.num_layers,
            "hidden_size": model.config.hidden_size,
            "num_heads": model.config.num_heads,
            "head_dim": model.config.head_dim,
            "batch_size": batch_size,
            "history_pairs": pairs,
            "num_tokens": tokens,
            "num_candidates": batch_size * config.num_candidates,
        }
        tested, expected = model.predict(batches[0]).cpu(), reference_of(model).predict(batches[0]).cpu()
        columns["error"] = difference(tested, expected).relative
        if not equal(tested, expected, torch.float32):
            rows.append(row("wrong", reason="float32 logits differ from float64 by more than 1e-5", **columns))
            continue
        latency = measure_undisturbed(
            model.predict,
            [(batch,) for batch in batches],
            device=model.device,
            min_runs=config.min_runs,
            max_runs=config.max_runs,
            max_seconds=config.max_seconds,
        )
        rates = achieved(latency, ceilings(model.device, torch.float32), flops=count_flops(model, batches[0]))
        rows.append(row("ok", latency=latency, **columns, **rates))
    return to_frame(rows)


def precision(
    models: Mapping[str, RankingModel],
    dtypes: Sequence[str],
    interactions: Interactions,
    requests: Requests,
    tasks: Sequence[TaskConfig],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What a dtype costs against the float64 reference on real requests.

    Returns a row a model and dtype (relative error of the logits, Kendall tau and top-3 overlap of each user's order,
    change of AUC; first task), and, with the same two columns, the differences of every layer and operation on the
    first requests.
    """
    batch, _ = make_batch(interactions, requests.select(slice(0, 16)))
    wanted = labels(interactions.action_ids[candidate_rows(interactions, requests)], tasks, interactions.action_values)
    rows, operations = [], []
    for model_name, model in models.items():
        reference = reference_of(model)
        expected = predict_requests(reference, interactions, requests)
        for name in dtypes:
            tested_model = in_dtype(model, getattr(torch, name))
            tested = predict_requests(tested_model, interactions, requests)
            order = ranking_difference(tested[:, 0], expected[:, 0], requests.end - requests.split)
            columns = {"model": model_name, "dtype": name}
            measured = {
                "relative error of logits": difference(torch.from_numpy(tested), torch.from_numpy(expected)).relative,
                "Kendall tau": order.kendall_tau,
                "top-3 overlap": order.top_k_overlap,
                "AUC change": auc_change(tested[:, 0], expected[:, 0], wanted[:, 0]),
            }
            rows.append(columns | measured)
            operations.append(layer_differences(tested_model, reference, batch).assign(**columns))
    return pd.DataFrame(rows), pd.concat(operations, ignore_index=True)


def example_tokens(
    interactions: Interactions, requests: Requests, num_pairs: int = 4, num_candidates: int = 4
) -> list[tuple[str, str]]:
    """The newest tokens of one request as (kind, text), for ``plot_data``."""
    row = int(np.argmax(requests.end - requests.split))
    batch, _ = make_batch(interactions, requests.select([row]))
    start = max(0, batch.item_ids.shape[0] - num_pairs)
    tokens = []
    for item, action in zip(batch.item_ids[start:].tolist(), batch.action_ids[start:].tolist(), strict=True):
        tokens += [
            ("item", f"item\n{interactions.item_keys[item]}"),
            ("action", f"rated\n{interactions.action_values[action]:g}"),
        ]
    candidates = batch.candidate_ids[:num_candidates].tolist()
    return tokens + [("candidate", f"item\n{interactions.item_keys[item]}?") for item in candidates]


def summarise(quality: pd.DataFrame, latency: pd.DataFrame, size: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row a model (quality of the first task, latency of the largest point, size), and two sentences about it."""
    first = quality[quality["task"] == quality["task"].iloc[0]]
    table = first.pivot_table(index="model", columns="metric", values="value", sort=False)
    timed = latency[
        (latency["batch_size"] == latency["batch_size"].max())
        & (latency["history_pairs"] == latency["history_pairs"].max())
    ]
    batch_size, pairs = timed["batch_size"].iloc[0], timed["history_pairs"].iloc[0]
    ms = f"p50 ms ({batch_size} users, {pairs} pairs)"
    times = timed.set_index("backbone")[["p10_ms", "p50_ms", "p90_ms"]].astype("Float64")
    table = table.join(times["p50_ms"].rename(ms)).join(size.set_index("model")["parameters"].astype("Int64"))
    models = list(size["model"])
    plain = table.drop([*models, "random"])
    said = []
    for metric in ("AUC", "GAUC"):
        best, rival = table[metric][models].idxmax(), "ridge bias model"
        gap = table[metric][best] - plain[metric][rival]
        verdict = "is ahead of" if gap > TIE else "stays behind" if gap < -TIE else "only ties with"
        said.append(
            f"by {metric} "
            + ", ".join(f"{m} reaches {table[metric][m]:.3f}" for m in models)
            + f", and {best} {verdict} the {rival} ({plain[metric][rival]:.3f}; "
            + f"item mean {plain[metric]['item mean']:.3f})"
        )
    lead, beaten = plain["AUC"].idxmax(), table["AUC"][models].max() < plain["AUC"].max()
    small = ": so small a set does not show what a sequence model is for" if beaten else ""
    task = first["task"].iloc[0]
    sentences = [f"On {task!r}, {'; '.join(said)}. The best plain model is {lead} ({plain['AUC'].max():.3f}){small}."]
    spreads = {m: times.loc[m].to_numpy(dtype=float, na_value=np.nan).tolist() for m in models}
    point = f"{batch_size} users and {pairs} pairs, without a cache, on {timed['device'].iloc[0]}"
    return table, [*sentences, _compare_times(spreads, point)]


def _compare_times(spreads: Mapping[str, Sequence[float]], point: str) -> str:
    """Who is faster, where the spreads (p10, p50, p90, in ms) leave no doubt."""
    if np.isnan(list(spreads.values())).any():
        return "At least one model failed its numerical check at the largest point, so its latency is not compared."
    fast, slow = min(spreads, key=lambda m: spreads[m][1]), max(spreads, key=lambda m: spreads[m][1])
    parts = ", ".join(f"{m} in {p50:.1f} ms ({p10:.1f} to {p90:.1f})" for m, (p10, p50, p90) in spreads.items())
    said = f"At {point}: {parts}"
    if spreads[fast][2] >= spreads[slow][0]:
        return f"{said}; the spreads overlap, so neither is called faster."
    return f"{said}; {fast} is {spreads[slow][1] / spreads[fast][1]:.1f} times as fast as {slow}."
