"""How far two results lie apart, and what a user of the model sees of it.

"Relative" is the Frobenius norm of the difference over that of the reference, everywhere.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # largest relative difference between equal paths of one dtype
Trace = dict[tuple[str, str], Tensor]  # what each (layer, operation) gave


@dataclass(frozen=True)
class Difference:
    """A tested result against a reference. NaN on either side, or infinity not the same on both, is an infinite
    difference. The worst element has the largest |a - r|; () and NaN when there are no elements."""

    max_abs: float
    relative: float
    fraction_outside: float
    worst_index: tuple[int, ...]
    worst_tested: float
    worst_reference: float


def difference(a: Tensor, r: Tensor, atol: float = 1e-8, rtol: float = 1e-5) -> Difference:
    """Compare a (tested) with r (reference), any dtypes and devices, in float64; an element is outside when
    |a - r| > atol + rtol |r|. ValueError when the shapes differ."""
    if a.shape != r.shape:
        raise ValueError(f"cannot compare shape {list(a.shape)} with the reference's {list(r.shape)}")
    a, r = (x.detach().to("cpu", torch.float64) for x in (a, r))
    if a.numel() == 0:
        return Difference(0.0, 0.0, 0.0, (), math.nan, math.nan)
    delta = torch.where(a == r, 0.0, (a - r).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    outside = (delta > atol + rtol * r.abs()) | delta.isinf()
    off, scale = float(delta.norm()), float(r[r.isfinite()].norm())
    relative = 0.0 if off == 0 else off / scale if scale else math.inf
    worst = tuple(int(i) for i in np.unravel_index(int(delta.argmax()), delta.shape))
    fraction = float(outside.double().mean())
    return Difference(float(delta.max()), relative, fraction, worst, float(a[worst]), float(r[worst]))


def equal(a: Tensor, r: Tensor, dtype: torch.dtype, plain: Tensor | None = None) -> bool:
    """Whether a path of this dtype gave the same result: relative difference from r at most 1e-12 in float64, 1e-5 in
    float32; in bfloat16 and float16 at most twice that of plain, the plain path's result in the same dtype, r being
    float64. ValueError: another dtype, or plain missing where it is the yardstick."""
    if dtype in LIMITS:
        limit = LIMITS[dtype]
    elif dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"no rule for {dtype}; there is one for float64, float32, bfloat16 and float16")
    elif plain is None or r.dtype != torch.float64:
        raise ValueError(f"{dtype} is judged against float64 by the plain path's own error: give plain and a float64 r")
    else:
        limit = 2 * difference(plain, r).relative
    relative = difference(a, r).relative
    return math.isfinite(relative) and relative <= limit


def ranking_difference(scores_a: Any, scores_r: Any, num_candidates: Any, k: int = 3) -> dict[str, float]:
    """Compare the order of each user's candidates. scores_a, scores_r: [sum(num_candidates)], num_candidates: [B],
    tensors or arrays. Ties keep the candidates' order.

    Kendall tau (tau-b): mean over users with two candidates or more; scores all tied on one side only count as 0, on
    both as 1. pairs moved: of the pairs that the reference puts in an order, those reversed or tied. top-k replaced: of
    the places in the first k of users with more candidates. NaN: a mean over nobody.
    ValueError: lengths disagree, a score is NaN, k < 1.
    """
    a, r = _array(scores_a), _array(scores_r)
    counts = _array(num_candidates).astype(np.int64)
    if not a.shape == r.shape == (counts.sum(),):
        raise ValueError(f"{counts.sum()} candidates need that many scores, got shapes {a.shape} and {r.shape}")
    if np.isnan(a).any() or np.isnan(r).any():
        raise ValueError(f"NaN has no rank: {np.isnan(a).sum()} of the tested, {np.isnan(r).sum()} of the reference")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    taus, replaced, moved = list[float](), list[float](), list[np.ndarray]()
    ends = counts.cumsum()[:-1]
    for x, y in zip(np.split(a, ends), np.split(r, ends), strict=True):
        later = np.triu_indices(len(x), 1)
        up, should = (np.sign(z[:, None] - z)[later] for z in (x, y))  # of every pair: 1, -1, or 0 where tied
        if len(up):
            root = math.sqrt((up**2).sum() * (should**2).sum())
            taus.append((up * should).sum() / root if root else float((up == should).all()))
            moved.append((up != should)[should != 0])
        if len(x) > k:
            top = [set(np.argsort(-z, kind="stable")[:k]) for z in (x, y)]
            replaced.append(1 - len(top[0] & top[1]) / k)
    pairs = np.concatenate(moved) if moved else np.empty(0)
    tau, gone, off = (float(np.mean(v)) if len(v) else math.nan for v in (taus, replaced, pairs))
    return {"Kendall tau": tau, "pairs": len(pairs), "pairs moved, %": 100 * off, f"top-{k} replaced, %": 100 * gone}


def _array(values: Any) -> np.ndarray:
    return torch.as_tensor(values).detach().to("cpu", torch.float64).numpy()


def trace(model: nn.Module, call: Callable[[], Any]) -> Trace:
    """The output of every submodule while call() runs, by (layer, operation) in the order of execution, as CPU copies.

    Submodule `layers.<i>.<name>` is operation <name> of layer <i>, `layers.<i>` itself its "output"; elsewhere the
    first part of the name stands for the layer. A submodule called again gets " (2)", and so on. What call() returns is
    ("model", "output"). Dropout, and outputs that neither are a tensor nor hold one as `.values`, are left out.
    """
    found: Trace = {}
    calls: Counter[tuple[str, str]] = Counter()

    def keep(key: tuple[str, str], module: Any, args: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else getattr(output, "values", None)
        if isinstance(tensor, Tensor):
            calls[key] += 1
            again = f" ({calls[key]})" if calls[key] > 1 else ""
            found[key[0], key[1] + again] = tensor.detach().to("cpu", copy=True)

    hooks = []
    for name, module in model.named_modules():
        match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.(.+))?$", name)
        layer, operation = match.groups() if match else name.partition(".")[::2]
        if name and not isinstance(module, nn.Dropout | nn.Identity):  # the model itself: its result
            hooks.append(module.register_forward_hook(partial(keep, (layer, operation or "output"))))
    try:
        keep(("model", "output"), model, (), call())
    finally:
        for hook in hooks:
            hook.remove()
    return found


def trace_differences(a: Trace, r: Trace, atol: float = 1e-8, rtol: float = 1e-5) -> pd.DataFrame:
    """A row for each operation of either trace: layer, operation, the fields of Difference, or the reason why not."""
    rows = []
    for key in {**r, **a}:
        row: dict[str, Any] = {"layer": key[0], "operation": key[1], "reason": ""}
        if key not in a or key not in r:
            row["reason"] = f"only in the {'tested' if key in a else 'reference'} model"
        elif a[key].shape != r[key].shape:
            row["reason"] = f"shape {list(a[key].shape)} against {list(r[key].shape)}"
        else:
            row |= asdict(difference(a[key], r[key], atol, rtol))
        rows.append(row)
    return pd.DataFrame(rows, columns=["layer", "operation", "reason", *Difference.__dataclass_fields__])
