"""A bounded open-loop load generator: requests leave by the clock, whatever the server does.

Latencies count from when a request was due, not from when it left, so one that a slow server (or this sender) held up
is not left out of the statistics, as it is where each client waits for its last answer (coordinated omission).
"""

import math
import time
from collections.abc import Sequence
from threading import Semaphore
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd

from recexp.batch import SequenceBatch
from recexp.experiments.plots import MARKERS, PALETTE, Plot, plain, style
from recexp.serving.client import Answer, Client


def load(
    url: str,
    log: Sequence[SequenceBatch],
    rate: float,
    *,
    models: Sequence[str] = ("ranking",),
    cache: bool = True,
    max_seconds: float = 60,
    timeout_s: float = 10,
    allow_remote: bool = False,
) -> pd.DataFrame:
    """Send what of ``log`` is due within max_seconds, number i at i / rate seconds, each one user's, over gRPC.

    Users are routed by their id: to models[user % number of models]. Ends timeout_s after the last was sent at latest.
    A row a request: user, due_s, sent_s, done_s, latency_ms, status ("ok" or the error), tier, tokens_reused, logits.
    Raises ValueError: no gRPC address; another machine's, unless allow_remote; nothing to send; a rate not above 0.
    """
    address = urlsplit(url)
    if address.scheme != "grpc" or not address.hostname or not address.port:
        raise ValueError(f"{url!r} is no gRPC address; write grpc://HOST:PORT")
    if not allow_remote and address.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"{address.hostname} is another machine; if you may load it, say so: --allow-remote")
    if not 0 < rate < math.inf or not 0 < max_seconds < math.inf or not len(log):
        raise ValueError(f"{len(log)} requests at {rate} a second for {max_seconds} s: all must be above 0 and finite")
    log = log[: math.ceil(rate * max_seconds)]
    rows: list[dict[str, Any]] = [{"user": int(batch.user_ids[0]), "due_s": i / rate} for i, batch in enumerate(log)]
    answered = Semaphore(0)
    with Client(url, timeout_s) as client:
        requests = [client.request(batch, cache) for batch in log]  # made before the clock starts
        start = time.perf_counter()

        def take(row: dict[str, Any], result: Any, error: Exception | None) -> None:
            row |= {"done_s": time.perf_counter() - start, "status": str(error or "ok"), "result": result}
            answered.release()

        for row, request in zip(rows, requests, strict=True):
            time.sleep(max(0.0, start + row["due_s"] - time.perf_counter()))
            row["sent_s"] = time.perf_counter() - start
            to = models[row["user"] % len(models)]
            client.triton.async_infer(to, callback=lambda result, error, row=row: take(row, result, error), **request)
        for _ in rows:
            answered.acquire()
    for row in rows:
        answer = Answer.of(row.pop("result")) if row["status"] == "ok" else Answer(np.zeros(0), [], [])
        row |= {"latency_ms": 1e3 * (row["done_s"] - row["due_s"]), "logits": answer.logits}
        row |= {"tier": (*answer.tiers, "none")[0], "tokens_reused": (*answer.tokens_reused, 0)[0]}
    return pd.DataFrame(rows)


def summarise(frame: pd.DataFrame) -> dict[str, float]:
    """Of a frame of ``load``: how many were answered, and a second; the share lost; percentiles of those answered."""
    good, seconds = frame[frame["status"] == "ok"], frame["done_s"].max()
    found = {"count": len(good), "answered_per_s": len(good) / seconds, "lost_share": 1 - len(good) / len(frame)}
    return found | {f"p{q}_ms": float(good["latency_ms"].quantile(q / 100)) for q in (10, 50, 90, 99)}


@style
def plot_load(frame: pd.DataFrame, title: str) -> Plot:
    """Every request of a frame of ``load``: its latency over the time it was due, a mark a tier, lost ones black."""
    figure = Plot(8, 4)
    axes = figure.subplots()
    tiers = frame["tier"].mask(frame["status"] != "ok", "lost")
    for i, (tier, rows) in enumerate(frame.groupby(tiers)):
        colour, marker = ("black", "x") if tier == "lost" else (PALETTE[i], MARKERS[i])
        axes.plot(rows["due_s"], rows["latency_ms"], marker, ms=3, color=colour, label=str(tier))
    axes.set(xlabel="due, s", ylabel="latency, ms, from when a request was due", yscale="log")
    plain(axes.yaxis)
    figure.key()
    return figure.titled(title)
