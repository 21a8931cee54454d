"""FlexAttention against float64, FBGEMM's operator by a stand-in of the same signature, and the choice between
backends.
"""

import sys
import types

import pytest
import torch
from attention_cases import make_case, relative

from recexp.layers.attention import AttentionRequest, attend, refusal
from recexp.layers.backends import fbgemm
from recexp.layers.backends.auto import select

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def request(
    device=CUDA, weighting="silu", dtype=torch.bfloat16, dim=128, page_size=None, grad=False
) -> AttentionRequest:
    return AttentionRequest(weighting, device, dtype, 8, dim, page_size, grad)


@pytest.fixture
def on_sm(monkeypatch):
    """Pretend that CUDA devices are of this SM."""
    return lambda sm: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))


def operator(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, scaling_seqlen=-1,
    num_contexts=None, num_targets=None, target_group_size=1, window_size=(-1, -1), alpha=1.0, rab=None,
    has_drab=False, kv_cache=None, page_offsets=None, page_ids=None, last_page_lens=None, func=None, quant_mode=-1,
):  # fmt: skip
    """FBGEMM's signature; computes by the rule, in float64, what its documentation says."""
    assert q.is_contiguous() and window_size == (-1, 0) and seqused_q is None and kv_cache is None
    assert (max_seqlen_q, target_group_size) == (int(cu_seqlens_q.diff().max()), 1)
    n = max_seqlen_q if scaling_seqlen == -1 else scaling_seqlen
    args = (*(x.double() for x in (q, k, v)), cu_seqlens_q, num_targets)
    return attend(*args, weighting="silu", alpha=alpha, scaling_seqlen=float(n)).to(q.dtype)


def old_operator(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_targets, window_size, alpha):
    return operator(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k, num_targets=num_targets,
        window_size=window_size, alpha=alpha,
    )  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    def install(function):
        monkeypatch.setitem(sys.modules, "hstu", types.SimpleNamespace(hstu_attn_varlen_func=function))
        fbgemm.operator.cache_clear()

    yield install
    fbgemm.operator.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_the_truth():
    case = make_case([40, 0, 1, 7], None, [3, 2, 0, 5], 2, 16, None)
    out = attend(*case.args, weighting="softmax", alpha=case.alpha, backend="flex")
    assert relative(out, case.truth("softmax")) <= 1e-5


def test_flex_refuses_silu_and_pages():
    assert "softmax" in refusal("flex", request(CPU))
    assert "paged" in refusal("flex", request(CPU, "softmax", page_size=64))


def test_flex_refuses_float64_where_it_is_compiled():
    assert "no FlexAttention of float64" in refusal("flex", request(CUDA, "softmax", torch.float64))
    assert refusal("flex", request(CUDA, "softmax")) is refusal("flex", request(CPU, "softmax", torch.float64)) is None


@pytest.mark.parametrize("function", [operator, old_operator])
def test_fbgemm_gets_arguments_of_the_installed_signature(installed, function):
    installed(function)
    case = make_case([40, 0, 1, 7], None, [3, 2, 0, 5], 2, 32, None)
    out = fbgemm.run(case.call("silu"))
    assert relative(out, case.truth("silu")) <= 1e-6


@pytest.mark.parametrize(
    ("sm", "page_size", "reason"),
    [
        (90, 64, "drops the paged cache"),
        (80, 128, "page_size 128 is not (32, 64)"),
        (100, 64, "page_size 64 is not (128,)"),
        (100, 128, None),
        (80, 32, None),
        (75, None, "no kernel for SM75"),
        (90, None, None),
    ],
)
def test_fbgemm_refuses_by_sm_and_page_size(installed, on_sm, sm, page_size, reason):
    installed(operator)
    on_sm(sm)
    answer = refusal("fbgemm", request(page_size=page_size))
    assert answer is None if reason is None else reason in answer


def test_fbgemm_refuses_an_old_build_and_none(installed, on_sm):
    on_sm(80)
    installed(old_operator)
    assert "no paged arguments" in refusal("fbgemm", request(page_size=64))
    installed(None)
    sys.modules["hstu"] = None  # what an import that cannot succeed looks like
    assert "not installed" in refusal("fbgemm", request())


def test_select_takes_the_fastest_that_does_not_refuse(on_sm):
    assert select(request(CPU))[0] == "padded"
    assert select(request(CPU, dtype=torch.float64))[0] == "reference"
    on_sm(80)
    name, why = select(request(dtype=torch.float16, page_size=64))
    assert name == "triton" and "gluon refuses" in why and "fbgemm refuses" in why
    assert select(request(weighting="softmax", dtype=torch.float16, grad=True))[0] == "padded"
