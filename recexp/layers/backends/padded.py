"""Padded attention: scaled_dot_product_attention for softmax, batched products for SiLU. The trainable path.

Users are padded to the longest one, so memory and work grow with B * S²; most models of the field train this way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from recexp.layers.attention import AttentionCall, register_attention_backend
from recexp.layers.jagged import to_jagged, to_padded
from recexp.layers.paged_kv import gather_kv


@register_attention_backend("padded", trainable=True)
def attend_padded(call: AttentionCall) -> Tensor:
    q, k, v, seq_offsets = call.q, call.k, call.v, call.seq_offsets
    lengths = seq_offsets.diff()
    if q.shape[0] == 0:
        return torch.empty_like(q)
    num_queries = call.max_seqlen or int(lengths.max())
    if call.kv is None:
        key_offsets, num_keys = seq_offsets, num_queries
    else:
        k, v, key_offsets, num_keys = _with_cached(call)
    q_pad = to_padded(q, seq_offsets, num_queries).transpose(1, 2)  # [B, H, S, d]
    k_pad = to_padded(k, key_offsets, num_keys).transpose(1, 2)
    v_pad = to_padded(v, key_offsets, num_keys).transpose(1, 2)
    visible = _visible(num_queries, num_keys, lengths, key_offsets.diff(), call.num_candidates).unsqueeze(1)
    if call.weighting == "silu":
        weights = silu(q_pad @ k_pad.transpose(2, 3) * call.alpha) * visible / call.scaling_seqlen
        out = weights @ v_pad
    else:
        out = scaled_dot_product_attention(q_pad, k_pad, v_pad, attn_mask=visible, scale=call.alpha)
    return to_jagged(out.transpose(1, 2), seq_offsets, q.shape[0])


def _visible(
    num_queries: int, num_keys: int, query_lengths: Tensor, key_lengths: Tensor, num_candidates: Tensor
) -> Tensor:
    """The rule, [B, num_queries, num_keys]. Padded queries see key 0 alone: softmax over nothing would be NaN."""
    i = torch.arange(num_queries, device=query_lengths.device)[None, :, None]
    j = torch.arange(num_keys, device=query_lengths.device)[None, None, :]
    query_lengths, key_lengths, num_candidates = (
        x[:, None, None] for x in (query_lengths, key_lengths, num_candidates)
    )
    position = i + (key_lengths - query_lengths)  # of a query in the whole sequence
    visible = (j <= position) & ((j < key_lengths - num_candidates) | (j == position))
    return torch.where(i < query_lengths, visible, j == 0)


def _with_cached(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, int]:
    """Each user's keys and values, the history out of the table, then the candidates' rows; offsets; the longest."""
    assert call.kv is not None
    parts_k, parts_v = [], []
    for user, (end, candidates) in enumerate(
        zip(call.seq_offsets[1:].tolist(), call.num_candidates.tolist(), strict=True)
    ):
        keys, values = gather_kv(*call.kv, user)
        parts_k += [keys, call.k[end - candidates : end]]
        parts_v += [values, call.v[end - candidates : end]]
    m = call.kv[1]
    return torch.cat(parts_k), torch.cat(parts_v), m.kv_seqlen_offsets, int(m.kv_seqlens.max())
