"""The README's library example runs as printed, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_library_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code.count("\n") <= 13
    names: dict[str, object] = {}
    exec(code.replace("logits = model.predict_cached", "cached = model.predict_cached"), names)
    logits, cached = names["logits"], names["cached"]
    assert isinstance(logits, torch.Tensor) and isinstance(cached, torch.Tensor) and logits.shape == (3, 2)
    assert (cached - logits).norm() / logits.norm() < 1e-5


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links(link: str) -> None:
    assert (ROOT / link).exists()
