"""The measurements of page_sizes: one layer's work on users whose history is cached, through pages of one size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from recexp.cache.host import HostTier
from recexp.cache.pages import PageAllocator, Pages
from recexp.config.base import Count, Dtype, Positive, Strict
from recexp.devices import DeviceProfile, describe_device
from recexp.experiments.compare import difference, equal
from recexp.experiments.measure import achieved, ceilings, measure, measure_undisturbed
from recexp.experiments.record import row
from recexp.experiments.survey import refusal_on
from recexp.experiments.sweep import register_point
from recexp.layers.attention import AttentionRequest, Weighting, attend, backends
from recexp.layers.backends.auto import select
from recexp.layers.paged_kv import append_kv
from recexp.metadata import Ints, KVMetadata

WEIGHTINGS: dict[str, Weighting] = {"hstu": "silu", "transformer": "softmax"}
ROTATED_BYTES = {"cuda": 200 << 20, "cpu": 64 << 20}  # keys and values that take turns, above any cache of the device
CHUNK_PAGES = 4  # of the host tier


class PageSizePoint(Strict):
    """A batch of users with about ``cached_tokens`` in the cache, ``new_tokens`` more, and candidates, each."""

    backbone: Literal["hstu", "transformer"] = "hstu"
    backend: str = "auto"
    dtype: Dtype | Literal["auto"] = "auto"  # bfloat16 on CUDA, else float32
    page_size: Count
    cached_tokens: Count
    new_tokens: Count = 100
    candidates: Count = 256
    batch_size: Count = 1
    num_heads: Count = 8
    head_dim: Count = 128
    min_runs: Count = 20
    max_runs: Count = 100
    max_seconds: Positive = 0.1

    @property
    def cached(self) -> Ints:
        """[B] cached tokens, spread evenly within an eighth around their mean: users end anywhere in their last page"""
        return np.rint(self.cached_tokens * (1 + np.linspace(-1, 1, self.batch_size + 2)[1:-1] / 8)).astype(int)

    def request(self, device: torch.device) -> AttentionRequest:
        name = self.dtype if self.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        shape = (self.num_heads, self.head_dim, self.page_size)
        return AttentionRequest(WEIGHTINGS[self.backbone], device, getattr(torch, name), *shape)


def refuses(point: PageSizePoint, where: torch.device | DeviceProfile) -> str | None:
    """Why the point's backend cannot serve it on a device, or on a CUDA device that has the profile."""
    profile = where if isinstance(where, DeviceProfile) else None
    request = point.request(torch.device("cuda") if isinstance(where, DeviceProfile) else where)
    return None if point.backend == "auto" else refusal_on(point.backend, request, profile)


@dataclass(frozen=True)
class Call:
    """A request in memory: queries, keys and values as a layer projects them, and the pages of its users."""

    qkv: Tensor  # [T, 3, H, d], of each user the new history, then the candidates
    seq_offsets: Tensor
    num_candidates: Tensor
    table: Tensor
    metadata: KVMetadata

    def run(self, point: PageSizePoint, backend: str) -> Tensor:
        """What a layer does with pages: append the new history, attend. Returns [T, H, d]."""
        q, k, v = self.qkv.unbind(1)
        append_kv(self.table, self.metadata, k, v, self.seq_offsets)
        return attend(
            q, k, v, self.seq_offsets, self.num_candidates, weighting=WEIGHTINGS[point.backbone],
            alpha=point.head_dim**-0.5, scaling_seqlen=point.cached_tokens + point.new_tokens + point.candidates,
            max_seqlen=point.new_tokens + point.candidates, backend=backend, kv=(self.table, self.metadata),
        )  # fmt: skip


def make_call(point: PageSizePoint, qkv: Tensor, table: Tensor, pages: list[Pages], cached: Ints) -> Call:
    """The call of users with these pages of the table and so many cached tokens."""
    new, candidates = (np.full(len(pages), n) for n in (point.new_tokens, point.candidates))
    metadata = KVMetadata.build(pages, cached + new, new, candidates, point.page_size).to(table.device)
    lengths = np.append(0, (new + candidates).cumsum())
    offsets, counts = (torch.from_numpy(x).int().to(table.device) for x in (lengths, candidates))
    return Call(qkv, offsets, counts, table, metadata)


def check(point: PageSizePoint, call: Call, out: Tensor, pages: list[Pages]) -> tuple[float, bool]:
    """Error against float64 of the users with the shortest and the longest history, and whether it is small enough."""
    users = sorted({0, point.batch_size - 1})

    def of_users(x: Tensor) -> Tensor:
        return x.unflatten(0, (point.batch_size, -1))[users].flatten(0, 1)

    theirs = [pages[user] for user in users]
    ends = np.cumsum([len(p) for p in theirs])
    table = call.table[torch.from_numpy(np.concatenate(theirs)).to(call.table.device)]
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    plain = make_call(point, of_users(call.qkv), table, numbers, point.cached[users])
    truth = replace(plain, qkv=plain.qkv.double(), table=table.double()).run(point, "reference")
    found = of_users(out)
    return difference(found, truth).relative, equal(found, truth, out.dtype, plain.run(point, "reference"))


def allocate_us(allocator: PageAllocator, users: Sequence[int], cached: list[int], total: list[int]) -> float:
    """Median time of giving users that hold the pages of ``cached`` tokens those of ``total``, in µs."""
    times = []
    for _ in range(50):
        for user, length in zip(users, cached, strict=True):
            allocator.truncate(user, length)
        start = time.perf_counter()
        allocator.allocate(users, total)
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


def host_copy_us(table: Tensor, pages: Pages) -> float:
    """Median time that a page of a history takes to the host tier and back, one layer, in µs. On a CPU both tiers are
    the same memory."""
    host = HostTier([table], (len(pages) + CHUNK_PAGES) * table[0].nbytes, CHUNK_PAGES)

    def there_and_back() -> None:
        host.completed()
        host.chunks.release(0)
        host.offload([(0, pages, len(pages) * table.shape[2])])
        host.onload([(0, pages)])
        host.fence()

    once = measure(there_and_back, [()], device=table.device, min_runs=5, max_runs=25, max_seconds=0.05)
    return 1e3 * once.p50_ms / len(pages)


@register_point("page_size", config=PageSizePoint, refuses=refuses)
def run_point(point: PageSizePoint, device: torch.device) -> dict[str, Any]:
    """Check the point's work on its device, then time it: as a CUDA graph where the backend can be captured."""
    request = point.request(device)
    dtype, backend = request.dtype, point.backend if point.backend != "auto" else select(request)[0]
    cached, total = point.cached, point.cached + point.new_tokens
    num_pages, width = int((-(-total // point.page_size)).sum()), point.num_heads * point.head_dim * dtype.itemsize
    count = int(np.clip(-(-ROTATED_BYTES[device.type] // (2 * int(total.sum()) * width)), 1, 64))
    allocator = PageAllocator(1 + count * num_pages, point.page_size)
    if device.type == "cuda":
        np.random.default_rng(0).shuffle(allocator.free)  # as in a cache that has served for a while
    shape = (point.num_heads, point.head_dim)
    table = torch.randn(allocator.num_pages, 2, point.page_size, *shape, dtype=dtype, device=device)
    num_tokens = point.batch_size * (point.new_tokens + point.candidates)
    calls, owned = [], []
    for first in range(0, count * point.batch_size, point.batch_size):
        users = range(first, first + point.batch_size)
        allocator.allocate(users, total.tolist())
        owned.append([allocator.pages(user) for user in users])
        qkv = torch.randn(num_tokens, 3, *shape, dtype=dtype, device=device)
        calls.append(make_call(point, qkv, table, owned[-1], cached))
    columns: dict[str, Any] = {c: getattr(point, c) for c in ("backbone", "page_size", "cached_tokens", "new_tokens")}
    columns |= {c: getattr(point, c) for c in ("batch_size", "num_heads", "head_dim")}
    columns |= {"device": describe_device(device), "backend": backend, "dtype": str(dtype).removeprefix("torch.")}
    columns |= {"num_layers": 1, "num_pages": allocator.num_pages, "num_tokens": num_tokens, "tier": "device"}
    columns |= {"num_candidates": point.batch_size * point.candidates}
    columns["wasted_share"] = 1 - float(total.sum()) / (num_pages * point.page_size)
    error, right = check(point, calls[0], calls[0].run(point, backend), owned[0])
    columns["error"] = error
    graph = device.type == "cuda" and backends[backend].capturable
    columns["mode"] = "graph" if graph else "eager"
    if not right:
        return row("wrong", reason="differs from float64 by more than the plain path may", **columns)
    runs: list[Callable[[], object]] = [partial(call.run, point, backend) for call in calls]
    if graph:
        runs = capture(runs)
    limits = point.model_dump(include={"min_runs", "max_runs", "max_seconds"})
    latency = measure_undisturbed(lambda run: run(), [(run,) for run in runs], device=device, **limits)
    pairs = point.new_tokens * (cached + (point.new_tokens + 1) / 2) + point.candidates * (total + 1)
    moved = width * (4 * num_tokens + 2 * point.batch_size * point.new_tokens + 2 * int(total.sum()))
    flops = 4.0 * point.num_heads * point.head_dim * float(pairs.sum())
    columns |= achieved(latency, ceilings(device, dtype), flops=flops, num_bytes=moved)
    columns["allocate_us"] = allocate_us(allocator, range(point.batch_size), cached.tolist(), total.tolist())
    columns["host_copy_us"] = host_copy_us(table, owned[0][-1])
    return row("ok", latency=latency, **columns)


def capture(runs: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Each call as a CUDA graph, all in one pool."""
    pool = torch.cuda.graph_pool_handle()
    replays: list[Callable[[], object]] = []
    for run in runs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        replays.append(graph.replay)
    return replays
