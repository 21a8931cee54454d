"""What a package computes: a RankingModel as one traceable function of token ids, nothing read on the host.

A user's token ids are its row ``[context | item, action, … | candidates]``, a cached prefix cut off. What kind a token
is, and its position, follow from its place in the row, so that ids and lengths are all there is to pass.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from recexp.layers import Attention, attention_backends
from recexp.layers.attention import KV, AttentionCall, AttentionRequest, choose, refusal
from recexp.layers.head import Head
from recexp.layers.jagged import row_users
from recexp.layers.sequence import SequenceStage
from recexp.metadata import KVMetadata
from recexp.model import RankingModel

METADATA = [field.name for field in fields(KVMetadata) if field.name != "buffer"]
EXPORTABLE = ("triton", "gather", "paged")  # by speed; no length is a Python number in them


def exportable_backend(model: RankingModel, page_size: int | None) -> tuple[str, str]:
    """(backend, why): what the package attends with, and why it is another than the model's own; "" if it is not.

    Raises ValueError where the model's own backend refuses.
    """
    attention = next((m for m in model.backbone.modules() if isinstance(m, Attention)), None)
    if attention is None:  # layers that do without
        return "none", ""
    weight, shape = model.sequence.item_embedding.weight, (model.config.num_heads, model.config.head_dim)
    request = AttentionRequest(attention.weighting, weight.device, weight.dtype, *shape, page_size)
    wanted = choose(model.config.attention_backend, request)
    if wanted in EXPORTABLE:
        return wanted, ""
    why = f"{wanted!r} is not registered as an operator"
    if not attention_backends[wanted].capturable:
        why = f"{wanted!r} reads lengths on the host, where an export would fix them"
    if request.device.type == "cuda" and not (reason := refusal("triton", request)):
        return "triton", why
    return "gather", f"{why}; 'triton' {'runs on CUDA' if request.device.type == 'cpu' else f'refuses: {reason}'}"


def of_fields(tensors: list[Tensor]) -> KVMetadata:
    """Metadata of its fields alone, not laid out in one buffer."""
    return KVMetadata(**dict(zip(METADATA, tensors, strict=True)), buffer=tensors[0])


@torch.library.custom_op(
    "recexp::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor seq_offsets, Tensor num_candidates, str weighting, float alpha, "
    "float scaling_seqlen, Tensor? table, Tensor[] metadata) -> Tensor",
)
def attention_operator(*args: Any) -> Tensor:
    """Backend ``triton`` as an operator, called by a package with its inputs as they are; arguments as in ``attend``.

    metadata: the fields of KVMetadata in their order, [] without a table. Tiles and splits are chosen at every call.
    """
    *call, table, fields = args
    kv = None if table is None else (table, of_fields(fields))
    return attention_backends["triton"].run(AttentionCall(*call, kv=kv))  # type: ignore[misc]


@attention_operator.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class ExportedAttention(nn.Module):
    """``Attention`` without the checks that read lengths on the host."""

    def __init__(self, attention: Attention, backend: str) -> None:
        super().__init__()
        self.settings = attention.weighting, attention.alpha, attention.scaling_seqlen or 1.0
        self.backend = backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor, num_candidates: Tensor,
        max_seqlen: int | None = None, kv: KV | None = None,
    ) -> Tensor:  # fmt: skip
        rows = q, k, v, seq_offsets, num_candidates
        if self.backend == "triton":
            table, metadata = (None, []) if kv is None else (kv[0], [getattr(kv[1], name) for name in METADATA])
            return torch.ops.recexp.attention(*rows, *self.settings, table, metadata)
        return attention_backends[self.backend].run(AttentionCall(*rows, *self.settings, kv=kv))


class ExportedRanker(nn.Module):
    """A copy of the model's weights behind a forward that can be exported; attention by ``backend``, layers unfused."""

    def __init__(self, model: RankingModel, backend: str) -> None:
        super().__init__()
        self.sequence: SequenceStage = copy.deepcopy(model.sequence)
        self.backbone = copy.deepcopy(model.backbone)
        self.head: Head = copy.deepcopy(model.head)
        for name, module in list(self.backbone.named_modules()):
            if isinstance(module, Attention):
                self.backbone.set_submodule(name, ExportedAttention(module, backend))
            elif getattr(module, "fused", False):
                module.fused = False
        self.eval().requires_grad_(False)

    def forward(
        self, token_ids: Tensor, seq_offsets: Tensor, num_candidates: Tensor, candidate_rows: Tensor,
        tables: list[Tensor], metadata: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """Logits [N, num_tasks] of the rows candidate_rows, int64 [N].

        token_ids: int64 [T]; seq_offsets int32 [B+1]; num_candidates int32 [B]. tables: one a layer, appended to, and
        metadata: KVMetadata's fields; or both [].
        """
        kv = of_fields(metadata) if metadata else None
        user = row_users(token_ids.shape[0], seq_offsets)
        new = seq_offsets.diff() - num_candidates  # [B] history tokens of this call
        history = kv.total_history_lengths if kv else new
        position = torch.arange(token_ids.shape[0], device=user.device) + (history - new - seq_offsets[:-1])[user]
        x = embed(self.sequence, token_ids, position, history[user])
        for i, layer in enumerate(self.backbone.layers):
            x = layer(x, seq_offsets, num_candidates, None, (tables[i], kv) if kv else None)
        return self.head(x[candidate_rows])


def embed(stage: SequenceStage, token_ids: Tensor, position: Tensor, history: Tensor) -> Tensor:
    """[T, D]: what ``SequenceStage`` computes. position, history: int [T], in the whole sequence, and its history."""
    context = position < len(stage.features)
    action = is_action(position, history, len(stage.features))
    item = ~(context | action)
    x = stage.item_mlp(stage.item_embedding(token_ids.where(item, 0)))
    x = torch.where(action[:, None], stage.action_embedding(token_ids.where(action, 0)), x)
    if stage.features:
        rows = torch.zeros_like(x[:, :1])  # [T, 1], then [T, E]
        for i, table in enumerate(stage.context_embedding):
            here = position == i
            rows = torch.where(here[:, None], table(token_ids.where(here, 0)), rows)
        x = torch.where(context[:, None], stage.context_mlp(rows), x)
    return x * stage.scale + stage.position_embedding(torch.minimum(position, history))


def is_action(position: Tensor, history: Tensor, num_context: int) -> Tensor:
    """Which tokens are actions: every second one of the pairs."""
    return (position >= num_context) & (position < history) & ((position - num_context) % 2 == 1)
