"""The oracles once more, their histories cut: the first part comes out of a paged table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recexp.layers import attend
from recexp.layers.paged_kv import append_kv
from recexp.metadata import KVMetadata

from .test_attention import CASES as ATTENTION_CASES
from .test_attention import oracle
from .test_layers import CASES, WEIGHTS, load, relative

Ints = NDArray[np.int64]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE_SIZES = [1, 3, 16, 128]
BACKENDS = ["reference", "padded", "paged", "gather"]
CUTS = {  # history lengths -> cached tokens of each user
    "nothing": lambda h, r: h * 0,
    "one": lambda h, r: np.minimum(h, 1),
    "odd": lambda h, r: np.maximum(h // 2 * 2 - 1, 0),
    "all": lambda h, r: h,
    "any": lambda h, r: r.integers(h + 1),
}


def lengths_of(seq_offsets: Tensor, num_candidates: Tensor) -> tuple[Ints, Ints]:
    """History tokens and candidates of each user, on the host."""
    candidates = num_candidates.numpy().astype(np.int64)
    return np.diff(seq_offsets.numpy().astype(np.int64)) - candidates, candidates


class Paged:
    """Users' pages in random order in a table of NaN, and the metadata of a call on them."""

    def __init__(self, history: Ints, page_size: int, like: Tensor, seed: int = 0) -> None:
        counts = -(-history // page_size)
        ids = np.random.default_rng(seed).permutation(np.arange(1, 3 + counts.sum())).astype(np.int32)
        self.pages, self.page_size = np.split(ids[: counts.sum()], np.cumsum(counts)[:-1]), page_size
        shape = (3 + int(counts.sum()), 2, page_size, *like.shape[1:])
        self.table = torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)

    def metadata(self, total: Ints, new: Ints, candidates: Ints) -> KVMetadata:
        pages = [p[: -(-length // self.page_size)] for p, length in zip(self.pages, total, strict=True)]
        out = KVMetadata.build(pages, total, new, candidates, self.page_size)
        out.validate(self.page_size, self.table.shape[0])
        return out.to(self.table.device)


def rows(seq_offsets: Tensor, start: Ints, end: Ints) -> tuple[Tensor, Tensor]:
    """Row numbers of tokens start … end of each user, and the offsets of these shorter sequences."""
    picked = [np.arange(s, e) + o for s, e, o in zip(start, end, seq_offsets.numpy()[:-1], strict=True)]
    offsets = np.cumsum([0, *map(len, picked)])
    return torch.from_numpy(np.concatenate(picked)), torch.from_numpy(offsets.astype(np.int32))


def is_candidate(new: Ints, candidates: Ints) -> Tensor:
    return torch.from_numpy(np.repeat(np.tile([False, True], len(new)), np.stack([new, candidates], 1).ravel()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("weighting", ["silu", "softmax"])
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_attention(case: str, weighting: str, page_size: int, backend: str, device: str) -> None:
    (q, k, v, seq_offsets, num_candidates), numbers, expected = oracle(case)
    history, candidates = lengths_of(seq_offsets, num_candidates)
    random = np.random.default_rng(page_size)
    for cut in CUTS.values():
        cached = cut(history, random)
        paged = Paged(history, page_size, k.to(device))
        prefix, offsets = rows(seq_offsets, history * 0, cached)
        first = paged.metadata(cached, cached, candidates * 0)
        append_kv(paged.table, first, k[prefix].to(device), v[prefix].to(device), offsets.to(device))
        rest, offsets = rows(seq_offsets, cached, history + candidates)
        inputs = [x[rest].to(device) for x in (q, k, v)]
        metadata, offsets = paged.metadata(history, history - cached, candidates), offsets.to(device)
        append_kv(paged.table, metadata, *inputs[1:], offsets)
        for x in inputs[1:]:  # from here on the history's rows of k and v are not read
            x[(~is_candidate(history - cached, candidates)).to(device)] = torch.nan
        out = attend(
            *inputs,
            offsets,
            num_candidates.to(device),
            weighting=weighting,
            backend=backend,
            kv=(paged.table, metadata),
            **numbers,
        )
        assert out.isfinite().all()
        if len(rest):
            assert relative(out.cpu(), expected[weighting][rest]) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_layers(kind: str, case: str, page_size: int, backend: str, device: str) -> None:
    """A layer sees the first tokens in one call and the others in the next: every row is the oracle's."""
    layer, (x, seq_offsets, num_candidates), expected = load(kind, case, torch.float64, backend)
    layer = layer.to(device)
    history, candidates = lengths_of(seq_offsets, num_candidates)
    random = np.random.default_rng(page_size)
    heads = torch.empty(0, layer.num_heads, layer.head_dim, dtype=x.dtype, device=device)
    for cut in CUTS.values():
        cached = cut(history, random)
        paged = Paged(history, page_size, heads)
        out = torch.full_like(expected, torch.nan)
        for start, end, num in (
            (history * 0, cached, candidates * 0),
            (cached, history + candidates, candidates),
        ):
            index, offsets = rows(seq_offsets, start, end)
            total = np.minimum(end, history)
            kv = (paged.table, paged.metadata(total, total - start, num))
            with torch.no_grad():
                y = layer(
                    x[index].to(device),
                    offsets.to(device),
                    torch.from_numpy(num.astype(np.int32)).to(device),
                    int((end - start).max()),
                    kv,
                )
            out[index] = y.cpu()
        assert relative(out, expected) < 1e-12
