"""The measurements of page_sizes: one layer's work on users whose history is cached, through pages of one size."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from recexp.experiments.record import COLUMNS, row
from recexp.experiments.survey import refusal_on
from recexp.experiments.sweep import register_point
from recexp.layers.attention import KV, AttentionRequest, Weighting, attend, backends
from recexp.layers.backends.auto import select
from recexp.layers.paged_kv import OnePass, append_kv
from recexp.metadata import Ints, KVMetadata

WEIGHTINGS: dict[str, Weighting] = {"hstu": "silu", "transformer": "softmax"}
ROTATED_BYTES = {"cuda": 200 << 20, "cpu": 64 << 20}  # keys and values that take turns, above any cache of the device
CHUNK_PAGES = 4  # of the host tier


class PageSizePoint(Strict):
    """A batch of users, each with about ``cached_tokens`` in the cache, ``new_tokens`` more, and candidates."""

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
    tier: Literal["device"] = "device"  # this and the next: said in every row, a refused one too
    num_layers: Literal[1] = 1

    @property
    def cached(self) -> Ints:
        """[B] cached tokens, spread evenly within an eighth around their mean, so that last pages are variously full"""
        return np.rint(self.cached_tokens * (1 + np.linspace(-1, 1, self.batch_size + 2)[1:-1] / 8)).astype(int)

    def request(self, device: torch.device) -> AttentionRequest:
        name = self.dtype if self.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        shape = (self.num_heads, self.head_dim, self.page_size)
        return AttentionRequest(WEIGHTINGS[self.backbone], device, getattr(torch, name), *shape)


def refuses(point: PageSizePoint, where: torch.device | DeviceProfile) -> str | None:
    """Why the point's backend cannot serve it on a device, or on a CUDA device that has the profile."""
    device, profile = (torch.device("cuda"), where) if isinstance(where, DeviceProfile) else (where, None)
    return None if point.backend == "auto" else refusal_on(point.backend, point.request(device), profile)


def work(point: PageSizePoint, backend: str, qkv: Tensor, lengths: tuple[Tensor, Tensor], kv: KV) -> Tensor:
    """What a layer does with pages: append the new history of qkv [T, 3, H, d], attend. Returns [T, H, d]. lengths:
    seq_offsets and num_candidates of users whose rows are new history, then candidates."""
    q, k, v = qkv.unbind(1)
    append_kv(*kv, k, v, lengths[0])
    return attend(
        q, k, v, *lengths, weighting=WEIGHTINGS[point.backbone], alpha=point.head_dim**-0.5,
        scaling_seqlen=point.cached_tokens + point.new_tokens + point.candidates,
        max_seqlen=point.new_tokens + point.candidates, backend=backend, kv=kv,
    )  # fmt: skip


def place(point: PageSizePoint, table: Tensor, pages: list[Pages], cached: Ints) -> tuple[tuple[Tensor, Tensor], KV]:
    """lengths and kv of ``work`` for users with these pages of the table and so many cached tokens. Where to append is
    found here, once, as a model of many layers does."""
    new, candidates = (np.full(len(pages), n) for n in (point.new_tokens, point.candidates))
    metadata = KVMetadata.build(pages, cached + new, new, candidates, point.page_size).to(table.device)
    lengths = (np.append(0, (new + candidates).cumsum()), candidates)
    seq_offsets, num_candidates = (torch.from_numpy(x).int().to(table.device) for x in lengths)
    one_pass = OnePass.of(metadata, seq_offsets, int(lengths[0][-1]), point.page_size)
    _ = one_pass.targets  # found now, and kept
    return (seq_offsets, num_candidates), (table, one_pass)


def check(point: PageSizePoint, qkv: Tensor, table: Tensor, out: Tensor, pages: list[Pages]) -> tuple[float, bool]:
    """Error against float64 of the users with the shortest and the longest history, and whether it is small enough."""
    users = sorted({0, point.batch_size - 1})
    ends = np.cumsum([len(pages[user]) for user in users])
    qkv, out = (x.unflatten(0, (point.batch_size, -1))[users].flatten(0, 1) for x in (qkv, out))
    table = table[np.concatenate([pages[user] for user in users])]
    lengths, (_, metadata) = place(point, table, np.split(np.arange(ends[-1]), ends[:-1]), point.cached[users])
    truth = work(point, "reference", qkv.double(), lengths, (table.double(), metadata))
    plain = work(point, "reference", qkv, lengths, (table, metadata))
    return difference(out, truth).relative, equal(out, truth, out.dtype, plain)


def allocate_us(allocator: PageAllocator, cached: list[int], total: list[int]) -> float:
    """Median time of giving the first users, who hold the pages of ``cached`` tokens, those of ``total``, in µs."""
    times, users = [], range(len(total))
    for _ in range(50):
        for user in users:
            allocator.truncate(user, cached[user])
        start = time.perf_counter()
        allocator.allocate(users, total)
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


def host_copy_us(table: Tensor, pages: Pages) -> float:
    """Median time that a page of a history takes to the host tier and back, one layer, in µs. On a CPU both tiers are
    the same memory, and this is a copy in it."""
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
    users, cached, total = point.batch_size, point.cached, point.cached + point.new_tokens
    heads, width = (point.num_heads, point.head_dim), point.num_heads * point.head_dim * dtype.itemsize
    num_pages, num_tokens = int((-(-total // point.page_size)).sum()), users * (point.new_tokens + point.candidates)
    count = int(np.clip(-(-ROTATED_BYTES[device.type] // (2 * int(total.sum()) * width)), 1, 32))
    allocator = PageAllocator(1 + count * num_pages, point.page_size)
    if device.type == "cuda":
        np.random.default_rng(0).shuffle(allocator.free)  # as in a cache that has served for a while
    table = torch.randn(allocator.num_pages, 2, point.page_size, *heads, dtype=dtype, device=device)
    runs: list[Callable[[], Any]] = []
    for first in range(0, count * users, users):
        allocator.allocate(range(first, first + users), total.tolist())
        pages = [allocator.pages(first + user) for user in range(users)]
        qkv = torch.randn(num_tokens, 3, *heads, dtype=dtype, device=device)
        runs.append(partial(work, point, backend, qkv, *place(point, table, pages, cached)))
    error, right = check(point, qkv, table, runs[-1](), pages)
    graph = device.type == "cuda" and backends[backend].capturable
    columns = {name: value for name, value in point.model_dump().items() if name in COLUMNS}
    columns |= {"device": describe_device(device), "backend": backend, "error": error}
    columns |= {"dtype": str(dtype).removeprefix("torch."), "mode": "graph" if graph else "eager"}
    columns |= {"num_pages": allocator.num_pages, "num_tokens": num_tokens, "num_candidates": users * point.candidates}
    columns |= {"wasted_share": 1 - float(total.sum()) / (num_pages * point.page_size)}
    if not right:
        return row("wrong", reason="differs from float64 by more than the plain path may", **columns)
    inputs, pool = [(run,) for run in runs], torch.cuda.graph_pool_handle() if graph else None
    for i, run in enumerate(runs if graph else []):
        with torch.cuda.graph(captured := torch.cuda.CUDAGraph(), pool=pool):
            run()
        inputs[i] = (captured.replay,)
    limits = point.model_dump(include={"min_runs", "max_runs", "max_seconds"})
    latency = measure_undisturbed(lambda run: run(), inputs, device=device, **limits)
    pairs = point.new_tokens * (cached + (point.new_tokens + 1) / 2) + point.candidates * (total + 1)
    moved = width * (4 * num_tokens + 2 * users * point.new_tokens + 2 * int(total.sum()))
    flops = 4.0 * point.num_heads * point.head_dim * float(pairs.sum())
    columns |= achieved(latency, ceilings(device, dtype), flops=flops, num_bytes=moved)
    columns |= {"allocate_us": allocate_us(allocator, cached.tolist(), total.tolist())}
    return row("ok", latency=latency, host_copy_us=host_copy_us(table, pages[-1]), **columns)
