"""Which backend a request gets when nobody named one: the first of ORDER that does not refuse it, and why."""

from __future__ import annotations

from functools import cache

import torch

from recexp.layers.attention import AttentionRequest, backends, refusal

ORDER = ("gluon", "fbgemm", "triton", "flex", "padded", "reference")  # by measured speed on an H200


@cache
def select(request: AttentionRequest) -> tuple[str, str]:
    """(backend, why): why names every faster one that refused and its reason.

    float64 gets the reference, whose cached and uncached results agree to its rounding. CPUs and training start at
    padded: the kernels are for inference on a GPU.
    """
    if request.dtype == torch.float64:
        return "reference", "float64 is the reference's dtype"
    inference = request.device.type == "cuda" and not request.requires_grad
    order = ORDER if inference else ORDER[ORDER.index("padded") :]
    refused = []
    for name in order:
        if name not in backends:
            continue
        if reason := refusal(name, request):
            refused.append(f"{name} refuses: {reason}")
        else:
            return name, "; ".join([f"the fastest here that takes {request}", *refused])
    raise ValueError(f"no attention backend takes {request}: {'; '.join(refused)}")
