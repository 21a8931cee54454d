"""attend: the oracles, the rule, candidate independence, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recexp.layers import attend, attention_backends, register_attention_backend
from recexp.layers.attention import AttentionCall, AttentionRequest

ORACLES = Path(__file__).parents[1] / "oracles"
CASES = sorted(path.stem.removeprefix("attention_") for path in ORACLES.glob("attention_*.npz"))
PRECISE = {torch.float64: 1e-12, torch.float32: 1e-6}
BOUNDS = {(name, dtype): bound for name in ("padded", "paged", "gather") for dtype, bound in PRECISE.items()}
BOUNDS |= {("reference", torch.float64): 1e-12}


def relative(a: Tensor, r: Tensor) -> float:
    return float((a.double() - r).norm() / r.norm())


def oracle(case: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, float], dict[str, Tensor]]:
    arrays = np.load(ORACLES / f"attention_{case}.npz")
    inputs = [torch.from_numpy(arrays[name]).to(dtype) for name in "qkv"]
    inputs += [torch.from_numpy(arrays[name]) for name in ("seq_offsets", "num_candidates")]
    settings = {name: float(arrays[name]) for name in ("alpha", "scaling_seqlen")}
    return inputs, settings, {name: torch.from_numpy(arrays[name]) for name in ("silu", "softmax")}


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
@pytest.mark.parametrize(("backend", "dtype"), BOUNDS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_oracles(case: str, backend: str, dtype: torch.dtype, weighting: str) -> None:
    inputs, numbers, expected = oracle(case, dtype)
    out = attend(*inputs, weighting=weighting, backend=backend, **numbers)
    assert relative(out, expected[weighting]) < BOUNDS[backend, dtype]


@pytest.mark.parametrize("backend", ["reference", "padded", "paged", "gather"])
@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_strided_rows_are_taken_as_they_are(weighting: str, backend: str) -> None:
    (q, k, v, *lengths), numbers, expected = oracle("ragged")
    fused = torch.stack([q, k, v], dim=1)
    out = attend(*fused.unbind(1), *lengths, weighting=weighting, backend=backend, **numbers)
    assert not fused.unbind(1)[0].is_contiguous()
    assert relative(out, expected[weighting]) < 1e-12


@st.composite
def users(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(1, 4))
    return [draw(st.integers(0, 70)) for _ in range(size)], [draw(st.integers(0, 40)) for _ in range(size)]


def inputs_of(history: list[int], candidates: list[int], seed: int, dim: int = 8) -> list[Tensor]:
    lengths = torch.tensor(history) + torch.tensor(candidates)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(int(lengths.sum()), 2, dim, dtype=torch.float64, generator=generator) for _ in range(3))
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
    return [q, k, v, offsets, torch.tensor(candidates, dtype=torch.int32)]


@settings(max_examples=40, deadline=None)
@given(users(), st.sampled_from(["silu", "softmax"]), st.integers(0, 10**6))
def test_reference_follows_the_rule_written_as_a_mask(
    lengths: tuple[list[int], list[int]], weighting: str, seed: int
) -> None:
    """One dense matrix over all tokens of the batch, with visible(i, j) spelled out, gives the same."""
    inputs = inputs_of(*lengths, seed)
    q, k, v, offsets, candidates = inputs
    size = torch.arange(q.shape[0])
    user = torch.bucketize(size, offsets[1:], right=True)
    position = size - offsets[user]
    h = (offsets.diff() - candidates)[user]
    i, j = position[:, None], position[None, :]
    visible = (user[:, None] == user[None, :]) & (j <= i) & ((j < h[None, :]) | (j == i))
    scores = torch.einsum("ihd,jhd->hij", q, k) * 0.3
    weights = (
        (scores * scores.sigmoid() * visible / 11)
        if weighting == "silu"
        else scores.masked_fill(~visible, -torch.inf).softmax(-1)
    )
    expected = torch.einsum("hij,jhd->ihd", weights, v)
    for backend in ("reference", "padded", "paged", "gather"):
        out = attend(*inputs, weighting=weighting, alpha=0.3, scaling_seqlen=11, backend=backend)
        assert torch.allclose(out, expected, rtol=1e-11, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(2, 40),
    st.integers(1, 33),
    st.sampled_from(["silu", "softmax"]),
    st.integers(0, 10**6),
)
def test_candidates_do_not_see_each_other(history: int, candidates: int, dim: int, weighting: str, seed: int) -> None:
    """Permuting them is bit-exact; leaving some out moves the others by no more than rounding."""
    q, k, v, *_ = inputs_of([history], [candidates], seed, dim)

    def run(rows: Tensor) -> Tensor:
        many = torch.tensor([len(rows) - history], dtype=torch.int32)
        ends = torch.tensor([0, len(rows)], dtype=torch.int32)
        return attend(q[rows], k[rows], v[rows], ends, many, weighting=weighting, alpha=0.3, scaling_seqlen=11)

    before = torch.arange(history)
    all_rows = run(torch.arange(history + candidates))
    order = torch.cat([before, history + torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))])
    assert torch.equal(run(order), all_rows[order])
    fewer = order[: history + candidates // 2]
    assert torch.allclose(run(fewer), all_rows[fewer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_padded_has_the_gradients_of_the_reference(weighting: str) -> None:
    gradients = []
    for backend in ("reference", "padded"):
        inputs = inputs_of([5, 0, 9, 0], [3, 4, 0, 0], seed=1)
        q, k, v = (t.requires_grad_() for t in inputs[:3])
        attend(*inputs, weighting=weighting, alpha=0.3, scaling_seqlen=11, backend=backend).square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad])
    for tested, expected in zip(*gradients, strict=True):
        assert torch.isfinite(tested).all() and relative(tested, expected) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "padded", "paged", "gather"])
def test_nobody_and_nothing(backend: str) -> None:
    empty = torch.zeros(0, 2, 8)
    for size in (0, 3):
        lengths = [torch.zeros(size + 1, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)]
        assert attend(empty, empty, empty, *lengths, weighting="softmax", alpha=1.0, backend=backend).shape == (0, 2, 8)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_rows_behind_the_last_user_become_0_or_are_refused(weighting: str) -> None:
    """A static buffer holds more rows than the request, of any bits, and more users: those have no rows."""
    (q, k, v, offsets, candidates), settings = inputs_of([5, 0, 9], [3, 4, 0], 1), {"alpha": 0.3, "scaling_seqlen": 11}
    expected = attend(q, k, v, offsets, candidates, weighting=weighting, **settings)
    padded = [torch.cat([x, torch.full((4, 2, 8), torch.nan)]) for x in (q, k, v)]
    lengths = torch.cat([offsets, offsets[-1:]]), torch.cat([candidates, candidates[:1] * 0])
    out = attend(*padded, *lengths, weighting=weighting, backend="paged", **settings)
    assert relative(out[:-4], expected) < 1e-12 and torch.equal(out[-4:], torch.zeros(4, 2, 8))
    with pytest.raises(ValueError, match="run from 0 to 21; 25 tokens need 0 to 25"):
        attend(*padded, *lengths, weighting=weighting, backend="padded", **settings)


def q_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


LENGTHS = (torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": q_of(3, 2, 4)}, "q, k and v must be alike"),
        ({"v": q_of(3, 2, 8, dtype=torch.float64)}, "q, k and v must be alike"),
        ({"weighting": "relu"}, "weighting 'relu'; known: silu, softmax"),
        ({"scaling_seqlen": None}, "scaling_seqlen None"),
        ({"scaling_seqlen": -1}, "scaling_seqlen -1"),
        ({"num_candidates": torch.tensor([4], dtype=torch.int32)}, "row 0 has 4 candidates and 3 tokens"),
        ({"seq_offsets": torch.tensor([0, 2], dtype=torch.int32)}, "3 tokens need 0 to 3"),
        ({"seq_offsets": torch.tensor([0.0, 3.0])}, "seq_offsets must be a 1-D int32 tensor, got torch.float32"),
        ({"max_seqlen": 2}, "max_seqlen 2 is below 3, the longest row"),
        ({"max_seqlen": 3.0}, "max_seqlen 3.0 must be a host integer"),
        ({name: q_of(3, 2, 8, dtype=torch.int64) for name in "qkv"}, "takes floating-point tensors"),
        ({"q": q_of(3, 2, 8).to("meta")}, "are on cpu, meta; send them to one"),
        ({"backend": "padde"}, "unknown attention backend 'padde'; did you mean 'padded'?"),
        ({"kv": (q_of(4, 2, 16, 2, 4), None)}, r"needs torch.float32 \[num_pages, 2, page_size, 2, 8\]"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {name: q_of(3, 2, 8) for name in "qkv"}
    arguments |= {
        "seq_offsets": LENGTHS[0],
        "num_candidates": LENGTHS[1],
        "weighting": "silu",
        "alpha": 1.0,
        "scaling_seqlen": 9,
    }
    with pytest.raises(ValueError, match=message):
        attend(**(arguments | change))  # type: ignore[arg-type]


def test_a_backend_of_ones_own_may_refuse_and_be_defined_twice() -> None:
    def zeros(call: AttentionCall) -> Tensor:
        return torch.zeros_like(call.q)

    def register(limit: int) -> Callable[..., Tensor]:
        decorate = register_attention_backend(
            "zeros",
            refuses=lambda request: (
                None if request.head_dim <= limit else f"head_dim {request.head_dim} is above {limit}"
            ),
        )
        return decorate(zeros)

    register(4)
    register(8)
    arguments = {"weighting": "softmax", "alpha": 1.0, "backend": "zeros"}
    assert attend(*[q_of(3, 2, 8)] * 3, *LENGTHS, **arguments).shape == (3, 2, 8)
    with pytest.raises(ValueError, match=r"backend 'zeros' refuses .*: head_dim 16 is above 8"):
        attend(*[q_of(3, 2, 16)] * 3, *LENGTHS, **arguments)
    with pytest.raises(ValueError, match=r"'zeros' refuses .*: it has no gradients"):
        attend(q_of(3, 2, 8).requires_grad_(), q_of(3, 2, 8), q_of(3, 2, 8), *LENGTHS, **arguments)
    with pytest.raises(ValueError, match="'padded' belongs to recexp"):
        register_attention_backend("padded")(zeros)
    assert "zeros" in attention_backends


def test_auto_names_its_choice_and_trains() -> None:
    """On a CPU float64 gets the reference and everything else the padded path, bit for bit; gradients are had."""
    from recexp.layers.backends.auto import select

    for dtype, name in ((torch.float64, "reference"), (torch.float32, "padded"), (torch.bfloat16, "padded")):
        inputs, numbers, _ = oracle("ragged", dtype)
        auto, named = (attend(*inputs, weighting="silu", backend=backend, **numbers) for backend in ("auto", name))
        assert torch.equal(auto, named)
        assert select(AttentionRequest("silu", torch.device("cpu"), dtype, 2, 8))[0] == name
    inputs, numbers, _ = oracle("ragged", torch.float32)
    attend(inputs[0].requires_grad_(), *inputs[1:], weighting="silu", backend="auto", **numbers).sum().backward()
    assert inputs[0].grad is not None
    for device in ("cpu", "cuda"):
        request = AttentionRequest("softmax", torch.device(device), torch.float32, 2, 8, requires_grad=True)
        assert select(request)[0] == "padded"
