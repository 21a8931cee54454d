"""Matrix products whose rows do not depend on where they stand.

A BLAS computes the last rows of a matrix by other code than the rest, with other rounding: in float64 the same row then
gives another result at another position, and permuting candidates would change their scores in the last bit. Full tiles
do not have that, so in float64, the dtype of references, rows are padded to whole tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

ROW_TILE = 64  # a multiple of every row tile BLAS libraries use for float64


def whole_tiles(x: Tensor, dim: int = 0) -> Tensor:
    """x with zero rows appended along ``dim`` up to a multiple of ROW_TILE."""
    missing = -x.shape[dim] % ROW_TILE
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


class Linear(nn.Linear):
    """nn.Linear on [T, in]; in float64 every row's result is independent of its position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(whole_tiles(x))[: x.shape[0]] if x.dtype == torch.float64 else super().forward(x)
