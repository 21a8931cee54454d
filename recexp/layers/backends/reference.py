"""The reference: plain, user by user, any dtype including float64. Fast paths are checked against it and never call it.

A candidate's own term is written as a row-wise q·k beside the product with the history, as the rule says: candidates
never meet each other, so their order cannot matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from recexp.layers.attention import KV, Weighting, register_attention_backend
from recexp.layers.linear import whole_tiles
from recexp.layers.paged_kv import gather_kv


@register_attention_backend("reference", trainable=True)
def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    num_candidates: Tensor,
    *,
    weighting: Weighting,
    alpha: float,
    scaling_seqlen: float,
    max_seqlen: int | None,
    kv: KV | None,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = seq_offsets.tolist()
    for user, candidates in enumerate(num_candidates.tolist()):
        start, end = starts[user], starts[user + 1]
        split = end - candidates  # first candidate row
        if kv is None:
            keys, values = k[start:split], v[start:split]  # [h, H, d]
        else:
            keys, values = gather_kv(*kv, user)
        cached = keys.shape[0] - (split - start)
        out[start:split] = _history(q[start:split], keys, values, cached, weighting, alpha, scaling_seqlen)
        out[split:end] = _candidates(
            q[split:end], k[split:end], v[split:end], keys, values, weighting, alpha, scaling_seqlen
        )
    return out


def _history(
    q: Tensor, keys: Tensor, values: Tensor, cached: int, weighting: Weighting, alpha: float, n: float
) -> Tensor:
    """Causal rows: row i is history token ``cached + i``. q: [m, H, d]; keys, values: [h, H, d]."""
    scores = torch.einsum("ihd,jhd->hij", q, keys) * alpha
    rows = torch.arange(q.shape[0], device=q.device) + cached
    hidden = torch.arange(keys.shape[0], device=q.device) > rows[:, None]
    if weighting == "silu":
        weights = silu(scores).masked_fill(hidden, 0.0) / n
    else:
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, values)


def _candidates(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, weighting: Weighting, alpha: float, n: float
) -> Tensor:
    """Rows that see the whole history and themselves. q, k, v: [c, H, d]; keys, values: [h, H, d]."""
    num_candidates, _, head_dim = q.shape
    # whole tiles, so that a candidate's result does not depend on its place among the others
    q, k, v = whole_tiles(q), whole_tiles(k), whole_tiles(v)
    keys, values = whole_tiles(keys, row_tile=1), whole_tiles(values, row_tile=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * alpha  # [H, c, h]
    own = (q * k).sum(dim=-1).t().unsqueeze(-1) * alpha  # [H, c, 1]
    weights = torch.cat([scores, own], dim=-1)
    weights = silu(weights) / n if weighting == "silu" else weights.softmax(dim=-1)
    from_history = torch.einsum("hij,jhd->ihd", weights[..., :-1], values)
    return (from_history + weights[..., -1].t().unsqueeze(-1) * v)[:num_candidates, :, :head_dim]
