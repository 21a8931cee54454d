"""The ranking model: embeddings → sequence stage → backbone → head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from recexp import checkpoint, devices
from recexp.batch import SequenceBatch, offsets
from recexp.cache import PagedKVCache
from recexp.cache.embeddings import EmbeddingStore, lookup_features
from recexp.config import GraphConfig, ModelConfig
from recexp.graphs import GraphedModel
from recexp.layers import Backbone, attention_backends, backbones
from recexp.layers.head import Head
from recexp.layers.sequence import SequenceStage, TokenLayout, context_ids, history_ids, token_layout


class RankingModel(nn.Module):
    """Scores the candidates of each request, one logit a task.

    Weights are drawn on the CPU in float32 from ``config.seed``, so every device and dtype starts from the same ones.
    Raises ValueError for an unknown backbone or attention backend, and for CUDA where there is none.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_names(config)  # before any work
        device = devices.resolve(str(device or "cpu"))
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.sequence = SequenceStage(config)
            self.backbone = Backbone(config)
            self.head = Head(config)
        self.cache: PagedKVCache | None = None
        self.graphs: GraphedModel | None = None
        self.stores: dict[str, EmbeddingStore] = {}
        self.to(device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.sequence.item_embedding.weight.device

    def check(self, batch: SequenceBatch) -> None:
        """Raise ValueError, naming row, value and limit, for ids outside the tables or too many candidates."""
        config = self.config
        if (over := (batch.num_candidates > config.max_candidates).nonzero()).numel():
            row = int(over[0])
            raise ValueError(
                f"row {row} has {int(batch.num_candidates[row])} candidates; the model's max_candidates is "
                f"{config.max_candidates}: split the request or raise max_candidates"
            )
        rows = offsets(torch.ones(batch.batch_size, dtype=torch.int64))
        pairs, candidates = offsets(batch.num_pairs), offsets(batch.num_candidates)
        limits = {"item": (config.num_items, "num_items"), "action": (config.num_actions, "num_actions")}
        limits |= {f"context.{feature}": (num, f"context.{feature}") for feature, num in config.context.items()}
        limits |= {name: (store.num_rows, f"the {name} store's num_rows") for name, store in self.stores.items()}
        _check_range("item_ids", batch.item_ids, *limits["item"], pairs)
        _check_range("candidate_ids", batch.candidate_ids, *limits["item"], candidates)
        _check_range("action_ids", batch.action_ids, *limits["action"], pairs)
        for feature in config.context:
            limit = limits[f"context.{feature}"]
            _check_range(f"context feature {feature!r}", context_ids(batch, feature), *limit, rows)

    def forward(self, batch: SequenceBatch, rows: Literal["candidates", "items"] = "candidates") -> Tensor:
        """Logits [N, num_tasks]: of the candidates, or of every item token, history first, user after user.

        An item token of the history comes before its action and sees none of it, so its row is what the row of the
        first candidate would be. Histories longer than the maximum are cut to their window first.
        """
        if rows not in ("candidates", "items"):
            raise ValueError(f"rows {rows!r}; known: candidates, items")
        self.check(batch)
        batch = batch.windowed(self.config.max_history_pairs, self.config.window_hop or 1)
        layout = token_layout(batch, len(self.config.context))
        tokens = self.sequence(batch.to(self.device), layout, self._rows(batch, layout))
        x = self.backbone(tokens)
        return self.head(x[_index(layout.is_candidate if rows == "candidates" else layout.is_item, x.device)])

    def predict(self, batch: SequenceBatch) -> Tensor:
        """Logits [sum(num_candidates), num_tasks], in the batch's order, without gradients or dropout."""
        with evaluating(self):
            return self(batch)

    def use_stores(self, stores: Mapping[str, EmbeddingStore]) -> None:
        """Take rows from these stores from now on, by table ("item", "action", "context.<feature>"); {}: from none.

        Ids then reach as far as the store, whatever the configuration says. A store has no gradients: train without.
        Raises ValueError for an unknown table and for a store of another width.
        """
        widths = {name: table.embedding_dim for name, table in self.sequence.tables.items()}
        for name, store in stores.items():
            if widths.get(name) != store.dim:
                raise ValueError(f"store {name!r} has width {store.dim}; the model's tables and widths are {widths}")
        self.stores = dict(stores)

    def _rows(self, batch: SequenceBatch, layout: TokenLayout) -> dict[str, Tensor]:
        """Rows of the tables that have a store. A GPU looks them up while the host goes on to prepare metadata."""
        if not self.stores:
            return {}
        if self.training:
            raise ValueError("rows from stores have no gradients: call use_stores({}) before training")
        index = (torch.from_numpy(i).to(batch.item_ids.device) for i in (layout.item_index, layout.action_index))
        rows = lookup_features(self.stores, self.sequence.ids(batch, *index), self.device)
        return {name: found.to(self.sequence.item_embedding.weight.dtype) for name, found in rows.items()}

    def make_cache(self, *, num_pages: int, page_size: int, **options: Any) -> PagedKVCache:
        """Give the model an empty paged KV cache, for ``predict_cached``; options are PagedKVCache's. Returns it."""
        config, weight = self.config, self.sequence.item_embedding.weight
        self.graphs = None
        self.cache = PagedKVCache(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            max_history_length=config.max_history_tokens,
            device=weight.device,
            **options,
        )
        return self.cache

    def make_graphs(self, config: GraphConfig | None = None, **options: Any) -> GraphedModel:
        """Capture the layers and the head over the model's cache, for ``predict_cached``; options are GraphedModel's.

        The cache sets ``graphs.num_capture_pages(config.buckets(model.config), page_size)`` pages aside for it; what it
        holds of users stays as it is. Segmented if the cache has a host tier. Without CUDA nothing is captured and the
        same buffers are used eagerly. Raises ValueError without a cache, and as GraphedModel does; the model then has
        no graphs and works without.
        """
        if self.cache is None:
            raise ValueError("the model has no cache; call make_cache(..., num_capture_pages=...) first")
        config = config or GraphConfig()
        options = {"segmented": self.cache.host.chunks.num_pages > 0, "eager_fallback": config.eager_fallback} | options
        self.graphs = None
        with evaluating(self):
            self.graphs = GraphedModel(
                self.backbone,
                self.head,
                self.config,
                self.cache.tables,
                self.cache.capture_pages,
                config.buckets(self.config),
                **options,
            )
        return self.graphs

    def predict_cached(self, batch: SequenceBatch, user_ids: Tensor | None = None) -> Tensor:
        """``predict`` that computes only what the model's cache does not hold; afterwards it holds these histories.

        user_ids: integers [B] the cache knows the users by, batch.user_ids unless given; each at most once. Ids of the
        batch are best on the CPU, where they are compared with what is cached. Changed weights empty the cache, except
        changes through ``.data``, which PyTorch does not count: call ``cache.clear()`` after those.
        Raises, with the cache unchanged, ValueError for bad input and OutOfPages for a batch the cache cannot hold.
        With graphs (``make_graphs``) also ValueError for weights that have moved, and for a request that no bucket
        holds; users evicted for that one stay evicted.
        """
        if self.cache is None:
            raise ValueError("the model has no cache; call make_cache(num_pages=..., page_size=...) first")
        num_context = len(self.config.context)
        with evaluating(self):
            self.check(batch)
            batch = batch.windowed(self.config.max_history_pairs, self.config.window_hop or 1)
            users = (batch.user_ids if user_ids is None else user_ids).tolist()
            version: list[object] = [(p.data_ptr(), p._version) for p in self.parameters()]
            version += [(name, store.version) for name, store in self.stores.items()]
            if self.graphs and self.graphs.weights != [p.data_ptr() for p in self.graphs.parameters()]:
                raise ValueError("the weights lie elsewhere than when the graphs were captured: call make_graphs again")
            history = history_ids(batch, list(self.config.context))
            with self.cache.request(users, history, weights_version=tuple(version)) as plan:
                layout = token_layout(batch, num_context, plan.reused)
                static = self.graphs.fit(len(users), int(layout.seq_offsets[-1])) if self.graphs else None
                tokens = self.sequence(batch.to(self.device), layout, self._rows(batch, layout))
                if self.graphs and static:
                    metadata = plan.metadata(layout.num_candidates, static.capacity)
                    return self.graphs.replay(static, tokens.values, metadata, plan.wait)
                metadata = plan.metadata(layout.num_candidates).to(self.device)
                x = self.backbone(tokens, self.cache.tables, metadata, plan.wait)
                return self.head(x[_index(layout.is_candidate, x.device)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RankingModel:
        """What ``to`` and ``half`` call: the new weights may lie where the old ones did, so forget what is cached."""
        self.graphs = None
        if self.cache is not None:
            self.cache.clear()
        return super()._apply(fn, recurse)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RankingModel:
        """A model from a checkpoint folder, in float32 or converted to dtype; see ``recexp.checkpoint``."""
        model = cls(checkpoint.load_config_of(folder), device, dtype)
        checkpoint.load_weights(model, model.config, folder, convert=dtype is not None)
        return model

    def save(self, folder: str | Path) -> Path:
        """Write the weights and the configuration to a checkpoint folder; returns the weights' path."""
        return checkpoint.save(self, self.config, folder)


@register_optimizer_step_post_hook
def _count_fused_steps(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """PyTorch does not count the changes of a fused optimizer, and ``predict_cached`` goes by the count."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


def check_names(config: ModelConfig) -> None:
    """Raise ValueError, with the nearest known name, for an unknown backbone or attention backend."""
    backbones[config.backbone]
    if config.attention_backend != "auto":
        attention_backends[config.attention_backend]


def _index(mask: NDArray[np.bool_], device: torch.device) -> Tensor:
    """Row numbers of a host mask, on the device."""
    return torch.from_numpy(np.flatnonzero(mask)).to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode, dropout off; the model's own mode comes back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def _check_range(name: str, ids: Tensor, limit: int, limit_name: str, row_offsets: Tensor) -> None:
    wrong = (ids < 0) | (ids >= limit)
    if not bool(wrong.any()):
        return
    index = int(wrong.nonzero()[0])
    row = int(torch.searchsorted(row_offsets, index, right=True)) - 1
    raise ValueError(f"{name} of row {row} holds {int(ids[index])}; {limit_name} is {limit}: ids are 0 to {limit - 1}")
