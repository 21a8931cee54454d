"""CUDA graphs of a model's layers and head over its paged cache: buckets, static buffers, capture, replay.

A graph repeats its launches with the same addresses and sizes, so a request is copied into static buffers of a bucket
(users, tokens) that it fits in. What the buffers hold behind the request is set too, so that rows of nobody write to
the scratch page only and reach no answer. All buckets share the buffers and one memory pool.

Inside a graph: every layer, the append of keys and values, the choice of the candidates' rows, the head. Outside: the
sequence stage, since how many items, actions and context tokens it looks up differs between requests of one length.

With a host tier a bucket is captured as L + 1 graphs (each layer, then the head), and before each layer the stream
waits for that layer's pages. On a device without graphs the same buffers are used eagerly: mode "static".
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from recexp.batch import describe
from recexp.config import Bucket, ModelConfig
from recexp.graphs.buffers import Static, StaticBuffers, capacity
from recexp.layers import Attention, attention_backends
from recexp.layers.attention import AttentionRequest, choose
from recexp.metadata import KVMetadata

Wait = Callable[[int], None]


class GraphedModel:
    """Layers and head of a model, captured for every bucket. ``fit`` a request, then ``replay`` it.

    tables: one [num_pages, 2, page_size, H, d] a layer; capture_pages: those of them that capture may write to.
    segmented: L + 1 graphs a bucket instead of one. eager_fallback: ``fit`` counts and returns None where no bucket
    fits. mode: "static" never captures; left out, "graph" on CUDA and "static" elsewhere.
    Raises ValueError, before anything is written: no table, tables that are not 5-D, differ or are not one a layer; an
    attention backend that is not capturable or refuses; a bucket of non-positive sizes, of more candidates than
    tokens, of a longer history than the model's, or for which capture_pages are too few. If capture itself fails (out
    of memory), nothing of it is kept and a new object may be made.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        config: ModelConfig,
        tables: Sequence[Tensor],
        capture_pages: Sequence[int],
        buckets: Sequence[Bucket],
        *,
        segmented: bool = False,
        eager_fallback: bool = False,
        mode: Literal["graph", "static"] | None = None,
    ) -> None:
        self.backbone, self.head, self.config, self.tables = backbone, head, config, list(tables)
        self.segmented, self.eager_fallback, self.misses = segmented, eager_fallback, 0
        made_up = self._check(capture_pages, buckets)
        device = tables[0].device
        self.mode = mode or ("graph" if device.type == "cuda" else "static")
        if self.mode == "graph" and device.type != "cuda":
            raise ValueError(f"mode 'graph' needs a CUDA device, the tables are on {device}; leave mode out")
        self.weights = [p.data_ptr() for p in self.parameters()]  # whose addresses a graph knows
        with torch.inference_mode():
            self._buffers = StaticBuffers(made_up, config, tables[0])
            if self.mode == "graph":
                self._capture_all(made_up)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.backbone.parameters(), *self.head.parameters()]

    def fit(self, batch_size: int, num_tokens: int) -> Static | None:
        """The bucket with the fewest tokens, then the fewest users, that holds so many users and (new) tokens."""
        for static in self._buffers.buckets:
            if static.bucket.batch_size >= batch_size and static.bucket.num_tokens >= num_tokens:
                return static
        self.misses += 1
        if self.eager_fallback:
            return None
        known = ", ".join(f"{s.bucket.batch_size} x {s.bucket.num_tokens}" for s in self._buffers.buckets)
        raise ValueError(
            f"no bucket holds {batch_size} users with {num_tokens} tokens; buckets (users x tokens): {known}. Split "
            "the batch, add a bucket, or set eager_fallback"
        )

    @torch.inference_mode()
    def replay(self, static: Static, values: Tensor, metadata: KVMetadata, wait: Wait = lambda layer: None) -> Tensor:
        """Logits [candidates, num_tasks], the caller's to keep. values: [T, D], each user's candidates last.

        metadata: of the request, on the host, built for ``static.capacity``. wait(layer): lets the stream wait for that
        layer's pages. The host waits for nothing but the staging buffer, while an earlier request's copy reads it.
        """
        num_tokens = values.shape[0]
        num_candidates = self._buffers.send(static, metadata, num_tokens)
        static.tokens.values[:num_tokens].copy_(values)
        static.tokens.values[num_tokens:].zero_()
        num_layers = len(self.tables)
        if not static.graphs:
            self._run(static, lambda segment: wait(segment) if segment < num_layers else None)
        elif len(static.graphs) == 1:
            for layer in range(num_layers):
                wait(layer)
            static.graphs[0].replay()
        else:
            for segment, graph in enumerate(static.graphs):
                if segment < num_layers:
                    wait(segment)
                graph.replay()
        static.replays += 1
        static.tokens_used += num_tokens
        return static.logits[:num_candidates].clone()

    def report(self) -> pd.DataFrame:
        """A row a bucket, largest first: what its capture took (ms, bytes by which the pool grew, launches in it,
        segments) and its use (replays, share of computed tokens that padded). All 0 of a capture that was not made."""
        rows = []
        for s in reversed(self._buffers.buckets):
            row = {**s.bucket._asdict(), "mode": self.mode, "segments": len(s.graphs), "capture_ms": s.capture_ms}
            row |= {"memory_bytes": s.memory_bytes, "launches": s.launches, "replays": s.replays}
            computed = s.replays * s.bucket.num_tokens
            rows.append(row | {"padding": 1 - s.tokens_used / computed if computed else 0.0})
        return pd.DataFrame(rows)

    def _check(self, capture_pages: Sequence[int], buckets: Sequence[Bucket]) -> list[tuple[Bucket, KVMetadata]]:
        """The refusals; returns the buckets, fewest tokens first, with their made-up requests, on the host."""
        if not self.tables:
            raise ValueError("no table: graphs are captured over a paged cache, so make one first")
        first = self.tables[0]
        for layer, table in enumerate(self.tables):
            it = f"the table of layer {layer} is {describe(table)}"
            if table.ndim != 5 or table.shape[1] != 2:
                raise ValueError(f"{it}: must be 5-D, [num_pages, 2, page_size, H, d]")
            if (table.shape, table.dtype, table.device) != (first.shape, first.dtype, first.device):
                other = f"that of layer 0 {describe(first)} on {first.device}"
                raise ValueError(f"{it} on {table.device}, {other}: they share page size, shape, dtype and device")
        if len(self.tables) != self.config.num_layers:
            raise ValueError(f"{len(self.tables)} tables for {self.config.num_layers} layers: give one a layer")
        if not buckets:
            raise ValueError("no buckets: name at least one batch size and number of tokens")
        page_size, heads, dim = first.shape[2:]
        for attention in (module for module in self.backbone.modules() if isinstance(module, Attention)):
            request = AttentionRequest(attention.weighting, first.device, first.dtype, heads, dim, page_size)
            name = choose(attention.backend, request)
            able = [other for other in attention_backends if attention_backends[other].capturable]
            if name not in able:
                raise ValueError(
                    f"attention backend {name!r} reads lengths on the host: set attention_backend to {', '.join(able)}"
                )
        made_up = []
        for bucket in sorted(buckets, key=lambda b: (b.num_tokens, b.batch_size)):
            room = capacity(bucket, page_size, self.config.max_history_tokens)
            try:
                made_up.append((bucket, KVMetadata.synthetic(*bucket, page_size, capture_pages, room)))
            except ValueError as error:
                raise ValueError(
                    f"{bucket} cannot be captured: {error} (pages for capture: num_capture_pages of make_cache)"
                ) from None
        return made_up

    def _run(self, static: Static, before: Wait) -> None:
        """The layers and the head over a bucket's buffers; before(i) comes before layer i, and before the head."""
        x = self.backbone(static.tokens, self.tables, static.metadata, before)
        before(len(self.tables))
        static.logits.copy_(self.head(x[static.rows]))

    def _capture_all(self, made_up: Sequence[tuple[Bucket, KVMetadata]]) -> None:
        """Largest first: the pool then has room for all others. Warm-up and capture run on a side stream."""
        device = self.tables[0].device
        gc.collect()  # a graph that is collected during a capture would break it
        with torch.cuda.device(device):
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
            for static, (bucket, metadata) in reversed(list(zip(self._buffers.buckets, made_up, strict=True))):
                begin = time.perf_counter()
                static.tokens.values.zero_()
                self._buffers.send(static, metadata, bucket.num_tokens)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    self._run(static, lambda segment: None)
                    stream.synchronize()
                    torch.cuda.empty_cache()
                    before = torch.cuda.memory_reserved(device)
                    static.graphs = self._capture(static, pool)
                torch.cuda.current_stream(device).wait_stream(stream)
                static.memory_bytes = torch.cuda.memory_reserved(device) - before
                static.launches = sum(map(_num_nodes, static.graphs))
                static.capture_ms = (time.perf_counter() - begin) * 1e3

    def _capture(self, static: Static, pool: Any) -> list[torch.cuda.CUDAGraph]:
        graphs: list[torch.cuda.CUDAGraph] = []
        running: list[torch.cuda.CUDAGraph] = []

        def end() -> None:
            if running:
                running.pop().capture_end()

        def begin(segment: int) -> None:
            if segment == 0 or self.segmented:
                end()
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may allocate
                running.append(graph)
                graphs.append(graph)

        try:
            self._run(static, begin)
        finally:
            end()
        for graph in graphs:
            graph.instantiate()
        return graphs


def _num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Launches in a graph: its nodes, as the driver counts them."""
    count = ctypes.c_size_t()
    error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    assert error == 0
    return count.value
