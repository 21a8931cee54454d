"""Arithmetic whose rows do not depend on where they stand.

A BLAS computes the last rows of a matrix, and rows at odd addresses, by other code than the rest, and vectorised
functions end in a scalar tail; rounding differs, so in float64 the same row would give another result at another
position, and permuting candidates would change their scores in the last bit. Whole, aligned tiles have none of that, so
in float64, the dtype of references, tensors are padded to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

ROW_TILE, COLUMN_TILE = 64, 8  # multiples of what BLAS libraries and vector units use for float64


def whole_tiles(x: Tensor, row_tile: int = ROW_TILE) -> Tensor:
    """x [T, …, D] with zeros behind: T up to a multiple of ``row_tile``, D to one of COLUMN_TILE."""
    padding = [0, -x.shape[-1] % COLUMN_TILE, *[0, 0] * (x.ndim - 2), 0, -x.shape[0] % row_tile]
    return pad(x, padding) if any(padding) else x


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [T, D], in float64 on whole tiles."""
    return function(whole_tiles(x))[: x.shape[0], : x.shape[1]] if x.dtype == torch.float64 else function(x)


class Linear(nn.Linear):
    """nn.Linear on [T, in]; in float64 every row's result is independent of its position."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return super().forward(x)
        y = linear(whole_tiles(x), whole_tiles(self.weight))
        y = y[: x.shape[0], : self.out_features]
        return y if self.bias is None else y + self.bias


class GELU(nn.GELU):
    """nn.GELU on [T, D], in float64 on whole tiles."""

    def forward(self, x: Tensor) -> Tensor:
        return rowwise(super().forward, x)
