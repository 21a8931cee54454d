"""Times of the attention kernels on this device, beside the ceilings of the same run: ``python
benchmarks/kernels.py``.

Every line is checked before it is timed: against the reference backend in float64, with at most twice the error that
the reference has in the line's own dtype. Timed is the replay of one CUDA graph that holds a call on each of several
inputs, which together are larger than the L2 cache; milliseconds are of one call, split keys and their reduction
included. TFLOP/s count 4·d operations a visible pair; GB/s count q, the result and every key and value once.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from recexp.experiments.measure import Latency, achieved, ceilings, measure
from recexp.layers import HSTULayer, TransformerLayer
from recexp.layers.attention import AttentionRequest, Weighting, attend, backends, refusal
from recexp.layers.fused import LAUNCHERS
from recexp.metadata import KVMetadata

ROTATED_BYTES = 200 << 20  # inputs a graph goes round, to be well above any L2 cache


@dataclass(frozen=True)
class Shape:
    """``batch`` users with ``cached`` + ``new`` history tokens, all of it new where page_size is None, and candidates.

    lengths: "equal"; or each user's new history is "spread" evenly from 1/16 of ``new`` up, or drawn by a "zipf" law.
    """

    batch: int
    heads: int
    dim: int
    new: int = 128
    cached: int = 3968
    candidates: int = 256
    page_size: int | None = 64
    weighting: Weighting = "silu"
    lengths: Literal["equal", "spread", "zipf"] = "equal"

    def __str__(self) -> str:
        pages = "no cache" if self.page_size is None else f"{self.cached} cached, page {self.page_size}"
        tokens = f"{self.new}+{self.candidates} {self.lengths}"
        return f"B={self.batch} {self.heads}x{self.dim} {tokens}, {pages}, {self.weighting}"

    @property
    def new_lengths(self) -> np.ndarray:
        if self.lengths == "zipf":
            return np.minimum(np.random.default_rng(0).zipf(1.2, self.batch) * 16, self.new)
        if self.lengths == "spread":
            return np.linspace(self.new / 16, self.new, self.batch).astype(int)
        return np.full(self.batch, self.new)

    @property
    def flops(self) -> float:
        new = self.new_lengths
        pairs = new * self.cached + new * (new + 1) / 2 + self.candidates * (self.cached + new + 1)
        return 4.0 * self.dim * self.heads * pairs.sum()

    @property
    def num_bytes(self) -> float:
        rows = 4 * (self.new_lengths + self.candidates) + 2 * self.cached
        return 2.0 * self.heads * self.dim * rows.sum()


def make_inputs(shape: Shape, dtype: torch.dtype, seed: int) -> dict:
    """Arguments of ``attend`` on the GPU; q, k, v are views of one projection, unwritten slots hold NaN."""
    torch.manual_seed(seed)
    new, candidates = shape.new_lengths, np.full(shape.batch, shape.candidates)
    offsets = np.append(0, (new + candidates).cumsum())
    fused = torch.randn(int(offsets[-1]), 4, shape.heads, shape.dim, device="cuda").to(dtype)
    q, k, v = fused.unbind(1)[1:]
    kv = None
    if shape.page_size is not None:
        history, size = shape.cached + new, shape.page_size
        counts = -(-history // size)
        ids = (np.random.default_rng(seed).permutation(counts.sum()) + 1).astype(np.int32)
        table = torch.randn(len(ids) + 1, 2, size, shape.heads, shape.dim, device="cuda").to(dtype)
        for end, length in zip(counts.cumsum(), history, strict=True):
            if length % size:
                table[int(ids[end - 1]), :, length % size :] = float("nan")
        pages = np.split(ids, counts.cumsum()[:-1])
        kv = table, KVMetadata.build(pages, history, new, candidates, size).to("cuda")
    return {
        "q": q, "k": k, "v": v, "seq_offsets": torch.from_numpy(offsets).int().cuda(),
        "num_candidates": torch.from_numpy(candidates).int().cuda(), "kv": kv,
        "max_seqlen": int((new + candidates).max()), "weighting": shape.weighting, "alpha": shape.dim**-0.5,
        "scaling_seqlen": float(shape.cached + shape.new + shape.candidates),
    }  # fmt: skip


def in_float64(inputs: dict) -> dict:
    kv = inputs["kv"] and (inputs["kv"][0].double(), inputs["kv"][1])
    return inputs | {name: inputs[name].double() for name in ("q", "k", "v")} | {"kv": kv}


def errors(inputs: dict, out: Tensor) -> tuple[float, float]:
    """Relative error of ``out`` and of the reference backend in its own dtype, both against float64."""
    truth = attend(**in_float64(inputs), backend="reference")
    plain = attend(**inputs, backend="reference")
    return tuple(float((x.double() - truth).norm() / truth.norm()) for x in (out, plain))  # type: ignore[return-value]


def time_calls(calls: Sequence[Callable[[], object]], graph: bool = True, max_seconds: float = 0.4) -> Latency:
    """Latency of one call: of a graph that holds all of them, or of each by itself."""
    if not graph:
        return measure(lambda call: call(), [(call,) for call in calls], device="cuda", max_seconds=max_seconds)
    for call in calls:
        call()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    latency = measure(captured.replay, [()], device="cuda", max_seconds=max_seconds)
    each = {name: getattr(latency, name) / len(calls) for name in ("p10_ms", "p50_ms", "p90_ms", "host_p50_ms")}
    return replace(latency, **each)


def kernels(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """What a call launches: kernel name -> (how often, milliseconds together), as the profiler saw it."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    events = (event for event in profile.key_averages() if event.device_time_total > 0)
    return {event.key[:60]: (event.count, event.device_time_total / 1e3) for event in events}


def finish(
    row: dict, calls: Sequence[Callable[[], object]], flops: float, num_bytes: float, dtype: torch.dtype, graph: bool
) -> dict:
    """Time what was found right."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launched = kernels(calls[0])
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    latency = time_calls(calls, graph)
    busy = sum(ms for _, ms in launched.values())
    rates = achieved(latency, ceilings("cuda", dtype), flops=flops, num_bytes=num_bytes)
    times = {"p10_ms": latency.p10_ms, "p50_ms": latency.p50_ms, "p90_ms": latency.p90_ms, "busy_ms": busy}
    return row | {"status": "ok", "graph": graph, "kernels": launched, "peak_mib": peak} | times | rates


def bench(shape: Shape, backend: str, dtype: torch.dtype = torch.bfloat16) -> dict:
    """One row: status "ok" with its latency, "refused" with the reason, or "wrong" with both errors and no latency."""
    row: dict[str, Any] = {"shape": str(shape), "backend": backend}
    request = AttentionRequest(shape.weighting, torch.device("cuda"), dtype, shape.heads, shape.dim, shape.page_size)
    if reason := refusal(backend, request):
        return row | {"status": "refused", "reason": reason}
    rotations = int(min(max(ROTATED_BYTES // shape.num_bytes, 2), 16))
    inputs = [make_inputs(shape, dtype, seed) for seed in range(rotations)]
    error, plain = errors(inputs[0], attend(**inputs[0], backend=backend))
    row |= {"error": error, "plain_error": plain}
    if not error <= 2 * plain:
        return row | {"status": "wrong"}
    calls = [partial(attend, **x, backend=backend) for x in inputs]
    return finish(row, calls, shape.flops, shape.num_bytes, dtype, backends[backend].capturable)


def bench_block(shape: Shape, backend: str, num_layers: int = 8) -> dict:
    """As ``bench`` for a block, heads * dim wide: fused HSTU layers, or plain Transformer layers where the weighting is
    softmax. Checked over its first two layers."""
    width, dtype, fused = shape.heads * shape.dim, torch.bfloat16, shape.weighting == "silu"
    row: dict[str, Any] = {"shape": f"{num_layers} layers, {shape}", "backend": backend}
    if fused and backend not in LAUNCHERS:
        return row | {"status": "refused", "reason": f"the fused layer runs {' or '.join(LAUNCHERS)}"}
    torch.manual_seed(0)
    scaling = float(shape.cached + shape.new + shape.candidates)
    layers: list[HSTULayer | TransformerLayer] = [
        HSTULayer(width, shape.heads, shape.dim, scaling_seqlen=scaling, backend=backend, fused=True)
        if fused
        else TransformerLayer(width, shape.heads, shape.dim, backend=backend)
        for _ in range(num_layers)
    ]
    layers = [layer.to("cuda", dtype).eval() for layer in layers]
    inputs = [make_inputs(shape, dtype, seed) for seed in range(num_layers)]  # a table for each layer
    lengths = inputs[0]["seq_offsets"], inputs[0]["num_candidates"], inputs[0]["max_seqlen"]
    metadata = inputs[0]["kv"] and inputs[0]["kv"][1]
    tables = [x["kv"] and x["kv"][0] for x in inputs]
    x = torch.randn(inputs[0]["q"].shape[0], width, device="cuda").to(dtype)

    def run(depth: int, kind: torch.dtype | None = None) -> Tensor:
        """The block as it is timed, or layer by layer, not fused, on the reference backend in another dtype."""
        y = x if kind is None else x.to(kind)
        for layer, table in zip(layers[:depth], tables, strict=False):
            if kind is not None:
                layer = copy.deepcopy(layer).to(kind)
                layer.fused, layer.attention.backend = False, "reference"
                table = None if table is None else table.to(kind, copy=True)
            y = layer(y, *lengths, None if table is None else (table, metadata))
        return y

    with torch.no_grad():
        truth = run(2, torch.float64)
        row["error"], row["plain_error"] = (
            float((y.double() - truth).norm() / truth.norm()) for y in (run(2), run(2, dtype))
        )
        if not row["error"] <= 2 * row["plain_error"]:
            return row | {"status": "wrong"}
        products = (10.0 if fused else 24.0) * len(x) * width * width  # HSTU: uvqk 4, proj 1; Transformer: 3 + 1 + 8
        return finish(row, [lambda: run(num_layers)], num_layers * (shape.flops + products), 0, dtype, True)


CACHED = [Shape(b, h, d) for b in (8, 1) for h, d in ((8, 128), (4, 256))]
UNCACHED = [replace(shape, new=4096, cached=0, page_size=None) for shape in CACHED]
GROUPS = {
    "cached": CACHED,
    "pages": [replace(shape, page_size=p) for shape in CACHED[:2] for p in (16, 32, 128, 256, 512)],
    "softmax": [replace(shape, weighting="softmax") for shape in CACHED],
    "uncached": UNCACHED + [replace(shape, weighting="softmax") for shape in UNCACHED[:2]],
    "spread": [replace(UNCACHED[0], weighting="softmax", lengths="spread")],
    "other": [
        Shape(32, 8, 128),
        Shape(64, 8, 128),
        Shape(8, 4, 128),
        Shape(8, 16, 64),
        Shape(64, 8, 128, new=1024, lengths="zipf"),
        Shape(32, 4, 128, new=1024, cached=0, page_size=None),
    ],
    "block": [*CACHED, *UNCACHED],
    "transformer block": [replace(shape, weighting="softmax") for shape in (*CACHED[::2], *UNCACHED[::2])],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--backends", nargs="+", default=["gluon", "triton"])
    parser.add_argument("--json", help="write the rows there, one a line")
    options = parser.parse_args()
    ceiling = ceilings("cuda", torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}: matrix product {ceiling.tflops:.0f} TFLOP/s, copy {ceiling.gbps:.0f} GB/s")
    if options.json:
        open(options.json, "w").close()
    for group in options.groups:
        for shape in GROUPS[group]:
            for backend in options.backends:
                row = (bench_block if "block" in group else bench)(shape, backend)
                print(describe(row), flush=True)
                if options.json:
                    with open(options.json, "a") as file:
                        file.write(json.dumps(row) + "\n")
                torch.cuda.empty_cache()


def describe(row: dict) -> str:
    head = f"{row['shape']:62} {row['backend']:7}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row.get('reason', row)}"
    count, idle = sum(n for n, _ in row["kernels"].values()), max(0.0, 1 - row["busy_ms"] / row["p50_ms"])
    return (
        f"{head} {row['p50_ms']:.4f} ms ({row['p10_ms']:.4f}-{row['p90_ms']:.4f}){'' if row['graph'] else ' eager'}"
        f" {row['tflops']:4.0f} TFLOP/s ({row['tflops_share']:.0%})"
        + (f" {row['gbps']:5.0f} GB/s ({row['gbps_share']:.0%})" if "gbps" in row else "")
        + f" {count} kernels, idle {idle:.0%}, {row['peak_mib']:.0f} MiB"
        + f", error {row['error']:.1e}/{row['plain_error']:.1e}"
    )


if __name__ == "__main__":
    main()
