"""Keys checked by one Triton kernel, which tells the host of a wrong one through the host's own memory: where all are
right there is nothing to copy, and a look costs one launch. Unverified on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

PROGRAM = 512  # keys a program

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, or a build of torch without Triton
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


def make_told(device: torch.device) -> Tensor | None:
    """What ``guard_keys`` writes to, int64 [1]: 0, in memory that both sides see. None where it cannot be."""
    return torch.zeros(1, dtype=torch.int64).pin_memory() if AVAILABLE and device.type == "cuda" else None


def guard_keys(keys: Tensor, known: Tensor, must_be_known: bool, told: Tensor) -> Tensor:
    """keys with 0 for each out of range; sets told if one is, or with must_be_known is unknown, when the device has got
    there. keys: int64 [N], N ≥ 1, contiguous. known: bool [num_rows]."""
    inside = torch.empty_like(keys)
    with torch.cuda.device_of(keys):
        look_at_keys[(triton.cdiv(len(keys), 512),)](
            keys, known, inside, told, len(keys), len(known), must_be_known, 512
        )
    return inside


def was_told(keys: Tensor, told: Tensor) -> bool:
    """Whether it was, once the device is done with all that it was asked for after ``guard_keys``; told is 0 again."""
    if keys.is_cuda:
        torch.cuda.current_stream(keys.device).synchronize()
    found = bool(told)
    if found:
        told.zero_()
    return found
