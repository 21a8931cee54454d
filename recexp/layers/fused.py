"""The HSTU layer in five kernels instead of the eager path's dozen; for inference, same semantics as HSTULayer.forward.

    1 layer_norm    y = LayerNorm(x), and the slots of the new keys and values
    2 projection    u, v, q, k = SiLU(y W + b), the append to the pages in its epilogue
    3 attention     backend ``triton`` or ``gluon``, parts left unmerged where keys are split
    4 gate          LayerNorm(sum of parts / N) * u
    5 projection    W_proj and the residual

Why not fewer: 1 and 4 need whole rows of what 2 and 5 take in tiles of columns; 3 needs every key of 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recexp.layers.attention import KV, AttentionCall, AttentionRequest, choose
from recexp.layers.backends import gluon, triton

if TYPE_CHECKING:
    from recexp.layers.hstu import HSTULayer

if triton.AVAILABLE:
    from triton import cdiv, next_power_of_2

    from recexp.layers.kernels.gate import gate
    from recexp.layers.kernels.layer_norm import layer_norm
    from recexp.layers.kernels.projection import projection

# of a projection: rows, columns, inner step, warps, stages
TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 5))
Slots = tuple[Tensor, Tensor]
LAUNCHERS = {"triton": triton, "gluon": gluon}


def project(
    x: Tensor, linear: nn.Linear, residual: Tensor | None = None, silu: bool = False, append: Slots | None = None
) -> Tensor:
    """x [T, in] -> [T, out]; append: the table, and the slots of layer_norm. See kernels.projection."""
    num_rows, (width, depth) = x.shape[0], linear.weight.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    rows, columns, step, warps, stages = projection_tiles(num_rows, width, x)
    table, slots = append or (None, None)
    projection[(cdiv(num_rows, rows) * cdiv(width, columns),)](
        x, linear.weight, linear.bias, residual, out, table, slots, num_rows, 1 if table is None else table.shape[2],
        x.stride(0), 0 if residual is None else residual.stride(0), width, depth, rows, columns, step, 16, silu,
        append is not None, x.dtype != torch.float32 and not triton.INTERPRETED, pdl := triton.overlaps(x),
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def projection_tiles(num_rows: int, width: int, x: Tensor) -> tuple[int, int, int, int, int]:
    """The largest of TILES that still give every multiprocessor one, else the last."""
    if x.dtype == torch.float32:
        return 32, 32, 32, 4, 2
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    fitting = (t for t in TILES if cdiv(num_rows, t[0]) * (width // t[1]) >= processors)
    return next(fitting, TILES[-1])


def fused_hstu_layer(
    layer: HSTULayer, x: Tensor, seq_offsets: Tensor, num_candidates: Tensor, max_seqlen: int | None = None,
    kv: KV | None = None,
) -> Tensor:  # fmt: skip
    """What ``layer(x, ...)`` computes, without gradients and dropout. x: [T, hidden_size].

    ValueError: the layer's attention backend has no unmerged parts, or refuses; a width the append cannot tile.
    """
    num_heads, head_dim = layer.num_heads, layer.head_dim
    page_size = None if kv is None else kv[0].shape[2]
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    request = AttentionRequest("silu", x.device, x.dtype, num_heads, head_dim, page_size, needs_grad)
    name = choose(layer.attention.backend, request)
    if name not in LAUNCHERS:
        raise ValueError(f"the fused layer needs attention backend {' or '.join(LAUNCHERS)}, not {name!r}")
    num_tokens, width = x.shape[0], num_heads * head_dim
    if kv is not None and width % 256:
        raise ValueError(
            f"heads * head_dim = {width} is not a multiple of 256, the widest tile that appends; use the plain layer"
        )
    if num_tokens == 0:
        return torch.empty_like(x)
    with torch.cuda.device_of(x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        append: Slots | None = None
        lengths: list[Tensor | None] = [None] * 6
        if kv is not None:
            table, m = kv
            append = table, torch.empty(num_tokens, dtype=torch.int64, device=x.device)
            lengths = [append[1], seq_offsets, num_candidates, m.total_history_lengths, m.kv_indptr, m.kv_indices]
        norm = layer.input_norm
        layer_norm[(num_tokens,)](
            x, norm.weight, norm.bias, y, *lengths, norm.eps, num_candidates.shape[0], page_size or 1, x.stride(0),
            x.shape[1], next_power_of_2(x.shape[1]), kv is not None, pdl := triton.overlaps(x), launch_pdl=pdl,
        )  # fmt: skip
        uvqk = project(y, layer.uvqk, silu=True, append=append)
        u, v, q, k = uvqk.unflatten(-1, (4, num_heads, head_dim)).unbind(1)
        numbers = (layer.attention.alpha, layer.attention.scaling_seqlen, max_seqlen)
        parts = LAUNCHERS[name].launch(AttentionCall(q, k, v, seq_offsets, num_candidates, "silu", *numbers, kv))
        norm = layer.output_norm
        gated = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
        gate[(num_tokens,)](
            parts.out, parts.sums, u, norm.weight, norm.bias, gated, parts.inverse_n, norm.eps, num_tokens,
            u.stride(0), 1 if parts.sums is None else parts.sums.shape[0], width, next_power_of_2(width), pdl,
            launch_pdl=pdl,
        )  # fmt: skip
        return project(gated, layer.proj, x if layer.residual else None)
