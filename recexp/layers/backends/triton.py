"""Backend ``triton``: the plain Triton kernel of recexp.layers.kernels.attention, any SM from 80 on, any page size.

One launch, or two where the grid would leave multiprocessors idle: then the keys are split over programs and a
second kernel adds the parts. No length is read on the host, so a CUDA graph of a call serves other lengths of as
many rows. Unverified on hardware other than SM90; under TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recexp.devices import TRITON, sm_of
from recexp.layers.attention import AttentionCall, AttentionRequest, kernel_refusal, register_attention_backend
from recexp.layers.kernels.tiles import Tiles, choose_tiles

try:
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    from recexp.layers.kernels.attention import attention
    from recexp.layers.kernels.merge_splits import merge_splits

    AVAILABLE, INTERPRETED = True, isinstance(attention, InterpretedFunction)
except ImportError:  # macOS, or a build of torch without Triton
    AVAILABLE = INTERPRETED = False

MAX_SPLITS = 32
FEW_ROWS = 64 * 132  # rows times heads that give no more than one small tile to a large device's multiprocessors
MIN_BLOCKS = 4  # key blocks a share must have to be worth its partial sums


@dataclass(frozen=True)
class Parts:
    """An attention kernel's result before its parts are merged: ``out`` [T, H, d] as it is when ``sums`` is None, else
    float32 sums [splits, T, H, d] that are still to be added and scaled, and for softmax stats [splits, T, H, 2]."""

    out: Tensor
    sums: Tensor | None
    stats: Tensor | None
    inverse_n: float

    @classmethod
    def empty(cls, call: AttentionCall, splits: int) -> Parts:
        q, sums, stats = call.q, None, None
        if splits > 1 and len(q):
            sums = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
            if call.weighting == "softmax":
                stats = torch.empty((splits, *q.shape[:2], 2), dtype=torch.float32, device=q.device)
        return cls(torch.empty(q.shape, dtype=q.dtype, device=q.device), sums, stats, 1.0 / call.scaling_seqlen)

    def merged(self) -> Tensor:
        if self.sums is not None:
            splits, tokens, heads, dim = self.sums.shape
            columns = triton.next_power_of_2(dim)
            rows = max(1, 512 // columns)
            with torch.cuda.device_of(self.out):
                merge_splits[(triton.cdiv(tokens * heads, rows),)](
                    self.sums, self.stats, self.out, self.inverse_n, tokens * heads, splits, dim, columns, rows,
                    self.stats is not None, pdl := overlaps(self.out), num_warps=4, launch_pdl=pdl,
                )  # fmt: skip
        return self.out


def overlaps(x: Tensor) -> bool:
    """Whether launches on x's device may overlap: see kernels.attention.wait_for_previous."""
    return x.is_cuda and sm_of(x.device) >= 90


def num_tiles(call: AttentionCall, rows: int) -> int:
    """Row tiles that hold any split of the tokens between the users and the padding behind them; see find_user."""
    return (call.q.shape[0] + (call.num_candidates.shape[0] + 1) * (rows - 1)) // rows


def check_rows(call: AttentionCall) -> None:
    """Refuse q, k, v whose rows are not H·d numbers side by side (the distance between rows is free), and a table that
    is not contiguous."""
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        if x.numel() and (x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2])):
            raise ValueError(
                f"{name} has strides {x.stride()} for shape {tuple(x.shape)}; a token's heads must lie side by side "
                "(a view of a fused projection does), so make it contiguous first"
            )
    if call.kv is not None and not (table := call.kv[0]).is_contiguous():
        raise ValueError(
            f"the table has strides {table.stride()} for shape {tuple(table.shape)}; it must be contiguous"
        )


def choose_splits(call: AttentionCall, tiles: Tiles, resident: int) -> int:
    """Over how many programs to split the keys: as many as fill the device once, ``resident`` on a multiprocessor, by
    sizes that the host knows."""
    q = call.q
    if not q.is_cuda or not len(q):
        return 1
    longest = call.max_seqlen or q.shape[0]
    if call.kv is not None:
        table, m = call.kv
        longest = m.kv_indices.numel() * table.shape[2] // max(len(call.num_candidates), 1)
    programs = triton.cdiv(q.shape[0], tiles.rows) * q.shape[1]
    room = resident * torch.cuda.get_device_properties(q.device).multi_processor_count
    return max(1, min(room // programs, longest // (tiles.keys * MIN_BLOCKS), MAX_SPLITS))


def launch(call: AttentionCall, tiles: Tiles | None = None, splits: int | None = None) -> Parts:
    """Start the attention kernel; tiles and splits are chosen unless given."""
    check_rows(call)
    q, k, v = call.q, call.k, call.v
    num_tokens, num_heads, head_dim = q.shape
    num_users, columns = call.num_candidates.shape[0], max(32, triton.next_power_of_2(head_dim))
    page_size, softmax = call.page_size or 1, call.weighting == "softmax"
    if tiles is None:
        sm = sm_of(q.device) if q.is_cuda else 80
        few = q.is_cuda and num_tokens * num_heads < FEW_ROWS
        tiles = choose_tiles("triton", sm, q.dtype, columns, call.weighting, call.page_size, few)
    splits = splits or choose_splits(call, tiles, 3 if tiles.warps == 4 else 1)
    parts = Parts.empty(call, splits)
    if num_tokens == 0:
        return parts
    history: tuple[Any, ...] = (k, v, k.stride(0), v.stride(0), None, None, None)
    if call.kv is not None:
        table, m = call.kv
        width = num_heads * head_dim
        history = (table, table, width, width, m.total_history_lengths, m.kv_indptr, m.kv_indices)
    keys, values, key_stride, value_stride, *paging = history
    with torch.cuda.device_of(q):
        attention[(num_tiles(call, tiles.rows) * num_heads * splits,)](
            q, k, v, keys, values, parts.out, parts.sums, parts.stats, call.seq_offsets,
            call.num_candidates, *paging, q.stride(0), k.stride(0), v.stride(0), key_stride, value_stride, call.alpha,
            parts.inverse_n, num_users, num_tokens, splits, page_size, num_heads=num_heads, HEAD_DIM=head_dim,
            COLUMNS=columns, ROWS=tiles.rows, KEYS=tiles.keys, PAGED=call.kv is not None,
            WHOLE=page_size % tiles.keys == 0, SPLIT=splits > 1, SOFTMAX=softmax,
            APPROXIMATE=q.dtype != torch.float32 and not INTERPRETED, num_warps=tiles.warps, num_stages=tiles.stages,
            OVERLAP=(pdl := overlaps(q)), launch_pdl=pdl,
        )  # fmt: skip
    return parts


def refuses(request: AttentionRequest) -> str | None:
    if not AVAILABLE:
        return "Triton is not installed"
    if INTERPRETED:
        if request.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies no bfloat16"
        return TRITON.refuses(request.weighting, request.dtype, request.head_dim, request.page_size)
    if request.device.type == "cpu":
        return "on the CPU it runs only under TRITON_INTERPRET=1, set before the first import"
    return kernel_refusal("triton", request)


@register_attention_backend("triton", refuses=refuses, capturable=True)
def run(call: AttentionCall) -> Tensor:
    return launch(call).merged()
