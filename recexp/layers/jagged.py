"""Jagged [T, …] ↔ padded [B, S, …], by fbgemm's operators where they are installed and take the dtype, else by torch.

fbgemm has no float64 on the CPU; both ways give the same values bit for bit, since nothing is computed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def have_fbgemm() -> bool:
    """Whether fbgemm's jagged operators can be used; importing it registers them."""
    try:
        import fbgemm_gpu  # noqa: F401  # imported for its effect

        return hasattr(torch.ops.fbgemm, "jagged_to_padded_dense")
    except (ImportError, OSError):
        return False


def _by_fbgemm(values: Tensor) -> bool:
    return values.dtype in (torch.float32, torch.bfloat16, torch.float16) and values.shape[0] > 0 and have_fbgemm()


def to_padded(values: Tensor, seq_offsets: Tensor, max_seqlen: int) -> Tensor:
    """values [T, …], seq_offsets [B+1] → [B, max_seqlen, …], zeros behind each user's rows."""
    batch_size, tail = seq_offsets.shape[0] - 1, values.shape[1:]
    if _by_fbgemm(values):
        flat = values.reshape(values.shape[0], -1)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(flat, [seq_offsets], [max_seqlen], 0.0)
        return padded.view(batch_size, max_seqlen, *tail)
    padded = values.new_zeros(batch_size * max_seqlen, *tail)
    return padded.index_copy(0, _slots(values.shape[0], seq_offsets, max_seqlen), values).view(
        batch_size, max_seqlen, *tail
    )


def to_jagged(padded: Tensor, seq_offsets: Tensor, num_tokens: int) -> Tensor:
    """padded [B, S, …] → [num_tokens, …]: the rows ``to_padded`` came from."""
    batch_size, max_seqlen, *tail = padded.shape
    if num_tokens and _by_fbgemm(padded):
        flat = padded.reshape(batch_size, max_seqlen, -1)
        return torch.ops.fbgemm.dense_to_jagged(flat, [seq_offsets], num_tokens)[0].view(num_tokens, *tail)
    return padded.reshape(batch_size * max_seqlen, *tail)[_slots(num_tokens, seq_offsets, max_seqlen)]


def row_users(num_tokens: int, seq_offsets: Tensor) -> Tensor:
    """The user of each of ``num_tokens`` rows, int64 [num_tokens], without asking the device for a length."""
    users = torch.arange(seq_offsets.shape[0] - 1, device=seq_offsets.device)
    return users.repeat_interleave(seq_offsets.diff(), output_size=num_tokens)


def _slots(num_tokens: int, seq_offsets: Tensor, max_seqlen: int) -> Tensor:
    user = row_users(num_tokens, seq_offsets)
    return user * max_seqlen + torch.arange(num_tokens, device=user.device) - seq_offsets[user]
