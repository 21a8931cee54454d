"""Backend ``paged``: the rule as one mask over all keys of the batch, in plain PyTorch, pages included.

No length is read on the host, so a CUDA graph of a call serves other lengths of as many rows; rows behind the last user
become 0. Any device and dtype, float64 too. Work and memory grow with rows times keys (or whole pages) of all users
together, so it is what tests and small models capture; kernels are for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from recexp.layers.attention import AttentionCall, register_attention_backend


@register_attention_backend("paged", capturable=True)
def attend_paged(call: AttentionCall) -> Tensor:
    user, row, real = _locate(call.q.shape[0], call.seq_offsets)  # [T] each
    new = (call.seq_offsets.diff() - call.num_candidates)[user]
    is_candidate = real & (row >= new)
    if call.kv is None:
        keys, values, key_user, key_position, length = call.k, call.v, user, row, new
        written = real & ~is_candidate
    else:
        table, m = call.kv
        page_size = table.shape[2]
        pages = table[m.kv_indices]  # [P, 2, page_size, H, d]
        keys, values = pages.transpose(0, 1).flatten(1, 2)  # [K, H, d]
        key_user, key_position, owned = _locate(keys.shape[0], m.kv_indptr * page_size)
        written = owned & (key_position < m.total_history_lengths[key_user])
        length = m.total_history_lengths[user]
    last = torch.minimum(length - new + row, length - 1)  # position of the last history key that a row sees
    visible = written & (key_user == user[:, None]) & (key_position <= last[:, None]) & real[:, None]  # [T, K]
    keys, values = (x.masked_fill(~written[:, None, None], 0.0) for x in (keys, values))  # not written: any bits
    own_key, own_value = (x.masked_fill(~is_candidate[:, None, None], 0.0) for x in (call.k, call.v))
    q = call.q.masked_fill(~real[:, None, None], 0.0)
    scores = torch.einsum("thd,khd->thk", q, keys) * call.alpha
    own = (q * own_key).sum(-1, keepdim=True) * call.alpha  # [T, H, 1]
    if call.weighting == "silu":
        weights = silu(torch.cat([scores.masked_fill(~visible[:, None], 0.0), own], -1)) / call.scaling_seqlen
    else:
        blind = (real & ~is_candidate)[:, None, None]  # a padded row sees its own value, which is 0
        scores = torch.cat([scores.masked_fill(~visible[:, None], -torch.inf), own.masked_fill(blind, -torch.inf)], -1)
        weights = scores.softmax(-1)
    return torch.einsum("thk,khd->thd", weights[..., :-1], values) + weights[..., -1:] * own_value


def _locate(num_rows: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[num_rows] each: a row's user by offsets [B+1], its place among the user's rows, whether it has a user at all.
    Rows behind the last user count as the last one's."""
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    user = torch.searchsorted(offsets[1:], rows, right=True)
    real = user < offsets.shape[0] - 1
    user = user.clamp(max=max(offsets.shape[0] - 2, 0))
    return user, rows - offsets[user], real
