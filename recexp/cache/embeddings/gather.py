"""Rows of a table by key in one Triton kernel, several rows a program. Unverified on hardware.

PyTorch's own gather gives each row a block, of one warp for rows of 512 bytes: too few bytes under way to fill an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, or a build of torch without Triton
    AVAILABLE = False
else:
    AVAILABLE = True

    @triton.jit(do_not_specialize=["num_keys"])
    def copy_rows(table, keys, out, num_keys, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
        """out[i] = table[keys[i]]; rows of WORDS int64, of which WIDTH, a power of two, are gone through."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, WIDTH)
        inside = (row < num_keys)[:, None] & (word < WORDS)[None, :]
        key = tl.load(keys + row, row < num_keys, 0)
        rows = tl.load(table + key[:, None] * WORDS + word[None, :], inside)
        tl.store(out + row[:, None] * WORDS + word[None, :], rows, inside)


def gather_rows(table: Tensor, keys: Tensor) -> Tensor:
    """``table.index_select(0, keys)``, bit for bit. table: [num_rows, dim], rows of a multiple of 16 bytes, which each
    thread moves at once. keys: int64 [N], N ≥ 1, contiguous and in range: nobody looks."""
    words = table.view(torch.int64)
    out = words.new_empty(len(keys), words.shape[1])
    width = triton.next_power_of_2(words.shape[1])
    rows = max(1024 // width, 1)  # 8 KiB a program, 64 bytes a thread
    with torch.cuda.device_of(table):
        copy_rows[(triton.cdiv(len(keys), rows),)](words, keys, out, len(keys), words.shape[1], width, rows)
    return out.view(table.dtype)
