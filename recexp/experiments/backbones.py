"""What compare_backbones makes of its measurements: size, trade-offs, and the run in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch.autograd.functional import jacobian

from recexp.batch import TokenBatch
from recexp.config import MeasureConfig, ModelConfig
from recexp.data.interactions import Interactions
from recexp.data.requests import Requests, make_batch
from recexp.experiments.measure import request_flops
from recexp.layers.backbone import Backbone
from recexp.model import RankingModel

MEMORY = "bytes of weights and 1,000 cached users"
TIE = 0.01  # of AUC or GAUC: about what another seed changes


def check_rule(name: str, config: ModelConfig) -> None:
    """ValueError where the layers of models.<name> break the rule that holds for every backbone: [T, D] in and out; a
    history token sees itself and what came before it, a candidate the history and itself; nobody another user. What a
    row sees are the rows that it has a gradient of."""
    offsets, candidates = torch.tensor([0, 6, 9], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    allowed = torch.block_diag(torch.ones(6, 6), torch.ones(3, 3)).tril().bool()
    allowed[:, [4, 5, 8]] = torch.eye(9).bool()[:, [4, 5, 8]]
    x, mix = torch.randn(10, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).split(
        (9, 1)
    )
    try:
        layers = Backbone(config).double().eval()
        seen = jacobian(lambda x: layers(TokenBatch(x, offsets, candidates, 6)) @ mix[0], x).norm(dim=-1)  # [T, T]
    except Exception as error:
        raise ValueError(
            f"models.{name}: the layer {config.backbone} fails: {type(error).__name__}: {error}"
        ) from error
    if seen.shape != allowed.shape or not seen.isfinite().all():
        raise ValueError(f"models.{name}: of 9 rows the layer {config.backbone} must make 9, of finite numbers")
    if len(wrong := ((seen > 0) & ~allowed).nonzero()):
        tokens = [f"history token {i}" for i in range(4)] + ["candidate 0", "candidate 1"]
        tokens += [f"{token} of the next user" for token in (*tokens[:2], tokens[4])]
        row, other = (tokens[i] for i in wrong[0])
        raise ValueError(f"models.{name}: the layer {config.backbone} lets {row} see {other}; mask it")


def sizes(models: Mapping[str, RankingModel], latency: pd.DataFrame, config: MeasureConfig) -> pd.DataFrame:
    """What each model costs: parameters in all and in the layers, FLOPs of a request, KV bytes of a token (none where
    ``latency`` has cached requests refused), and memory of weights and 1,000 cached users, in the dtype of latency."""
    pairs, itemsize = max(config.history_pairs), getattr(torch, latency["dtype"].iloc[0]).itemsize
    rows = []
    for name, model in models.items():
        shape, history = model.config, len(model.config.context) + 2 * pairs
        cached = latency[(latency["backbone"] == name) & (latency["tier"] != "none")]
        kv_bytes = 2 * shape.num_layers * shape.num_heads * shape.head_dim * itemsize * any(cached["status"] == "ok")
        count, layers = (sum(p.numel() for p in part.parameters()) for part in (model, model.backbone))
        flops = request_flops(model, 0, history, config.num_candidates)
        row = {"model": name, "parameters": count, "parameters in layers": layers}
        row |= {f"FLOPs of a request ({pairs} pairs, {config.num_candidates} candidates)": flops}
        row |= {"KV cache, bytes per token": kv_bytes, MEMORY: count * itemsize + 1000 * history * kv_bytes}
        rows.append(row)
    return pd.DataFrame(rows)


def example_tokens(
    interactions: Interactions, requests: Requests, num_pairs: int = 4, num_candidates: int = 4
) -> list[tuple[str, str]]:
    """The newest tokens of one request as (kind, text), for ``plot_data``."""
    row = int(np.argmax(requests.end - requests.split))
    batch, _ = make_batch(interactions, requests.select([row]))
    start = max(0, batch.item_ids.shape[0] - num_pairs)
    tokens = []
    for item, action in zip(batch.item_ids[start:].tolist(), batch.action_ids[start:].tolist(), strict=True):
        tokens.append(("item", f"item\n{interactions.item_keys[item]}"))
        tokens.append(("action", f"rated\n{interactions.action_values[action]:g}"))
    candidates = batch.candidate_ids[:num_candidates].tolist()
    return tokens + [("candidate", f"item\n{interactions.item_keys[item]}?") for item in candidates]


def largest(latency: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest batch with the longest history, with what a path is called."""
    rows = latency[latency["batch_size"] == latency["batch_size"].max()]
    rows = rows[rows["history_pairs"] == rows["history_pairs"].max()]
    return rows.assign(path=rows["mode"] + ", tier " + rows["tier"])


def tradeoffs(
    models: Mapping[str, RankingModel], quality: pd.DataFrame, latency: pd.DataFrame, size: pd.DataFrame
) -> pd.DataFrame:
    """A row a model and path at the largest point, for ``plot_tradeoffs``: model, its layer, path, times, the first
    task's AUC, memory in MB."""
    first = quality[(quality["task"] == quality["task"].iloc[0]) & (quality["metric"] == "AUC")]
    auc, memory = first.set_index("model")["value"], size.set_index("model")[MEMORY] / 1e6
    frame = largest(latency)[["backbone", "path", "p10_ms", "p50_ms", "p90_ms"]].rename(columns={"backbone": "model"})
    frame.insert(1, "layer", frame["model"].map({name: model.config.backbone for name, model in models.items()}))
    return frame.assign(AUC=frame["model"].map(auc), MB=frame["model"].map(memory))


def summarise(quality: pd.DataFrame, latency: pd.DataFrame, size: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row a model (quality of the first task, medians of the largest point, size), and sentences about it."""
    first = quality[quality["task"] == quality["task"].iloc[0]]
    table = first.pivot_table(index="model", columns="metric", values="value", sort=False)
    timed = largest(latency)
    p50 = timed.pivot(index="backbone", columns="path", values="p50_ms").astype("Float64").add_prefix("p50 ms, ")
    models: list[str] = size["model"].tolist()
    plain = table.drop([*models, "random"])
    said = []
    for metric in ("AUC", "GAUC"):
        best, rival = table[metric][models].idxmax(), "ridge bias model"
        gap = table[metric][best] - plain[metric][rival]
        verdict = "is ahead of" if gap > TIE else "stays behind" if gap < -TIE else "only ties with"
        reached = ", ".join(f"{m} reaches {table[metric][m]:.3f}" for m in models)
        others = f"{plain[metric][rival]:.3f}; item mean {plain[metric]['item mean']:.3f}"
        said.append(f"by {metric} {reached}, and {best} {verdict} the {rival} ({others})")
    lead, beaten = plain["AUC"].idxmax(), table["AUC"][models].max() < plain["AUC"].max()
    small = ": so small a set does not show what a sequence model is for" if beaten else ""
    task = first["task"].iloc[0]
    sentences = [f"On {task!r}, {'; '.join(said)}. The best plain model is {lead} ({plain['AUC'].max():.3f}){small}."]
    point = f"{timed['batch_size'].iloc[0]} users and {timed['history_pairs'].iloc[0]} pairs"
    for path, where in (("none", "without a cache"), ("device", "with all but the newest pairs cached on the device")):
        rows = timed[(timed["tier"] == path) & (timed["mode"] == "eager")]
        sentences.append(_compare_times(rows, f"{point}, {where}, on {rows['device'].iloc[0]}"))
    return table.join(p50).join(size.set_index("model").astype("Int64")), sentences


def _compare_times(rows: pd.DataFrame, point: str) -> str:
    """Who is faster, where the spreads leave no doubt; rows: one a backbone."""
    parts, times = [], rows[rows["p50_ms"].notna()].set_index("backbone")[["p10_ms", "p50_ms", "p90_ms"]].astype(float)
    parts += [f"{name} in {p50:.2f} ms ({p10:.2f} to {p90:.2f})" for name, (p10, p50, p90) in times.T.items()]
    parts += [f"{row['backbone']} not ({row['status']})" for row in rows.to_dict("records") if row["status"] != "ok"]
    said = f"At {point}: {', '.join(parts)}"
    if len(times) < 2:
        return f"{said}."
    times = times.sort_values("p50_ms")
    fast, slow = times.iloc[0], times.iloc[-1]
    if fast["p90_ms"] >= slow["p10_ms"]:
        return f"{said}; the spreads overlap, so none is called faster."
    return f"{said}; {fast.name} is {slow['p50_ms'] / fast['p50_ms']:.1f} times as fast as {slow.name}."
