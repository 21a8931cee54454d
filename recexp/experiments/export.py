"""The measurements of export: one model eagerly, by torch.compile, and as packages without and with KV cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recexp.batch import SequenceBatch
from recexp.config import ExperimentConfig, ModelConfig
from recexp.experiments.compare import difference, equal
from recexp.experiments.latency import in_dtype, model_columns, other_newest, reference_of
from recexp.experiments.measure import measure_undisturbed
from recexp.experiments.plots import PALETTE, Plot, digits, medians, style
from recexp.experiments.record import row, to_frame
from recexp.export.build import Manifest, export
from recexp.export.package import Package
from recexp.export.ranker import ExportedRanker
from recexp.model import RankingModel

NUM_BATCHES = 4  # that take turns


def make_batch(config: ModelConfig, batch_size: int, num_pairs: int, num_candidates: int, seed: int) -> SequenceBatch:
    """Users of random ids, all with the same lengths."""
    draw = np.random.default_rng(seed)
    ids: Callable[..., Any] = lambda most, *shape: draw.integers(0, most, shape).tolist()  # noqa: E731
    items, actions = (ids(most, batch_size, num_pairs) for most in (config.num_items, config.num_actions))
    context = {name: ids(most, batch_size) for name, most in config.context.items()}
    users, candidates = list(range(batch_size)), ids(config.num_items, batch_size, num_candidates)
    return SequenceBatch.from_lists(users, items, actions, candidates, context)


def measure_model(name: str, experiment: ExperimentConfig, device: torch.device) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of results, every way at every batch size; and what each way that is compiled costs."""
    config, size = experiment.models[name], experiment.replay.page_size
    model = RankingModel(config, device, getattr(torch, experiment.replay.dtype)).eval()
    most, artefacts, packages = max(experiment.measure.batch_sizes), [], dict[int | None, Package]()
    with tempfile.TemporaryDirectory() as folder:
        for page_size in (None, size):
            path, start = Path(folder) / f"{name}_{page_size}.pt2", time.perf_counter()
            manifest = export(model, path, page_size, most)
            built = time.perf_counter()
            packages[page_size] = Package.load(path)
            cost = {"compile_s": built - start, "load_ms": (time.perf_counter() - built) * 1e3}
            artefacts.append(_artefact(name, manifest, "package", **cost, megabytes=path.stat().st_size / 1e6))
    manifest = packages[None].manifest
    compiled = Package(manifest, torch.compile(ExportedRanker(model, manifest.attention_backend), dynamic=True), device)
    start = time.perf_counter()
    compiled.predict(make_batch(config, 2, experiment.measure.history_pairs[0], experiment.measure.num_candidates, 9))
    artefacts.append(_artefact(name, manifest, "compiled", compile_s=time.perf_counter() - start))
    inside, cached = manifest.attention_backend, packages[size]
    calls: dict[tuple[str, str], tuple[str, Callable[..., Tensor]]] = {  # (mode, tier) -> backend, call
        ("eager", "none"): ("", lambda batch, users: model.predict(batch)),
        ("compiled", "none"): (inside, lambda batch, users: compiled.predict(batch)),
        ("package", "none"): (inside, lambda batch, users: packages[None].predict(batch)),
        ("eager", "device"): ("", model.predict_cached),
        ("package", "device"): (
            cached.manifest.attention_backend,
            lambda batch, users: cached.predict_cached(batch, model.cache, users),  # type: ignore[arg-type]
        ),
    }
    rows = [
        _point(name, model, experiment, batch_size, pairs, mode, tier, *call)
        for batch_size in experiment.measure.batch_sizes
        for pairs in experiment.measure.history_pairs
        for (mode, tier), call in calls.items()
    ]
    return to_frame(rows), pd.DataFrame(artefacts)


def _artefact(name: str, manifest: Manifest, mode: str, **costs: float) -> dict[str, Any]:
    cache = f"pages of {manifest.page_size}" if manifest.page_size else "no cache"
    return {"backbone": name, "mode": mode, "cache": cache, "backend": manifest.attention_backend, **costs}


def _point(
    name: str, model: RankingModel, experiment: ExperimentConfig, batch_size: int, pairs: int, mode: str, tier: str,
    backend: str, call: Callable[[SequenceBatch, Tensor], Tensor],
) -> dict[str, Any]:  # fmt: skip
    """One row: ids in, logits out; on tier "device" all but the newest pairs is cached. Wrong logits have no time."""
    config, setting, size = model.config, experiment.measure, experiment.replay.page_size
    batches = [make_batch(config, batch_size, pairs, setting.num_candidates, seed) for seed in range(NUM_BATCHES)]
    users = torch.arange(NUM_BATCHES * batch_size).split(batch_size)
    inputs, history = list(zip(batches, users, strict=True)), len(config.context) + 2 * pairs
    new = 2 * experiment.replay.new_pairs if tier == "device" else history
    if tier == "device":
        model.make_cache(num_pages=1 + NUM_BATCHES * batch_size * -(-history // size), page_size=size)
        inputs += [(other_newest(b, experiment.replay.new_pairs, config.num_items), ids) for b, ids in inputs]
        for batch, ids in inputs:
            call(batch, ids)
    columns = model_columns(name, model, size if tier == "device" else None)
    columns |= {"mode": mode, "tier": tier, "batch_size": batch_size, "history_pairs": pairs, "new_tokens": new}
    columns |= {"cached_tokens": history - new, "num_candidates": batch_size * setting.num_candidates}
    columns |= {"num_tokens": batch_size * (history + setting.num_candidates), "backend": backend or columns["backend"]}
    plain = in_dtype(model, dtype := getattr(torch, columns["dtype"]), attention_backend="reference")
    expected, tested = reference_of(model).predict(batches[0]), call(*inputs[0])
    columns["error"] = difference(tested, expected).relative
    if not equal(tested, expected, dtype, plain.predict(batches[0])):
        return row("wrong", reason=f"logits differ from float64 by {columns['error']:.1e}", **columns)
    return row("ok", latency=measure_undisturbed(call, inputs, device=model.device, **setting.limits), **columns)


@style
def plot_ways(frame: pd.DataFrame, title: str) -> Plot:
    """Rows of results of one history length: a panel a batch size, in it a bar a backbone and way, with p10 to p90; the
    number is the median."""
    frame = frame.assign(way=frame["mode"] + ", tier " + frame["tier"])
    colours = dict(zip(frame["way"].unique(), PALETTE, strict=False))
    names, batches = frame["backbone"] + ": " + frame["way"], list(frame.groupby("batch_size"))
    figure = Plot(10, 1.2 + 0.26 * names.nunique())
    for axes, (batch_size, rows) in zip(figure.panels(len(batches)), batches, strict=True):
        p50, spread = medians(rows)
        bars = axes.barh(names[rows.index], p50, color=rows["way"].map(colours), xerr=spread)
        axes.bar_label(bars, [digits(x) if x > 0 else "" for x in p50], padding=3)
        for name in names[rows.index][np.isnan(p50)]:
            axes.text(0, name, " wrong", va="center")
        axes.set(xlabel="latency, ms (median, p10 to p90)", title=f"batch of {batch_size}")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.15)
    figure.axes[0].invert_yaxis()
    return figure.titled(title)


def sentences(frame: pd.DataFrame, artefacts: pd.DataFrame) -> list[str]:
    """What the run showed, in words."""
    right, cost = (frame["status"] == "ok").sum(), artefacts[artefacts["mode"] == "package"].median(numeric_only=True)
    said = [
        f"{right} of {len(frame)} points have the float64 reference's logits within their dtype's rounding.",
        f"A package took {cost['compile_s']:.0f} s to compile and {cost['load_ms']:.0f} ms to load, and is "
        f"{cost['megabytes']:.1f} MB (medians).",
    ]
    for (name, users), rows in frame[frame["p50_ms"].notna()].groupby(["backbone", "batch_size"], sort=False):
        times = zip(rows["mode"], rows["p50_ms"], rows["tier"], strict=True)
        words = ", ".join(f"{mode} {ms:.3g} ms (tier {tier})" for mode, ms, tier in times)
        said.append(f"{name}, batches of {users}: {words}.")
    return said
