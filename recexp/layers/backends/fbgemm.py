"""Backend ``fbgemm``: FBGEMM's HSTU attention (``hstu.hstu_attn_varlen_func``), where a build of it is installed.

It is in no release wheel; users build it from FBGEMM's source. Argument names are looked up in the installed
signature, because older builds lack scaling_seqlen and the paged arguments. Unverified on hardware.

    SM80, 86, 89, 120: pages of 32 or 64   SM90: no paged cache   SM100: pages of 128   (others read wrong memory)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from recexp.layers.attention import AttentionCall, AttentionRequest, kernel_refusal, register_attention_backend

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
    found = operator()
    if found is None and request.device.type == "cuda":
        return "FBGEMM's HSTU attention (module hstu) is not installed; release wheels do not have it"
    if (reason := kernel_refusal("fbgemm", request)) or found is None or request.page_size is None:
        return reason
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
