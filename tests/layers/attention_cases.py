"""Random attention requests over pages whose unwritten slots hold NaN, and their float64 truth, from the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recexp.layers.attention import AttentionCall
from recexp.metadata import KVMetadata


@dataclass
class Case:
    """Arguments of ``attend``, and each user's history keys and values [h, H, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    seq_offsets: Tensor
    num_candidates: Tensor
    kv: tuple[Tensor, KVMetadata] | None
    histories: list[tuple[Tensor, Tensor]]
    alpha: float
    scaling_seqlen: float

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.seq_offsets, self.num_candidates

    def call(self, weighting: str) -> AttentionCall:
        return AttentionCall(*self.args, weighting, self.alpha, self.scaling_seqlen, kv=self.kv)

    def truth(self, weighting: str) -> Tensor:
        """[T, H, d] in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        offsets = self.seq_offsets.tolist()
        for user, (keys, values) in enumerate(self.histories):
            rows = slice(offsets[user], offsets[user + 1])
            q, own_key, own_value = (x[rows].double().nan_to_num().transpose(0, 1) for x in (self.q, self.k, self.v))
            keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)  # [H, h, d]
            h, new = keys.shape[1], q.shape[1] - int(self.num_candidates[user])
            row = torch.arange(q.shape[1], device=q.device)
            hidden = torch.arange(h, device=q.device)[None] > (h - new + row)[:, None]
            scores = (
                torch.cat([q @ keys.mT, (q * own_key).sum(-1, keepdim=True)], -1) * self.alpha
            )  # the own key comes last
            hidden = torch.cat([hidden, (row < new)[:, None]], 1)
            if weighting == "silu":
                weights = (scores * scores.sigmoid()).masked_fill(hidden, 0) / self.scaling_seqlen
            else:
                weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out[rows] = (weights[..., :-1] @ values + weights[..., -1:] * own_value).transpose(0, 1)
        return out


def make_case(
    histories: Sequence[int],
    new: Sequence[int] | None,
    candidates: Sequence[int],
    heads: int,
    dim: int,
    page_size: int | None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    spare_pages: int = 3,
) -> Case:
    """Users with ``histories`` tokens, the last ``new`` of them in this call; page_size None: no cache, all of it new.

    q, k and v are views of one buffer, as a fused projection leaves them. With pages, the new history's rows of k and v
    hold NaN, which no backend may read, as do all slots and pages that no token was written to.
    """
    new = histories if page_size is None else new
    make = torch.Generator(device).manual_seed(seed)
    lengths = np.add(new, candidates)
    fused = torch.randn(int(lengths.sum()), 4 * heads * dim, generator=make, device=device).to(dtype)
    q, k, v = fused.view(-1, 4, heads, dim).unbind(1)[1:]
    offsets = np.append(0, lengths.cumsum())
    kv, parts = None, []
    if page_size is None:
        for user, h in enumerate(histories):
            parts.append((k[offsets[user] :][:h], v[offsets[user] :][:h]))
    else:
        counts = -(-np.asarray(histories) // page_size)
        ids = np.random.default_rng(seed).permutation(int(counts.sum()) + spare_pages - 1)[: counts.sum()] + 1
        pages = np.split(ids.astype(np.int32), counts.cumsum()[:-1])
        table = torch.full(
            (int(counts.sum()) + spare_pages, 2, page_size, heads, dim), math.nan, dtype=dtype, device=device
        )
        for user, h in enumerate(histories):
            keys, values = torch.randn(2, h, heads, dim, generator=make, device=device).to(dtype)
            position = torch.arange(h, device=device)
            page = torch.from_numpy(pages[user]).to(device).long()[position // page_size]
            table[page, 0, position % page_size], table[page, 1, position % page_size] = keys, values
            parts.append((keys, values))
            k[offsets[user] :][: new[user]], v[offsets[user] :][: new[user]] = math.nan, math.nan
        metadata = KVMetadata.build(pages, np.array(histories), np.array(new), np.array(candidates), page_size)
        metadata.validate(page_size, len(table))
        kv = table, metadata.to(device)
    longest = max(int(max(np.add(histories, candidates))), 1)
    return Case(
        q, k, v, torch.tensor(offsets, dtype=torch.int32, device=device),
        torch.tensor(candidates, dtype=torch.int32, device=device), kv, parts, dim**-0.5, float(longest),
    )  # fmt: skip


def relative(a: Tensor, b: Tensor) -> float:
    """Frobenius; NaN anywhere makes it NaN."""
    return float((a.double() - b.double()).norm() / b.double().norm())
