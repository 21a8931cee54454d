"""Both layers: the oracles, the residual switch, gradients, a dtype of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recexp.layers import HSTULayer, TransformerLayer

ORACLES = Path(__file__).parents[1] / "oracles"
CASES = ["ragged", "empty", "one", "long"]
WEIGHTS = {
    "hstu": {
        "input_norm": ("ln_w", "ln_b"),
        "uvqk": ("uvqk_w", "uvqk_b"),
        "output_norm": ("out_w", "out_b"),
        "proj": ("proj_w",),
    },
    "transformer": {
        "input_norm": ("ln1_w", "ln1_b"),
        "qkv": ("qkv_w", "qkv_b"),
        "proj": ("proj_w", "proj_b"),
        "ffn_norm": ("ln2_w", "ln2_b"),
        "ffn.0": ("ff1_w", "ff1_b"),
        "ffn.2": ("ff2_w", "ff2_b"),
    },
}


def load(
    kind: str, case: str, dtype: torch.dtype, backend: str, residual: bool = True
) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A layer with an oracle's weights, its inputs, and the expected output (float64)."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(ORACLES / f"{kind}_layer_{case}.npz").items()}
    sizes = arrays["x"].shape[1], int(arrays["num_heads"]), int(arrays["head_dim"])
    if kind == "hstu":
        layer: nn.Module = HSTULayer(
            *sizes,
            scaling_seqlen=float(arrays["scaling_seqlen"]),
            eps=float(arrays["eps"]),
            residual=residual,
            backend=backend,
        )
    else:
        layer = TransformerLayer(
            *sizes, arrays["ff1_w"].shape[1], eps=float(arrays["eps"]), residual=residual, backend=backend
        )
    state = {}
    for name, sources in WEIGHTS[kind].items():
        for suffix, source in zip(("weight", "bias"), sources, strict=False):
            state[f"{name}.{suffix}"] = (
                arrays[source].t() if arrays[source].ndim == 2 else arrays[source]
            )  # oracles multiply from the right
    layer.to(torch.float64).load_state_dict(state)
    return layer.to(dtype), [arrays["x"].to(dtype), arrays["seq_offsets"], arrays["num_candidates"]], arrays["out"]


def relative(a: Tensor, r: Tensor) -> float:
    return float((a.double() - r).norm() / r.norm())


@pytest.mark.parametrize(
    ("backend", "dtype", "bound"), [("reference", torch.float64, 1e-12), ("padded", torch.float32, 1e-6)]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_oracles(kind: str, case: str, backend: str, dtype: torch.dtype, bound: float) -> None:
    layer, inputs, expected = load(kind, case, dtype, backend)
    with torch.no_grad():
        assert relative(layer(*inputs), expected) < bound


def test_no_residual_is_the_layer_less_its_input() -> None:
    layer, inputs, expected = load("hstu", "ragged", torch.float64, "reference", residual=False)
    with torch.no_grad():
        assert relative(layer(*inputs) + inputs[0], expected) < 1e-12


def test_no_residual_drops_both_additions_of_a_transformer() -> None:
    layer, inputs, _ = load("transformer", "ragged", torch.float64, "reference", residual=False)
    seen: dict[str, Tensor] = {}
    layer.proj.register_forward_hook(lambda module, args, out: seen.update(proj=out))
    layer.ffn_norm.register_forward_hook(lambda module, args, out: seen.update(ffn_input=args[0]))
    layer.ffn.register_forward_hook(lambda module, args, out: seen.update(ffn=out))
    out = layer(*inputs)
    assert torch.equal(seen["ffn_input"], seen["proj"]) and torch.equal(out, seen["ffn"])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_padded_trains_as_the_reference_does(kind: str) -> None:
    gradients = []
    for backend in ("reference", "padded"):
        layer, inputs, _ = load(kind, "ragged", torch.float64, backend)
        layer(*inputs).square().sum().backward()
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    for name, expected in gradients[0].items():
        assert relative(gradients[1][name], expected) < 1e-11, name


@pytest.mark.parametrize("kind", WEIGHTS)
def test_default_ffn_is_four_times_hidden_and_heads_may_have_another_width(kind: str) -> None:
    layer = HSTULayer(24, 3, 16, scaling_seqlen=5) if kind == "hstu" else TransformerLayer(24, 3, 16)
    out = layer(torch.randn(5, 24), torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), 5)
    assert out.shape == (5, 24)
    if kind == "transformer":
        assert layer.ffn[0].out_features == 96
