"""Backend ``fbgemm``: FBGEMM's HSTU attention (``hstu.hstu_attn_varlen_func``), where a build of it is installed.

It is in no release wheel; users build it from FBGEMM's source. Argument names are looked up in the installed
signature, because older builds lack scaling_seqlen and the paged arguments. Unverified on hardware.

    SM80, 86, 89, 120: pages of 32 or 64   SM90: no paged cache   SM100: pages of 128
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from recexp.layers.attention import AttentionCall, AttentionRequest, register_attention_backend

PAGE_SIZES = {80: (32, 64), 86: (32, 64), 89: (32, 64), 90: (), 100: (128,), 120: (32, 64)}
PAGED = {"kv_cache", "page_offsets", "page_ids", "last_page_lens"}


@functools.cache
def operator() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """The installed operator and the names of its arguments, or None."""
    try:
        function = import_module("hstu").hstu_attn_varlen_func
    except (ImportError, OSError):
        return None
    return function, frozenset(inspect.signature(function).parameters)


def refuses(request: AttentionRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it runs on CUDA devices, not on {request.device.type}"
    if (found := operator()) is None:
        return "FBGEMM's HSTU attention (module hstu) is not installed; release wheels do not have it"
    if request.weighting != "silu":
        return "it computes SiLU weighting only"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {request.dtype}"
    major, minor = torch.cuda.get_device_capability(request.device)
    sm = 10 * major + minor
    if sm not in PAGE_SIZES:
        return f"it has no kernel for SM{sm}"
    if request.head_dim not in ((64, 128, 256) if sm == 100 else (32, 64, 128, 256)):
        return f"head_dim {request.head_dim} is not one of its kernels'"
    if request.page_size is None:
        return None
    if not PAGE_SIZES[sm]:
        return f"on SM{sm} its wrapper drops the paged cache without a word"
    if request.page_size not in PAGE_SIZES[sm]:
        return f"page_size {request.page_size} on SM{sm}: it reads wrong memory except for {PAGE_SIZES[sm]}"
    return None if found[1] >= PAGED else "the installed build has no paged arguments"


@register_attention_backend("fbgemm", refuses=refuses)
def run(call: AttentionCall) -> Tensor:
    found = operator()
    assert found is not None, "refuses() keeps calls away"
    function, names = found
    longest = call.max_seqlen or int(call.seq_offsets.diff().max())
    arguments = {
        "q": call.q.contiguous(), "k": call.k.contiguous(), "v": call.v.contiguous(),  # its kernels assume packed rows
        "cu_seqlens_q": call.seq_offsets, "cu_seqlens_k": call.seq_offsets, "seqused_q": None, "seqused_k": None,
        "max_seqlen_q": longest, "max_seqlen_k": longest, "num_contexts": None, "num_targets": call.num_candidates,
        "target_group_size": 1, "window_size": (-1, 0), "alpha": call.alpha, "rab": None, "has_drab": False,
        "func": None, "scaling_seqlen": call.scaling_seqlen,
    }  # fmt: skip
    if call.kv is not None:
        table, m = call.kv
        arguments |= {
            "cu_seqlens_k": m.kv_seqlen_offsets, "max_seqlen_k": int(m.kv_seqlens.max()), "kv_cache": table,
            "page_offsets": m.kv_indptr, "page_ids": m.kv_indices, "last_page_lens": m.kv_last_page_len,
        }  # fmt: skip
    out = function(**{name: value for name, value in arguments.items() if name in names}).view_as(call.q)
    # older builds divide by max_seqlen_q
    return out if "scaling_seqlen" in names else out * (longest / call.scaling_seqlen)
