"""``ranking``: ids → logits through the paged KV cache of this instance; users are known by their ids."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from recexp.batch import SequenceBatch
from recexp.serving.models.common import Model, join, read_batch

COUNTERS = {
    "recexp_requests_total": "Requests by status: ok, refused (the request is at fault) or failed",
    "recexp_users_total": "Users by the tier that held their history; none: asked for without the cache",
    "recexp_tokens_reused_total": "Tokens of histories that were not computed again",
    "recexp_tokens_computed_total": "Tokens of histories that were computed through the cache",
    "recexp_evictions_total": "Users who lost their pages on the device to others",
}
GAUGES = {"recexp_pages": "Pages of the device that users may have", "recexp_pages_in_use": "Pages that users have"}
HISTOGRAM = {"recexp_latency_seconds": "From the server's call of the model to the response, queues not included"}


class TritonPythonModel(Model):
    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        shape, serving, itemsize = self.model.config, self.serving, self.model.sequence.item_embedding.weight.itemsize
        page_bytes = 2 * shape.num_layers * serving.page_size * shape.num_heads * shape.head_dim * itemsize
        self.cache = self.model.make_cache(
            num_pages=serving.num_pages, page_size=serving.page_size, host_bytes=serving.host_pages * page_bytes
        )
        kinds = {"COUNTER": COUNTERS, "GAUGE": GAUGES, "HISTOGRAM": HISTOGRAM}
        self.families = {
            name: pb_utils.MetricFamily(name, text, getattr(pb_utils.MetricFamily, kind))
            for kind, some in kinds.items()
            for name, text in some.items()
        }
        self.metrics: dict[tuple[str, str], Any] = {}
        self.name = args["model_name"]
        self.metric("recexp_pages").set(self.cache.pages.num_pages - self.cache.pages.num_reserved)

    def metric(self, name: str, **labels: str) -> Any:
        key = name, str(labels)
        if key not in self.metrics:
            more = {"buckets": [ms / 1e3 for ms in self.serving.latency_buckets_ms]} if name in HISTOGRAM else {}
            self.metrics[key] = self.families[name].Metric(labels={"model": self.name, **labels}, **more)
        return self.metrics[key]

    def read(self, request: Any) -> tuple[SequenceBatch, bool]:
        """The batch, and whether to use the cache: the request's parameter ``cache``, true unless given."""
        return read_batch(request, self.model), bool(json.loads(request.parameters() or "{}").get("cache", True))

    def groups(self, given: Mapping[int, tuple[SequenceBatch, bool]]) -> list[list[int]]:
        """A request goes behind all before it that share a user with it; others are answered together."""
        last: dict[object, int] = {}
        found: dict[tuple[int, bool], list[int]] = {}
        for row, (batch, cached) in given.items():
            users = batch.user_ids.tolist()
            turn = 1 + max((last.get(user, -1) for user in users), default=-1)
            last |= dict.fromkeys(users, turn)
            found.setdefault((turn, cached), []).append(row)
        return [found[key] for key in sorted(found)]

    def answer(self, given: Sequence[tuple[SequenceBatch, bool]]) -> list[dict[str, Any]]:
        cached, batches = given[0][1], [batch for batch, _ in given]
        batch, sizes = join(batches), [one.batch_size for one in batches]
        users, pages = batch.user_ids.tolist(), self.cache.pages
        found: list[dict[str, Any]] = [{"tier": "none", "tokens_reused": 0, "tokens_computed": 0} for _ in users]
        if cached:
            others = set(pages.users) - set(users)
            logits = self.model.predict_cached(batch)
            found = [self.cache.records[row - len(users)] for row in range(len(users))]
            self.metric("recexp_evictions_total").increment(len(others - set(pages.users)))
            self.metric("recexp_pages_in_use").set(pages.num_pages - pages.num_reserved - len(pages.free))
        else:
            logits = self.model.predict(batch)
        for row in found:
            self.metric("recexp_users_total", tier=row["tier"]).increment(1)
            for name in ("tokens_reused", "tokens_computed"):
                self.metric(f"recexp_{name}_total").increment(row[name])
        reused = torch.tensor([row["tokens_reused"] for row in found], dtype=torch.int64)
        parts = logits.split([int(one.num_candidates.sum()) for one in batches])
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [
            {
                "LOGITS": part,
                "TIER": [row["tier"] for row in found[end - size : end]],
                "TOKENS_REUSED": reused[end - size : end],
            }
            for part, size, end in zip(parts, sizes, ends, strict=True)
        ]

    def observe(self, start: float, responses: Iterable[Any]) -> None:
        for response in responses:
            refused = response.has_error() and response.error().code() == pb_utils.TritonError.INVALID_ARG
            status = "refused" if refused else "failed" if response.has_error() else "ok"
            self.metric("recexp_requests_total", status=status).increment(1)
            self.metric("recexp_latency_seconds").observe(time.perf_counter() - start)
