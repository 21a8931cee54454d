"""Backend ``gather``: users padded to the longest one by indexing, pages included: what CPU packages run.

The longest lengths are read by ``.item()``, which an exported program does anew at every call. Plain operators, so C++
needs none of ours. Any device and dtype; work and memory grow with B * S * L.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from recexp.layers.attention import AttentionCall, register_attention_backend
from recexp.layers.jagged import row_users


@register_attention_backend("gather")
def attend_gather(call: AttentionCall) -> Tensor:
    offsets, num_rows = call.seq_offsets, call.q.shape[0]
    if num_rows == 0:
        return torch.empty_like(call.q)
    new = (offsets.diff() - call.num_candidates)[:, None]  # [B, 1]
    row = torch.arange(_longest(offsets), device=offsets.device)  # [S]
    at = (offsets[:-1, None] + row).clamp(max=num_rows - 1)  # [B, S]
    q, own_key, own_value = call.q[at], call.k[at], call.v[at]  # [B, S, H, d]
    if call.kv is None:
        keys, values, length = own_key, own_value, new
    else:
        table, m = call.kv
        place = torch.arange(_longest(m.kv_indptr), device=offsets.device)  # [P]
        pages = m.kv_indices[(m.kv_indptr[:-1, None] + place).clamp(max=m.kv_indices.shape[0] - 1)]
        keys, values = table[pages].transpose(1, 2).flatten(2, 3).unbind(1)  # [B, L, H, d] each
        length = m.total_history_lengths[:, None]
    key = torch.arange(keys.shape[1], device=offsets.device)  # [L]
    written = key < length  # [B, L]; what is not may hold any bits
    last = torch.minimum(length - new + row, length - 1)  # [B, S] position of the last history key that a row sees
    hidden = key > last[..., None]  # [B, S, L]
    in_history = (row < new)[..., None]  # [B, S, 1]
    # Heads first: of [B, 1, S, L], where one head is all, the compiler cannot tell how it lies in memory.
    keys, values = (x.masked_fill(~written[..., None, None], 0.0).movedim(2, 0) for x in (keys, values))
    q, own_key, own_value = (x.movedim(2, 0) for x in (q, own_key, own_value))  # [H, B, S, d]
    own_key, own_value = (x.masked_fill(in_history, 0.0) for x in (own_key, own_value))
    scores = q @ keys.transpose(2, 3) * call.alpha
    own = (q * own_key).sum(-1, keepdim=True) * call.alpha  # [H, B, S, 1]
    total: Tensor | float = call.scaling_seqlen
    if call.weighting == "silu":
        weights, own = silu(scores).masked_fill(hidden, 0.0), silu(own)
    else:
        own = own.masked_fill(in_history, -torch.inf)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = torch.maximum(scores.amax(-1, keepdim=True), own)
        weights, own = (scores - top).exp(), (own - top).exp()
        total = weights.sum(-1, keepdim=True) + own
    out = ((weights @ values + own * own_value) / total).movedim(0, 2)  # [B, S, H, d]
    user = row_users(num_rows, offsets)
    return out[user, torch.arange(num_rows, device=offsets.device) - offsets[user]]


def _longest(offsets: Tensor) -> int:
    """The most rows of one user, 2 or more: of a size that may be 1 the compiler cannot tell how it lies in memory."""
    longest: Any = offsets.diff().max().clamp(min=2).item()
    torch._check(longest >= 2)
    return longest
