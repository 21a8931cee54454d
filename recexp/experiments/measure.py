"""Latency, memory and the machine's own ceilings, taken one way everywhere."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from recexp.layers import Attention
from recexp.model import RankingModel

BLOCK = 25  # calls queued before waiting: few enough to keep to the time limit, many enough to hide the waiting


@dataclass(frozen=True)
class Latency:
    """Milliseconds on the device (p10, p50, p90 of count calls) and on the host's clock, results awaited. Peak memory
    is what PyTorch's allocator held, in bytes; None on a CPU, where nothing counts it."""

    p10_ms: float
    p50_ms: float
    p90_ms: float
    count: int
    host_p50_ms: float
    peak_memory_bytes: int | None


class Ceilings(NamedTuple):
    """What this device reached in this process: a large matrix product, and a large copy (read and write counted)."""

    tflops: float
    gbps: float


def measure(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, device: torch.device | str,
    min_runs: int = 20, max_runs: int = 200, max_seconds: float = 2.0,
) -> Latency:  # fmt: skip
    """Time `fn(*inputs[i])`, i going round, so that caches do not hold the inputs when these are large or many enough.

    A GPU is timed by two events a call on the current stream (work on other streams counts if fn makes this one wait
    for it), calls queued behind one another; a CPU by the clock. Each input runs once untimed (it may compile), then
    blocks of calls until two successive medians agree within 3%, for at most max_seconds. Then min_runs timed calls,
    and more until max_runs or max_seconds. ValueError: no inputs, or not 1 <= min_runs <= max_runs.
    """
    if not inputs:
        raise ValueError("measure needs at least one tuple of inputs, got none")
    if not 1 <= min_runs <= max_runs:
        raise ValueError(f"need 1 <= min_runs <= max_runs, got min_runs={min_runs} and max_runs={max_runs}")
    device = torch.device(device)
    cuda = device.type == "cuda"
    with torch.cuda.device(device) if cuda else nullcontext():
        _timed(fn, inputs, 0, len(inputs), cuda)
        calls, last, begin = len(inputs), 0.0, time.perf_counter()
        while time.perf_counter() - begin < max_seconds:  # until stable
            now, calls = statistics.median(_timed(fn, inputs, calls, 5, cuda)), calls + 5
            if abs(now - last) <= 0.03 * now:
                break
            last = now
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        times, begin = list[float](), time.perf_counter()
        while len(times) < min_runs or (len(times) < max_runs and time.perf_counter() - begin < max_seconds):
            limit = min_runs if len(times) < min_runs else max_runs
            times += _timed(fn, inputs, calls + len(times), min(BLOCK, limit - len(times)), cuda)
        p10, p50, p90 = np.percentile(times, [10, 50, 90])
        peak, host = None, float(p50)
        if cuda:
            peak = torch.cuda.max_memory_allocated(device)
            host = statistics.median(_timed(fn, inputs, i, 1, cuda, host=True)[0] for i in range(min_runs))
    return Latency(float(p10), float(p50), float(p90), len(times), host, peak)


def measure_undisturbed(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], **options: Any) -> Latency:
    """``measure``, again up to twice while p90 exceeds p10 by half, as when something else runs; the steadiest."""
    tries = [measure(fn, inputs, **options)]
    while tries[-1].p90_ms > 1.5 * tries[-1].p10_ms and len(tries) < 3:
        tries.append(measure(fn, inputs, **options))
    return min(tries, key=lambda latency: latency.p90_ms / latency.p10_ms)


def _timed(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], first: int, count: int, cuda: bool, host: bool = False
) -> list[float]:
    """Milliseconds of each of count calls: by events on a GPU, by the clock on a CPU or where host asks for it."""
    if cuda and not host:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for i, (begin, end) in enumerate(marks, first):
            begin.record()
            fn(*inputs[i % len(inputs)])
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]
    times = []
    for i in range(first, first + count):
        start = time.perf_counter()
        fn(*inputs[i % len(inputs)])
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


@functools.cache
def ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    """TFLOP/s of a large matrix product of this dtype and GB/s of a large copy on this device, once a process."""
    n, copied = (8192, 2**30) if torch.device(device).type == "cuda" else (1024, 2**28)
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    source, target = torch.ones(2, copied, dtype=torch.uint8, device=device)
    gemm = measure(lambda: torch.mm(a, b, out=c), [()], device=device, min_runs=5, max_seconds=0.5)
    copy = measure(lambda: target.copy_(source), [()], device=device, min_runs=5, max_seconds=0.5)
    return Ceilings(tflops=2 * n**3 / gemm.p50_ms / 1e9, gbps=2 * copied / copy.p50_ms / 1e6)


def achieved(latency: Latency, ceiling: Ceilings, *, flops: float = 0, num_bytes: float = 0) -> dict[str, float]:
    """TFLOP/s and GB/s of a call that computes flops and moves num_bytes, with their shares of the ceilings: columns of
    a row. What is not given, or 0, has none."""
    rates = {"tflops": flops / latency.p50_ms / 1e9, "gbps": num_bytes / latency.p50_ms / 1e6}
    rates |= {f"{name}_share": rate / getattr(ceiling, name) for name, rate in rates.items()}
    return {name: rate for name, rate in rates.items() if rate}


def request_flops(model: RankingModel, cached: int, new: int, candidates: int) -> int:
    """FLOPs that one user's request asks of layers and head: linear layers, and attention to what is visible (nothing
    masked or padded). cached, new: history tokens. Of a layer without ``Attention`` only the linear parts count."""
    config = model.config
    visible = new * cached + new * (new + 1) // 2 + candidates * (cached + new + 1)
    attention = 4 * visible * config.num_heads * config.head_dim
    attention *= sum(isinstance(m, Attention) for m in model.modules())

    def linear(part: nn.Module, rows: int) -> int:
        return sum(2 * rows * m.weight.numel() for m in part.modules() if isinstance(m, nn.Linear))

    return attention + linear(model.backbone, new + candidates) + linear(model.head, candidates)
