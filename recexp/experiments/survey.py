"""What each attention backend says to a device."""

from __future__ import annotations

import pandas as pd
import torch

from recexp.layers import attention_backends
from recexp.layers.attention import AttentionRequest, Weighting, refusal

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHTINGS: tuple[Weighting, ...] = ("silu", "softmax")


def survey_backends(device: torch.device, head_dim: int = 128, page_size: int = 64) -> pd.DataFrame:
    """A row a backend and weighting: per dtype, with and without a paged cache, "yes" or the reason of the refusal."""
    rows = []
    for name in attention_backends:
        for weighting in WEIGHTINGS:
            row = {"backend": name, "weighting": weighting}
            for dtype in DTYPES:
                for label, pages in (("", None), (f" pages of {page_size}", page_size)):
                    request = AttentionRequest(weighting, device, dtype, 2, head_dim, pages)
                    row[f"{str(dtype).removeprefix('torch.')}{label}"] = refusal(name, request) or "yes"
            rows.append(row)
    return pd.DataFrame(rows)
