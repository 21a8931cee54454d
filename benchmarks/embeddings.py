"""Embedding stores: what the adapter adds, and how near to a copy lookups come: ``python benchmarks/embeddings.py``.

adapter: a lookup of 8,192 rows of 128 float32 through the store, with its checks and (checked) without those of the
keys' values, less the same call of the engine; host time, results awaited, the three called in turn, 10th percentiles
(which whoever else uses the machine disturbs least).
bandwidth, on a GPU: 131,072 random keys of 1,000,000 rows of 256 bfloat16 (float16 where an engine has no bfloat16),
keys checked beforehand as a model's are; bytes read and written, as a share of a large copy's in the same run. For
torch also both ways that its lookup may take: PyTorch's index_select and the Triton kernel.
Under a minute; engines that are absent are named with the reason.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import torch

from recexp.cache.embeddings import EmbeddingStore, engines
from recexp.cache.embeddings.kernels import gather_rows
from recexp.devices import describe_device, resolve
from recexp.experiments.measure import ceilings, measure

TURNS, NUM_INPUTS = 300, 16


def make(engine: str, num_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> EmbeddingStore:
    store = engines[engine](num_rows, dim, dtype=dtype, device=device)
    for keys in torch.arange(num_rows, device=device).split(100_000):
        store.update(keys, torch.randn(len(keys), dim, device=device).to(dtype))
    return store


def adapter(engine: str, device: torch.device) -> None:
    store = make(engine, 200_000, 128, torch.float32, device)
    inputs = [torch.randint(200_000, (8192,), device=device) for _ in range(NUM_INPUTS)]
    calls = {
        "engine": store._gather,
        "store": store.lookup,
        "checked": lambda keys: store.lookup(keys, checked=True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for i, (name, call) in enumerate(calls.items()):
            keys = inputs[(turn + 5 * i) % NUM_INPUTS]  # none that the call before has brought near
            start = time.perf_counter()
            call(keys)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(1e6 * (time.perf_counter() - start))
    low = {name: float(np.percentile(some, 10)) for name, some in times.items()}
    alone, added = low["engine"], {name: low[name] - low["engine"] for name in ("store", "checked")}
    met = "met" if added["store"] < max(20, 0.05 * alone) else "MISSED"
    print(
        f"adapter    {engine:8} engine {alone:.1f} us, store adds {added['store']:.1f} us "
        f"({added['store'] / alone:.1%}), {added['checked']:.1f} us with checked keys; target 20 us or 5%: {met}"
    )


def bandwidth(engine: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if torch.bfloat16 in engines[engine].dtypes else torch.float16
    store = make(engine, 1_000_000, 256, dtype, device)
    inputs = [(torch.randint(1_000_000, (131_072,), device=device),) for _ in range(NUM_INPUTS)]
    ways = {"lookup": partial(store.lookup, checked=True)}
    if engine == "torch":  # what a lookup may choose from
        ways |= {"index_select": partial(store.table.index_select, 0), "gather_rows": partial(gather_rows, store.table)}
    moved, copy = 131_072 * (2 * store.row_bytes + 8), ceilings(device, torch.float32).gbps
    for way, call in ways.items():
        latency = measure(call, inputs, device=device, max_seconds=1)
        gbps = moved / latency.p50_ms / 1e6
        print(
            f"bandwidth  {engine:8} {way:12} {str(dtype).removeprefix('torch.')} {latency.p50_ms * 1e3:.1f} us "
            f"({latency.p10_ms * 1e3:.1f} to {latency.p90_ms * 1e3:.1f}), {gbps:.0f} GB/s, {gbps / copy:.0%} of a "
            f"copy's {copy:.0f}; target 60%: {'met' if gbps > 0.6 * copy else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    device = resolve(parser.parse_args().device)
    print(describe_device(device), torch.__version__)
    for engine in engines:
        if reason := engines[engine].missing(device.type):
            print(f"{engine} is absent: {reason}")
            continue
        adapter(engine, device)
        if device.type == "cuda":
            bandwidth(engine, device)


if __name__ == "__main__":
    main()
