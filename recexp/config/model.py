"""The configuration of a ranking model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from recexp.config.base import Count, Fraction, Positive, Seed, Strict


class ModelConfig(Strict):
    """A ranking model: embedding tables, sequence stage, a stack of backbone layers, a multi-task head.

    ``num_positions`` and ``window_hop`` are filled in when absent, so that a saved configuration is complete.
    """

    kind: Literal["model"] = "model"
    backbone: str = "hstu"
    num_items: Count
    num_actions: Count = 6
    context: dict[str, Count] = {}  # feature name -> number of ids; "user_id" reads the batch's user ids
    embedding_size: Count | None = None  # of item and context tables; other than hidden_size it needs mlp_size
    mlp_size: Count | None = None  # hidden width of the item and context MLPs; None: no projection
    hidden_size: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    head_dim: Count = 32
    ffn_size: Count | None = None  # Transformer only; None: 4 * hidden_size
    residual: bool = True
    scaling_seqlen: Positive = 20.0  # N of SiLU attention, the same on every path
    max_history_pairs: Count = 100
    window_hop: Count | None = None  # pairs by which the window of a long history moves; None: a quarter of the maximum
    max_candidates: Count = 256
    num_positions: Count | None = None  # rows of the position table; None: maximum history tokens + 1
    num_tasks: Count = 2
    head_sizes: list[Count] = [64]
    dropout: Fraction = 0.0  # on embeddings, in layers and in the head, while training
    item_id_dropout: Fraction = 0.0  # whole item embeddings dropped while training, so that ids alone do not overfit
    embedding_std: Positive = 0.02
    attention_backend: str = "auto"  # the fastest that takes the request, or a name of `recexp list`
    fused_layers: bool = False  # HSTU without gradients: five kernels a layer (recexp.layers.fused)
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        pairs = values.get("max_history_pairs", cls.model_fields["max_history_pairs"].default)
        if isinstance(pairs, int) and values.get("window_hop") is None:
            values["window_hop"] = max(1, pairs // 4)
        if isinstance(pairs, int) and values.get("num_positions") is None:
            values["num_positions"] = max(1, len(values.get("context") or {}) + 2 * pairs + 1)
        return values

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        if (self.num_positions or 0) < self.max_history_tokens + 1:
            raise ValueError(
                f"num_positions {self.num_positions} is below {self.max_history_tokens + 1}: the maximum history of "
                f"{self.max_history_tokens} tokens ({len(self.context)} context + 2 x {self.max_history_pairs} pairs) "
                "and one row for candidates; raise num_positions or lower max_history_pairs"
            )
        if (self.window_hop or 1) > self.max_history_pairs:
            raise ValueError(
                f"window_hop {self.window_hop} exceeds max_history_pairs {self.max_history_pairs}; lower window_hop"
            )
        if self.embedding_size not in (None, self.hidden_size) and self.mlp_size is None:
            raise ValueError(
                f"embedding_size {self.embedding_size} differs from hidden_size {self.hidden_size}, and no MLP "
                "projects it; set mlp_size or leave embedding_size out"
            )
        return self

    @property
    def max_history_tokens(self) -> int:
        """Context tokens and two tokens a pair: the longest history of one user."""
        return len(self.context) + 2 * self.max_history_pairs
