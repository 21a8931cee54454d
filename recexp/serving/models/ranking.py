"""``ranking``: ids → logits through the paged KV cache of this instance; users are known by their ids."""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from recexp.batch import SequenceBatch
from recexp.serving.models.common import Model, join, read_batch

METRICS = {
    "requests_total": ("COUNTER", "Requests by status: ok, refused (the request is at fault) or failed"),
    "users_total": ("COUNTER", "Users by the tier that held their history; none: asked for without the cache"),
    "tokens_reused_total": ("COUNTER", "Tokens of histories that were not computed again"),
    "tokens_computed_total": ("COUNTER", "Tokens of histories that were computed through the cache"),
    "evictions_total": ("COUNTER", "Users who lost their pages on the device to others"),
    "pages": ("GAUGE", "Pages of the device that users may have"),
    "pages_in_use": ("GAUGE", "Pages of the device that users have"),
    "latency_seconds": ("HISTOGRAM", "From the server's call of the model to the response, queues not included"),
}


class TritonPythonModel(Model):
    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        shape, serving, itemsize = self.model.config, self.serving, self.model.sequence.item_embedding.weight.itemsize
        page_bytes = 2 * shape.num_layers * serving.page_size * shape.num_heads * shape.head_dim * itemsize
        self.cache = self.model.make_cache(
            num_pages=serving.num_pages, page_size=serving.page_size, host_bytes=serving.host_pages * page_bytes
        )
        self.metric = functools.cache(functools.partial(_metric, args["model_name"], serving.latency_buckets_ms))
        self.metric("pages").set(self.cache.pages.num_pages - self.cache.pages.num_reserved)

    def read(self, request: Any) -> tuple[SequenceBatch, bool]:
        """The batch, and whether to use the cache: the request's parameter ``cache``, true unless given."""
        cached = json.loads(request.parameters() or "{}").get("cache", True)
        if not isinstance(cached, bool):
            raise ValueError(f"the parameter cache is {cached!r}; it is true or false")
        return read_batch(request, self.model), cached

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
        batches, pages = [batch for batch, _ in given], self.cache.pages
        batch = join(batches)
        users = batch.user_ids.tolist()
        found: list[dict[str, Any]] = [{"tier": "none", "tokens_reused": 0, "tokens_computed": 0} for _ in users]
        if given[0][1]:
            others = set(pages.users) - set(users)
            logits = self.model.predict_cached(batch)
            found = [self.cache.records[row - len(users)] for row in range(len(users))]
            self.metric("evictions_total").increment(len(others - set(pages.users)))
            self.metric("pages_in_use").set(pages.num_pages - pages.num_reserved - len(pages.free))
        else:
            logits = self.model.predict(batch)
        for row in found:
            self.metric("users_total", tier=row["tier"]).increment(1)
            self.metric("tokens_reused_total").increment(row["tokens_reused"])
            self.metric("tokens_computed_total").increment(row["tokens_computed"])
        rows, outputs = iter(found), []
        for one, part in zip(batches, logits.split([int(one.num_candidates.sum()) for one in batches]), strict=True):
            mine = list(islice(rows, one.batch_size))
            reused = torch.tensor([row["tokens_reused"] for row in mine], dtype=torch.int64)
            outputs.append({"LOGITS": part, "TIER": [row["tier"] for row in mine], "TOKENS_REUSED": reused})
        return outputs

    def respond(self, start: float, outcome: Mapping[str, Any] | Exception) -> Any:
        bad = "refused" if isinstance(outcome, ValueError) else "failed"
        self.metric("requests_total", status=bad if isinstance(outcome, Exception) else "ok").increment(1)
        self.metric("latency_seconds").observe(time.perf_counter() - start)
        return super().respond(start, outcome)


@functools.cache
def _family(name: str) -> Any:
    kind, text = METRICS[name]
    return pb_utils.MetricFamily(f"recexp_{name}", text, getattr(pb_utils.MetricFamily, kind))


def _metric(model: str, buckets_ms: Sequence[float], name: str, **labels: str) -> Any:
    more = {"buckets": [ms / 1e3 for ms in buckets_ms]} if METRICS[name][0] == "HISTOGRAM" else {}
    return _family(name).Metric(labels={"model": model, **labels}, **more)
