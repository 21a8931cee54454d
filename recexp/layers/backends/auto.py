"""Which backend a request gets when nobody named one: the first of ORDER that does not refuse it, and why."""

from __future__ import annotations

import torch

from recexp.layers.attention import AttentionRequest, backends, refusal

ORDER = (
    "gluon",
    "fbgemm",
    "triton",
    "flex",
    "padded",
    "reference",
)  # by measured speed on an H200; CPUs start at padded


def select(request: AttentionRequest) -> tuple[str, str]:
    """(backend, why): why names every faster one that refused and its reason.

    float64 gets the reference, whose cached and uncached results agree to its rounding.
    """
    if request.dtype == torch.float64:
        return "reference", "float64 is the reference's dtype"
    order = ORDER if request.device.type == "cuda" else ORDER[ORDER.index("padded") :]
    refused = []
    for name in order:
        if name not in backends:
            continue
        if reason := refusal(name, request):
            refused.append(f"{name} refuses: {reason}")
        else:
            return name, "; ".join([f"the fastest here that takes {request}", *refused])
    raise ValueError(f"no attention backend takes {request}: {'; '.join(refused)}")
