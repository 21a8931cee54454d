"""From ids to tokens and back: interleaving, context, positions, and the candidates' rows.

``token_layout`` plans on the host which embedding goes where, a cached prefix of any length left out;
``SequenceStage`` looks the embeddings up, projects them if configured and adds positions:

    x * sqrt(D) + P[min(position, h)]      h: the user's total history length, cached prefix included
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recexp.batch import SequenceBatch, TokenBatch
from recexp.layers.linear import Linear

if TYPE_CHECKING:
    from recexp.config import ModelConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of a batch come from, on the host. T tokens remain after the cached prefixes are cut off.

    context_index: [n_context] into the features' ids laid out [B, C]; item_index: [n_items] into item_ids followed by
    candidate_ids; action_index: [n_actions] into action_ids. order: [T], the row of each token in
    [context, item, action] embeddings put one behind the other. positions: [T], min(position, h).
    is_item, is_candidate: bool [T]. seq_offsets: [B+1]. num_candidates: [B].
    """

    context_index: Ints
    item_index: Ints
    action_index: Ints
    order: Ints
    positions: Ints
    is_item: NDArray[np.bool_]
    is_candidate: NDArray[np.bool_]
    seq_offsets: Ints
    num_candidates: Ints
    max_seqlen: int


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)])


def token_layout(batch: SequenceBatch, num_context: int, cached: Ints | None = None) -> TokenLayout:
    """Plan the tokens of ``batch`` behind ``cached`` [B] history tokens a user (None: nothing is cached).

    Raises ValueError where a cached prefix is longer than the user's history.
    """
    num_pairs, num_candidates = batch.num_pairs.numpy(), batch.num_candidates.numpy()
    history = num_context + 2 * num_pairs
    start = np.zeros_like(history) if cached is None else np.asarray(cached, dtype=np.int64)
    if (wrong := np.flatnonzero((start < 0) | (start > history))).size:
        row = int(wrong[0])
        raise ValueError(
            f"cached prefix of row {row} is {start[row]} tokens; its history has {history[row]}: "
            f"pass 0 to {history[row]}"
        )
    lengths = history + num_candidates - start
    seq_offsets = _offsets(lengths)
    user = np.repeat(np.arange(batch.batch_size), lengths)
    position = np.arange(len(user)) - seq_offsets[user] + start[user]  # in the whole sequence
    h = history[user]
    is_context, is_candidate = position < num_context, position >= h
    is_pair = ~is_context & ~is_candidate
    is_action = is_pair & ((position - num_context) % 2 == 1)  # the parity of position − context decides
    is_item = ~is_context & ~is_action
    pair = _offsets(num_pairs)[user] + (position - num_context) // 2
    candidate = _offsets(num_candidates)[user] + position - h
    order = np.empty(len(user), dtype=np.int64)
    sources = [np.flatnonzero(is_context), np.flatnonzero(is_item), np.flatnonzero(is_action)]
    order[np.concatenate(sources)] = np.arange(len(user))
    return TokenLayout(
        context_index=(user * num_context + position)[is_context],
        item_index=np.where(is_candidate, num_pairs.sum() + candidate, pair)[is_item],
        action_index=pair[is_action],
        order=order,
        positions=np.minimum(position, h),
        is_item=is_item,
        is_candidate=is_candidate,
        seq_offsets=seq_offsets,
        num_candidates=num_candidates,
        max_seqlen=int(lengths.max(initial=0)),
    )


class Projection(nn.Sequential):
    """Two-layer MLP with ReLU between, from a table's width to the model's."""

    def __init__(self, embedding_size: int, mlp_size: int, hidden_size: int) -> None:
        super().__init__(Linear(embedding_size, mlp_size), nn.ReLU(), Linear(mlp_size, hidden_size))


class SequenceStage(nn.Module):
    """Embedding tables, projections, interleaving and positions: SequenceBatch → TokenBatch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.features = list(config.context)
        width = config.embedding_size or config.hidden_size
        self.item_embedding = nn.Embedding(config.num_items, width)
        self.action_embedding = nn.Embedding(config.num_actions, config.hidden_size)
        self.context_embedding = nn.ModuleList(nn.Embedding(num, width) for num in config.context.values())
        self.item_mlp = Projection(width, config.mlp_size, config.hidden_size) if config.mlp_size else nn.Identity()
        self.context_mlp = Projection(width, config.mlp_size, config.hidden_size) if config.mlp_size else nn.Identity()
        self.position_embedding = nn.Embedding(config.num_positions or 1, config.hidden_size)
        for table in self.modules():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=config.embedding_std)
        self.scale = config.hidden_size**0.5
        self.item_id_dropout = config.item_id_dropout
        self.dropout = nn.Dropout(config.dropout)

    @property
    def tables(self) -> dict[str, nn.Embedding]:
        """The tables of ids by name: item, action, and ``context.<feature>``."""
        context = zip(self.features, cast("list[nn.Embedding]", self.context_embedding), strict=True)
        return {"item": self.item_embedding, "action": self.action_embedding} | {f"context.{f}": t for f, t in context}

    def ids(self, batch: SequenceBatch, item_index: Tensor, action_index: Tensor) -> dict[str, Tensor]:
        """The ids that each table is asked for: item [n_items], action [n_actions], of every context feature [B]."""
        items = torch.cat([batch.item_ids, batch.candidate_ids])[item_index]
        context = {f"context.{feature}": context_ids(batch, feature) for feature in self.features}
        return {"item": items, "action": batch.action_ids[action_index]} | context

    def forward(
        self, batch: SequenceBatch, layout: TokenLayout, rows: Mapping[str, Tensor] | None = None
    ) -> TokenBatch:
        """Tokens of ``batch`` as ``layout`` plans them, on the device of the tables; candidates last for each user.

        rows: those of ``ids`` that somebody else has looked up; the others come from the stage's own tables.
        """
        device = self.item_embedding.weight.device
        context_index, item_index, action_index, order, positions = _send(
            device, layout.context_index, layout.item_index, layout.action_index, layout.order, layout.positions
        )
        ids, given = self.ids(batch, item_index, action_index), rows or {}
        found = {name: given[name] if name in given else table(ids[name]) for name, table in self.tables.items()}
        items, actions, *context = found.values()
        if self.training and self.item_id_dropout:
            items = items * (torch.rand(len(items), 1, device=device) >= self.item_id_dropout)
        parts = [self.item_mlp(items), actions]
        if context:
            parts.insert(0, self.context_mlp(torch.stack(context, dim=1).flatten(0, 1)[context_index]))  # of [B, C, D]
        values = torch.cat(parts)[order] * self.scale + self.position_embedding(positions)
        seq_offsets, num_candidates = _send(device, layout.seq_offsets, layout.num_candidates)
        return TokenBatch(self.dropout(values), seq_offsets.int(), num_candidates.int(), layout.max_seqlen)


def context_ids(batch: SequenceBatch, feature: str) -> Tensor:
    """The ids [B] of a context feature; "user_id" is in every batch."""
    if feature in batch.context_ids:
        return batch.context_ids[feature]
    if feature == "user_id":
        return batch.user_ids
    raise ValueError(
        f"the batch has no context_ids[{feature!r}], which the model's configuration asks for; add it to the batch"
    )


def history_ids(batch: SequenceBatch, features: list[str]) -> list[Ints]:
    """The token ids of every user's history, in order: context, then item, action, …; int64 [h] each, on the host."""
    context = [context_ids(batch, feature).cpu().numpy() for feature in features]
    pairs = torch.stack([batch.item_ids, batch.action_ids], dim=1).cpu().numpy().astype(np.int64)
    ends = np.cumsum(batch.num_pairs.numpy())
    rows = np.split(pairs, ends[:-1]) if len(ends) else []
    return [np.concatenate([[c[i] for c in context], row.ravel()]).astype(np.int64) for i, row in enumerate(rows)]


def _send(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Index arrays to the device in one copy."""
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return joined.split([len(a) for a in arrays])
