"""The fused HSTU layer against the plain layer in float64, with and without a cache; its append against append_kv."""

import copy
import math

import numpy as np
import pytest
import torch
from attention_cases import make_case, relative

from recexp.layers import HSTULayer
from recexp.layers.paged_kv import append_kv

fused = pytest.importorskip("recexp.layers.fused", exc_type=ImportError)
if not fused.triton.AVAILABLE:
    pytest.skip("Triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HIDDEN, HEADS, DIM = 96, 4, 64


def make_layer(
    dtype: torch.dtype, backend: str = "triton", hidden: int = HIDDEN, dim: int = DIM, **options
) -> HSTULayer:
    torch.manual_seed(0)
    layer = HSTULayer(hidden, HEADS, dim, scaling_seqlen=64.0, backend=backend, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    return layer.to(DEVICE, dtype).eval()


def make_request(page_size: int | None, dtype: torch.dtype, hidden: int = HIDDEN, dim: int = DIM):
    """x and lengths; with pages the cached part is random and the new part still NaN, as it is before the append."""
    case = make_case([9, 0, 40, 16], [4, 0, 1, 16], [3, 2, 0, 5], HEADS, dim, page_size, dtype, DEVICE)
    x = torch.randn(len(case.q), hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    if page_size is not None:
        table, metadata = case.kv
        users = metadata.batch_indices.long()
        page = metadata.kv_indices[metadata.kv_indptr[users] + metadata.position // page_size].long()
        table[page, :, (metadata.position % page_size).long()] = math.nan
    return x, case


def run(layer, function, x, case, kv):
    with torch.no_grad():
        return function(layer, x, case.seq_offsets, case.num_candidates, None, kv)


def reference(layer, x, case, kv):
    plain = copy.deepcopy(layer)
    plain.attention.backend = "reference"
    return run(plain, lambda layer, *args: layer(*args), x, case, kv)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("page_size", [None, 8])
def test_float32_equals_the_plain_layer(page_size, residual):
    layer = make_layer(torch.float32, residual=residual)
    x, case = make_request(page_size, torch.float32)
    kv64 = None if case.kv is None else (case.kv[0].double(), case.kv[1])
    truth = reference(layer.double(), x.double(), case, kv64)
    layer.float()
    assert relative(run(layer, fused.fused_hstu_layer, x, case, case.kv), truth) <= 1e-5
    if case.kv is not None:
        ours, theirs = case.kv[0], kv64[0]
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert relative(ours.nan_to_num(), theirs.nan_to_num()) <= 1e-6


def test_append_writes_the_projection_bit_for_bit():
    layer = make_layer(torch.float16)
    x, case = make_request(8, torch.float16)
    table = case.kv[0].clone()
    kept = []
    real = fused.project
    fused.project = lambda *args, **options: kept.append(real(*args, **options)) or kept[-1]
    try:
        run(layer, fused.fused_hstu_layer, x, case, case.kv)
    finally:
        fused.project = real
    _, v, _, k = kept[0].unflatten(-1, (4, HEADS, DIM)).unbind(1)
    append_kv(table, case.kv[1], k, v, case.seq_offsets)
    assert torch.equal(table.nan_to_num(nan=9.0), case.kv[0].nan_to_num(nan=9.0))


def test_refuses_other_backends_and_widths():
    x, case = make_request(8, torch.float32)
    with pytest.raises(ValueError, match="triton or gluon"):
        run(make_layer(torch.float32, "padded"), fused.fused_hstu_layer, x, case, case.kv)
    x, case = make_request(8, torch.float32, dim=24)
    with pytest.raises(ValueError, match="multiple of 256"):
        run(make_layer(torch.float32, dim=24), fused.fused_hstu_layer, x, case, case.kv)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_native_error_is_that_of_the_plain_layer(backend, users, page_size):
    layer = make_layer(torch.bfloat16, backend, hidden=1024, dim=256)
    rng = np.random.default_rng(0)
    histories = rng.integers(0, 1500, users) + 300
    new = rng.integers(0, 300, users)
    case = make_case(histories, new, rng.integers(0, 100, users), HEADS, 256, page_size, torch.bfloat16, DEVICE)
    x = torch.randn(len(case.q), 1024, device=DEVICE).bfloat16()
    kvs = [
        None if case.kv is None else (case.kv[0].to(dtype).clone(), case.kv[1])
        for dtype in (torch.float64, *[torch.bfloat16] * 2)
    ]
    truth = reference(copy.deepcopy(layer).double(), x.double(), case, kvs[0])
    plain = reference(layer, x, case, kvs[1])
    assert relative(run(layer, fused.fused_hstu_layer, x, case, kvs[2]), truth) <= 2 * relative(plain, truth)
