"""Backend ``gluon``: the warp-specialised kernel of recexp.layers.kernels.attention_sm90, for SM90 (H100, H200) only.

Page sizes are run-time arguments; the largest power of two in a page size, up to a block of keys, is the height of
the copies and a compile. Run on an H200 with Triton 3.6; with newer releases compiled only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recexp.layers.attention import AttentionCall, AttentionRequest, kernel_refusal, register_attention_backend
from recexp.layers.backends.triton import Parts, check_rows, choose_splits, num_tiles, overlaps
from recexp.layers.kernels.tiles import Tiles, choose_tiles

try:
    import triton

    from recexp.layers.kernels import gluon_interface

    WHY_NOT = None
    if not triton.__version__.startswith(gluon_interface.RELEASES):
        WHY_NOT = f"it is written for Triton {', '.join(gluon_interface.RELEASES)}; this is {triton.__version__}"
except ImportError:
    WHY_NOT = "Triton, or Gluon in it, is not installed"

if WHY_NOT is None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from recexp.layers.kernels.attention_sm90 import TILE, attention_sm90

REGISTERS = {2: (240, 24), 3: (160, 24)}  # consumers: registers of a consumer's and of the producer's threads


def describe_rows(x: Tensor, width: int, stride: int, box: list[int]) -> TensorDescriptor:
    """What the copy engine needs to know about rows [*, width] of a tensor, ``stride`` elements apart."""
    if x.data_ptr() % 16 or stride % 8:
        raise ValueError(
            f"rows {stride} elements apart from address {x.data_ptr():#x} are not on 16 bytes, which the copy engine "
            "needs; use backend 'triton', or copy the tensor"
        )
    return TensorDescriptor(x, [x.numel() // width, width], [stride, 1], box, TILE.value)


def launch(call: AttentionCall, tiles: Tiles | None = None, splits: int | None = None) -> Parts:
    """Start the kernel; tiles and splits are chosen unless given."""
    check_rows(call)
    q, k, v, page_size = call.q, call.k, call.v, call.page_size
    num_tokens, num_heads, head_dim = q.shape
    num_users, width = call.num_candidates.shape[0], num_heads * head_dim
    tiles = tiles or choose_tiles("gluon", 90, q.dtype, head_dim, call.weighting, page_size)
    splits = splits or choose_splits(call, tiles, 1)
    parts = Parts.empty(call, splits)
    if num_tokens == 0:
        return parts
    box_rows = tiles.keys if page_size is None else math.gcd(page_size, tiles.keys)
    box = [box_rows, head_dim if box_rows == tiles.keys else 64]
    if call.kv is None:
        k_rows, v_rows = describe_rows(k, width, k.stride(0), box), describe_rows(v, width, v.stride(0), box)
        paging = [call.seq_offsets] * 3  # never read without pages
    else:
        table, m = call.kv
        k_rows = v_rows = describe_rows(table, width, width, box)
        paging = [m.total_history_lengths, m.kv_indptr, m.kv_indices]
    sums = parts.out if parts.sums is None else parts.sums  # what is not written needs a type all the same
    stats = sums if parts.stats is None else parts.stats
    consumers = tiles.rows // 64
    with torch.cuda.device_of(q):
        attention_sm90[(num_tiles(call, tiles.rows) * num_heads * splits,)](
            describe_rows(q, width, q.stride(0), [64, head_dim]), k_rows, v_rows, q, k, v, parts.out, sums, stats,
            call.seq_offsets, call.num_candidates, *paging, q.stride(0), k.stride(0), v.stride(0), call.alpha,
            parts.inverse_n, num_users, num_tokens, splits, page_size or 1, H=num_heads, D=head_dim,
            CONSUMERS=consumers, KEYS=tiles.keys, STAGES=tiles.stages, BOX=box_rows, EXACT=page_size == box_rows,
            PAGED=call.kv is not None, SPLIT=splits > 1, SOFTMAX=call.weighting == "softmax",
            CONSUMER_REGISTERS=REGISTERS[consumers][0], PRODUCER_REGISTERS=REGISTERS[consumers][1], num_warps=4,
            OVERLAP=(pdl := overlaps(q)), launch_pdl=pdl,
        )  # fmt: skip
    return parts


def refuses(request: AttentionRequest) -> str | None:
    return WHY_NOT or kernel_refusal("gluon", request)


@register_attention_backend("gluon", refuses=refuses, capturable=True)
def run(call: AttentionCall) -> Tensor:
    return launch(call).merged()
