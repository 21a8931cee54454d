"""Triton kernels of lookups: ``guard_keys`` checks keys, ``gather_rows`` copies their rows. Unverified on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, or a build of torch without Triton
    AVAILABLE = False
else:
    AVAILABLE = True

    @triton.jit(do_not_specialize=["num_keys", "num_rows"])
    def look_at_keys(keys, known, inside, told, num_keys, num_rows, MUST_BE_KNOWN: tl.constexpr, KEYS: tl.constexpr):
        """inside[i] = keys[i], or 0 where out of range; told[0] = 1 if any is, or is unknown and must not be."""
        at = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
        given = at < num_keys
        key = tl.load(keys + at, given, 0)
        good = (key >= 0) & (key < num_rows)
        key = tl.where(good, key, 0)
        tl.store(inside + at, key, given)
        if MUST_BE_KNOWN:
            good = good & tl.load(known + key, given, 0)
        tl.store(told + tl.zeros_like(at), tl.full([KEYS], 1, tl.int64), given & ~good)

    @triton.jit(do_not_specialize=["num_keys"])
    def copy_rows(table, keys, out, num_keys, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
        """out[i] = table[keys[i]]; rows of WORDS int64, of which WIDTH, a power of two, are gone through."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, WIDTH)
        inside = (row < num_keys)[:, None] & (word < WORDS)[None, :]
        key = tl.load(keys + row, row < num_keys, 0)
        rows = tl.load(table + key[:, None] * WORDS + word[None, :], inside)
        tl.store(out + row[:, None] * WORDS + word[None, :], rows, inside)


def guard_keys(keys: Tensor, known: Tensor, must_be_known: bool, told: Tensor) -> Tensor:
    """keys with 0 for each out of range; told[0] is 1, once the device has got there, if one is out of range or, with
    must_be_known, unknown. keys: int64 [N], N ≥ 1, contiguous. known: bool [num_rows]. told: int64 [1].

    With told in pinned memory of the host there is nothing to copy: the device writes there only where a key is wrong.
    """
    inside, size = torch.empty_like(keys), 512
    with torch.cuda.device_of(keys):
        grid = (triton.cdiv(len(keys), size),)
        look_at_keys[grid](keys, known, inside, told, len(keys), len(known), must_be_known, size)
    return inside


def gather_rows(table: Tensor, keys: Tensor) -> Tensor:
    """``table.index_select(0, keys)``, bit for bit. table: [num_rows, dim], rows of a multiple of 16 bytes, which each
    thread moves at once. keys: int64 [N], N ≥ 1, contiguous and in range: nobody looks.

    PyTorch's own gives each row a block, of one warp for rows of 512 bytes: too few bytes under way to fill an H200.
    """
    words = table.view(torch.int64)
    out = words.new_empty(len(keys), words.shape[1])
    width = triton.next_power_of_2(words.shape[1])
    rows = max(1024 // width, 1)  # 8 KiB a program, 64 bytes a thread
    with torch.cuda.device_of(table):
        copy_rows[(triton.cdiv(len(keys), rows),)](words, keys, out, len(keys), words.shape[1], width, rows)
    return out.view(table.dtype)
