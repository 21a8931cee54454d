"""Find the tile sizes of the attention kernels on this device: ``python benchmarks/tune_kernels.py [--write]``.

For every head dim, weighting and kind of paging each candidate is checked against the reference backend in float64,
with at most twice the error that the reference has in bfloat16, then timed as in kernels.py. --write replaces
this SM's rows of recexp/layers/kernels/tiles.json. Candidates compile in parallel processes first, into Triton's
cache, a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from multiprocessing import get_context

import torch
from kernels import Shape, in_float64, make_inputs, time_calls
from torch import Tensor

from recexp.layers.attention import AttentionCall, attend
from recexp.layers.fused import LAUNCHERS
from recexp.layers.kernels.tiles import TABLE, Tiles

CANDIDATES = {
    ("gluon", 64): [(192, 64, 4, 3), (192, 64, 4, 4), (192, 128, 4, 2), (128, 128, 4, 3)],
    ("gluon", 128): [(192, 64, 4, 2), (192, 64, 4, 3), (128, 64, 4, 3), (128, 128, 4, 2)],
    ("gluon", 256): [(128, 64, 4, 2), (128, 32, 4, 3), (128, 32, 4, 4)],
    ("triton", 128): [
        (64, 32, 4, 3), (64, 32, 4, 5), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (128, 32, 8, 5),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2),
    ],
    ("triton", 256): [(64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2)],
}  # fmt: skip
CANDIDATES["triton", 64] = CANDIDATES["triton", 128]
PAGES = {"none": None, "whole": 64, "part": 16, "whole few": 64}


def shapes() -> Iterator[tuple[str, int, str, str, Shape]]:
    """(kernel, head_dim, weighting, pages) and what each is timed on: users with a cache (few: one), or whole
    sequences."""
    for kernel, dim in CANDIDATES:
        for weighting in ("silu", "softmax"):
            for pages, page_size in PAGES.items():
                few = "few" in pages
                if few and kernel == "gluon":
                    continue
                shape = Shape(1 if few else 8, 1024 // dim, dim, page_size=page_size, weighting=weighting)
                if page_size is None:
                    shape = replace(shape, new=2048, cached=0)
                yield kernel, dim, weighting, pages, shape


def call(kernel: str, inputs: dict, tiles: Tiles) -> Tensor:
    return LAUNCHERS[kernel].launch(AttentionCall(**inputs), tiles).merged()


def compile_only(kernel: str, shape: Shape, tiles: Tiles) -> None:
    """One call on a small request of the same kind; what fails here is reported where it is timed."""
    try:
        call(
            kernel,
            make_inputs(replace(shape, batch=1, new=64, cached=64 if shape.cached else 0), torch.bfloat16, 0),
            tiles,
        )
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that this device cannot hold
        print(f"{kernel} {shape} {astuple(tiles)}: {str(error).splitlines()[0]}")


def tune(kernel: str, shape: Shape) -> list[tuple[float, Tiles]]:
    """(milliseconds, tiles), fastest first, of the candidates that run and are right."""
    inputs = [make_inputs(shape, torch.bfloat16, seed) for seed in range(3)]
    truth = attend(**in_float64(inputs[0]), backend="reference")
    scale = truth.norm()
    limit = 2 * (attend(**inputs[0], backend="reference").double() - truth).norm() / scale
    found = []
    for tiles in (Tiles(*sizes) for sizes in CANDIDATES[kernel, shape.dim]):
        try:
            error = (call(kernel, inputs[0], tiles).double() - truth).norm() / scale
        except Exception:  # reported by compile_only
            continue
        if error <= limit:
            latency = time_calls([partial(call, kernel, x, tiles) for x in inputs], max_seconds=0.1)
            found.append((latency.p50_ms, tiles))
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace this SM's rows of the committed table")
    parser.add_argument("--kernels", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS))
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    cases = [case for case in shapes() if case[0] in options.kernels and (case[0] != "gluon" or sm == 90)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for kernel, dim, *_, shape in cases:
            for sizes in CANDIDATES[kernel, dim]:
                pool.submit(compile_only, kernel, shape, Tiles(*sizes))
    rows = json.loads(TABLE.read_text())
    for kernel, dim, weighting, pages, shape in cases:
        found = tune(kernel, shape)
        print(f"{kernel} {shape}: " + ", ".join(f"{ms:.4f} {astuple(tiles)}" for ms, tiles in found), flush=True)
        row = next((row for row in rows if (row["kernel"], row["sm"], row["head_dim"]) == (kernel, sm, dim)), None)
        if row is None:
            row = {"kernel": kernel, "sm": sm, "head_dim": dim, "silu": {}, "softmax": {}}
            rows.append(row)
        row[weighting][pages] = astuple(found[0][1])
    rows.sort(key=lambda row: (row["kernel"], row["sm"], row["head_dim"]))
    if options.write:
        TABLE.write_text("[\n" + ",\n".join(" " + json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
