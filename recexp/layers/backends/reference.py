"""The reference: plain, user by user, any dtype including float64. Fast paths are checked against it and never call it.

A candidate's own term is written as a row-wise q·k beside the product with the history, as the rule says: candidates
never meet each other, so their order cannot matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from recexp.layers.attention import AttentionCall, register_attention_backend
from recexp.layers.linear import whole_tiles
from recexp.layers.paged_kv import gather_kv


@register_attention_backend("reference", trainable=True)
def attend_reference(call: AttentionCall) -> Tensor:
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    starts = call.seq_offsets.tolist()
    for user, candidates in enumerate(call.num_candidates.tolist()):
        start, end = starts[user], starts[user + 1]
        split = end - candidates  # first candidate row
        history = slice(start, split)
        keys, values = (call.k[history], call.v[history]) if call.kv is None else gather_kv(*call.kv, user)  # [h, H, d]
        out[history] = _history(call, call.q[history], keys, values)
        out[split:end] = _candidates(call, slice(split, end), keys, values)
    return out


def _history(call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal rows: q [m, H, d] are the last m history tokens; keys, values: [h, H, d]."""
    scores = torch.einsum("ihd,jhd->hij", q, keys) * call.alpha
    rows = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0], device=q.device)
    hidden = torch.arange(keys.shape[0], device=q.device) > rows[:, None]
    if call.weighting == "silu":
        weights = silu(scores).masked_fill(hidden, 0.0) / call.scaling_seqlen
    else:
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, values)


def _candidates(call: AttentionCall, rows: slice, keys: Tensor, values: Tensor) -> Tensor:
    """Rows that see the whole history and themselves. keys, values: [h, H, d]."""
    # whole tiles, so that a candidate's result does not depend on its place among the others
    q, k, v = (whole_tiles(x[rows]) for x in (call.q, call.k, call.v))  # [c, H, d]
    keys, values = whole_tiles(keys, row_tile=1), whole_tiles(values, row_tile=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * call.alpha  # [H, c, h]
    own = (q * k).sum(dim=-1).t().unsqueeze(-1) * call.alpha  # [H, c, 1]
    weights = torch.cat([scores, own], dim=-1)
    weights = silu(weights) / call.scaling_seqlen if call.weighting == "silu" else weights.softmax(dim=-1)
    from_history = torch.einsum("hij,jhd->ihd", weights[..., :-1], values)
    out = from_history + weights[..., -1].t().unsqueeze(-1) * v
    return out[: rows.stop - rows.start, :, : call.q.shape[2]]
