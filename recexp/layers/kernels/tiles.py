"""Tile sizes of the attention kernels: a committed table, so that no first call tunes for seconds.

tiles.json is written by ``python benchmarks/tune_kernels.py`` on the device it describes; rows of SMs that
nobody ran hold sizes that fit there. A row answers for its SM and for newer ones without rows of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tiles:
    """rows of queries and keys of a block; warps of a program; stages: key blocks in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@cache
def choose_tiles(
    kernel: str, sm: int, dtype: torch.dtype, head_dim: int, weighting: str, page_size: int | None, few: bool = False
) -> Tiles:
    """The table's tiles for a call, head_dim being 32, 64, 128 or 256, by the newest SM not above ``sm``. few: rows and
    heads are so few that keys are split over programs; the table may have other tiles for that."""
    if dtype == torch.float32:  # no tensor cores in IEEE float32: registers hold both operands
        return Tiles(32, 32, 4, 1) if head_dim <= 128 else Tiles(16, 16, 4, 1)
    pages = "none" if page_size is None else "whole" if page_size % 64 == 0 else "part"
    rows = [row for row in json.loads(TABLE.read_text()) if (row["kernel"], row["head_dim"]) == (kernel, head_dim)]
    best = max((row for row in rows if row["sm"] <= sm), key=lambda row: row["sm"])
    return Tiles(*best[weighting].get(f"{pages} few" if few else pages, best[weighting][pages]))
