"""The head: L2-normalised candidate rows through an MLP to one logit a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import normalize

from recexp.layers.linear import Linear

if TYPE_CHECKING:
    from recexp.config import ModelConfig


class Head(nn.Module):
    """[N, hidden_size] → logits [N, num_tasks]. The norm is clamped at 1e-6, so that a zero row stays zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = config.hidden_size
        for size in config.head_sizes:
            layers += [Linear(width, size), nn.ReLU(), nn.Dropout(config.dropout)]
            width = size
        self.mlp = nn.Sequential(*layers, Linear(width, config.num_tasks))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(normalize(x, dim=-1, eps=1e-6))
