"""Backend ``flex``: torch's FlexAttention (torch.nn.attention.flex_attention) with the rule as a mask, for softmax.

All users lie in one row of T tokens and the mask keeps them apart, so that blocks between two users are skipped.
Compiled on CUDA, plain (and slow) on the CPU. FlexAttention always normalises by softmax: HSTU's weighting cannot be
asked of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from recexp.layers.attention import AttentionCall, AttentionRequest, register_attention_backend
from recexp.layers.jagged import row_users


@functools.cache
def attention(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def make_mask(num_tokens: int, seq_offsets: Tensor, num_candidates: Tensor) -> BlockMask:
    """The rule over all users' tokens in one row, [1, 1, T, T]."""
    users = row_users(num_tokens, seq_offsets)
    is_history = torch.arange(num_tokens, device=users.device) < (seq_offsets[1:] - num_candidates)[users]

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (users[i] == users[j]) & (j <= i) & (is_history[j] | (i == j))

    return create_block_mask(visible, None, None, num_tokens, num_tokens, device=users.device)


def refuses(request: AttentionRequest) -> str | None:
    if request.weighting != "softmax":
        return "FlexAttention always normalises by softmax"
    if request.page_size is not None:
        return "it reads contiguous keys, not a paged cache"
    if request.device.type == "cuda" and request.dtype == torch.float64:
        return "torch compiles no FlexAttention of float64 for CUDA"
    if request.device.type == "cuda" and (request.head_dim < 16 or request.head_dim & (request.head_dim - 1)):
        return f"head_dim {request.head_dim} is not a power of two from 16 on"
    return None


@register_attention_backend("flex", refuses=refuses)
def run(call: AttentionCall) -> Tensor:
    if call.q.shape[0] == 0:
        return torch.empty_like(call.q)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (call.q, call.k, call.v))  # [1, H, T, d]
    mask = make_mask(q.shape[2], call.seq_offsets, call.num_candidates)
    out: Tensor = attention(q.is_cuda)(q, k, v, block_mask=mask, scale=call.alpha)
    return out[0].transpose(0, 1).contiguous()
