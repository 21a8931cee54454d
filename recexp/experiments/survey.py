"""What each attention backend says to a device."""

from __future__ import annotations

import pandas as pd
import torch

from recexp.devices import SM_DEPENDENT, DeviceProfile
from recexp.layers import attention_backends
from recexp.layers.attention import AttentionRequest, Weighting, refusal

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHTINGS: tuple[Weighting, ...] = ("silu", "softmax")


def refusal_on(backend: str, request: AttentionRequest, profile: DeviceProfile | None = None) -> str | None:
    """``refusal`` of this machine, or, with a profile, of another one on which everything is installed."""
    if profile is None or backend not in SM_DEPENDENT:
        return refusal(backend, request)
    return profile.refuses(backend, request.weighting, request.dtype, request.head_dim, request.page_size)


def as_text(survey: pd.DataFrame) -> str:
    """A survey to read in a terminal: per backend and weighting each answer once, with what gets it."""
    lines = []
    for row in survey.to_dict("records"):
        backend, weighting, note = (row.pop(name, "") for name in ("backend", "weighting", "note"))
        lines.append(f"{backend}, {weighting}" + (f" ({note})" if note else ""))
        answers: dict[str, list[str]] = {}
        for column, answer in row.items():
            answers.setdefault(answer, []).append(str(column))
        for answer, columns in answers.items():
            what = "everything" if len(columns) == len(row) else ", ".join(columns)
            lines.append(f"    yes: {what}" if answer == "yes" else f"    no: {what} ({answer})")
    return "\n".join(lines)


def survey_backends(
    device: torch.device, head_dim: int = 128, page_size: int = 64, profile: DeviceProfile | None = None
) -> pd.DataFrame:
    """A row a backend and weighting: per dtype, with and without a paged cache, "yes" or the reason of the refusal.

    With a profile: what a machine of that SM would say, with a note on what was tried there.
    """
    rows = []
    for name in attention_backends:
        for weighting in WEIGHTINGS:
            row = {"backend": name, "weighting": weighting}
            for dtype in DTYPES:
                for label, pages in (("", None), (f" pages of {page_size}", page_size)):
                    request = AttentionRequest(weighting, device, dtype, 2, head_dim, pages)
                    row[f"{str(dtype).removeprefix('torch.')}{label}"] = refusal_on(name, request, profile) or "yes"
            if profile:
                limits = profile.backends.get(name)
                row["note"] = limits.note if limits else "" if name in SM_DEPENDENT else "plain PyTorch, any device"
            rows.append(row)
    return pd.DataFrame(rows)
