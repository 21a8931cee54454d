"""A backbone: a registered layer, stacked. A new one is a file with a registered function and a line in __init__."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from recexp.batch import TokenBatch
from recexp.layers.paged_kv import OnePass
from recexp.metadata import KVMetadata
from recexp.registry import Registry

if TYPE_CHECKING:
    from recexp.config import ModelConfig

LayerBuilder = Callable[["ModelConfig"], nn.Module]
backbones: Registry[LayerBuilder] = Registry("backbone")


def register_backbone(name: str) -> Callable[[LayerBuilder], LayerBuilder]:
    """Decorator of a function that builds one layer from a ModelConfig.

    The layer's call is ``layer(x [T, D], seq_offsets, num_candidates, max_seqlen, kv) → [T, D]``; see HSTULayer.
    """

    def register(build: LayerBuilder) -> LayerBuilder:
        backbones.add(name, build)
        return build

    return register


class Backbone(nn.Module):
    """``config.num_layers`` layers of ``config.backbone``, one after the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        build = backbones[config.backbone]
        self.layers = nn.ModuleList(build(config) for _ in range(config.num_layers))

    def forward(
        self,
        tokens: TokenBatch,
        tables: Sequence[Tensor] | None = None,
        metadata: KVMetadata | None = None,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> Tensor:
        """[T, D] → [T, D]. tables: one paged table a layer; before_layer(i): waits for layer i's pages."""
        x, offsets = tokens.values, tokens.seq_offsets
        if tables is not None and metadata is not None:
            metadata = OnePass.of(metadata, offsets, x.shape[0], tables[0].shape[2])
        for i, layer in enumerate(self.layers):
            before_layer(i)
            kv = None if tables is None or metadata is None else (tables[i], metadata)
            x = layer(x, offsets, tokens.num_candidates, tokens.max_seqlen, kv)
        return x
