"""The measurements of embedding_cache: the same rows in every engine, asked for with keys of different skew."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from recexp.batch import SequenceBatch
from recexp.cache.embeddings import EmbeddingStore, engines
from recexp.config import ExperimentConfig
from recexp.data.interactions import Interactions
from recexp.devices import describe_device
from recexp.experiments.measure import achieved, ceilings, measure, measure_undisturbed
from recexp.experiments.plots import MARKERS, PALETTE, Plot, digits, medians, plain, style
from recexp.experiments.record import row, to_frame
from recexp.model import RankingModel

Streams = Mapping[str, Tensor]  # name -> keys [num_lookups, num_keys]
TIMED = 4  # lookups that take turns


def tables(device: torch.device, experiment: ExperimentConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every table that devices of this type could have, by name: its engine and the engine's options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"torch": ("torch", {}), "fbgemm": ("fbgemm", {})}
    found |= {f"fbgemm {bits}": ("fbgemm", {"precision": bits}) for bits in ("int8", "int4")}
    if device.type == "cpu":
        return found | {"nve host": ("nve", {})}
    for ratio in experiment.embeddings.cache_ratios:
        found[f"fbgemm, cache {ratio:g}"] = ("fbgemm", {"cache_ratio": ratio})
        for layer in ("linear_uvm", "hierarchical"):
            found[f"nve {layer}, cache {ratio:g}"] = ("nve", {"layer": layer, "cache_ratio": ratio})
    return found


def refusal(engine: str, rows: Tensor, device: torch.device, options: Mapping[str, Any]) -> str | None:
    """Why there is no such store here for rows [num_rows, dim]; None if there is."""
    try:
        engines[engine](*rows.shape, device=device, **options)
    except ValueError as error:
        return str(error)
    return None


def fill(engine: str, rows: Tensor, device: torch.device, options: Mapping[str, Any]) -> EmbeddingStore:
    """A store of these rows [num_rows, dim], key = row."""
    store = engines[engine](*rows.shape, device=device, **options)
    store.update(torch.arange(len(rows), device=device), rows.to(device))
    return store


def key_streams(experiment: ExperimentConfig, interactions: Interactions) -> Streams:
    """Keys by Zipf's law at each exponent, and the log's items in the order of time (from the start again where it ends
    too soon). The keys asked for most are spread over the table."""
    config, random = experiment.embeddings, np.random.default_rng(0)
    if (least := interactions.num_items) > (num_rows := config.num_rows):
        raise ValueError(f"embeddings.num_rows is {num_rows}, and {interactions.name} has {least} items: raise it")
    shape, place, streams = (config.num_lookups, config.num_keys), random.permutation(num_rows), {}
    for exponent in config.zipf_exponents:
        share = np.arange(1, num_rows + 1) ** -exponent
        streams[f"zipf {exponent:g}"] = random.choice(num_rows, shape, p=share / share.sum())
    log = interactions.item_ids[np.argsort(interactions.timestamps, kind="stable")]
    streams[interactions.name] = np.resize(log, shape)
    return {name: torch.from_numpy(place[keys]) for name, keys in streams.items()}


def lookups(streams: Streams, experiment: ExperimentConfig, device: torch.device, quiet: bool = False) -> pd.DataFrame:
    """Rows of results, one a table and stream, with columns of their own: table, engine, keys, cache_ratio, hit_rate
    (of the lookups before the timed ones, a cold start included; missing where unknown), device_bytes, host_bytes.

    Timed keys are checked beforehand, as a model's are. A table of float32 that does not give the rows back bit for bit
    is wrong, and has no time.
    """
    config, measured = experiment.embeddings, experiment.measure
    limits = measured.model_dump(include={"min_runs", "max_runs", "max_seconds"})
    rows = torch.randn(config.num_rows, config.dim, generator=torch.Generator().manual_seed(0))
    common = {"device": describe_device(device), "dtype": "float32", "num_tokens": config.num_keys}
    points, more = [], []
    for table, (engine, options) in tqdm(tables(device, experiment).items(), disable=quiet, unit="table"):
        about: dict[str, Any] = common | {"backend": table}
        own = {"table": table, "engine": table.partition(",")[0], "cache_ratio": options.get("cache_ratio", 1.0)}
        if reason := refusal(engine, rows, device, options):
            points.append(row("refused", reason=reason, **about))
            more.append(own)
            continue
        for name, keys in streams.items():
            store = fill(engine, rows, device, options)
            *_, answer = (store.lookup(some.to(device)) for some in keys[:-TIMED])
            stats, wanted = store.stats(), rows[keys[-TIMED - 1]]
            sizes = {"device_bytes": stats.device_bytes, "host_bytes": stats.host_bytes}
            more.append(own | {"keys": name, "hit_rate": stats.hit_rate} | sizes)
            error = float((answer.cpu() - wanted).norm() / wanted.norm())
            if error and "precision" not in options:
                points.append(row("wrong", reason="rows differ from the table's", error=error, **about))
                continue
            inputs = [(some,) for some in keys[-TIMED:].to(device)]
            latency = measure_undisturbed(partial(store.lookup, checked=True), inputs, device=device, **limits)
            moved = config.num_keys * (max(sizes.values()) / config.num_rows + 4 * config.dim)  # read and written
            rate = achieved(latency, ceilings(device, torch.float32), num_bytes=moved)
            points.append(row("ok", latency=latency, mode="eager", tier="none", error=error, **about, **rate))
    types = {"hit_rate": "Float64", "device_bytes": "Int64", "host_bytes": "Int64"}
    return to_frame(points).join(pd.DataFrame(more).astype(types))


def static_hits(streams: Streams, experiment: ExperimentConfig) -> pd.DataFrame:
    """keys, cache_ratio, hit_rate: of a stream's second half, in a cache of the keys its first half asked for most."""
    num_rows, parts = experiment.embeddings.num_rows, []
    held = np.unique(np.geomspace(min(10, num_rows), num_rows, 25).round().astype(int))
    for name, keys in streams.items():
        before, after = (np.bincount(half.flatten(), minlength=num_rows) for half in np.array_split(keys.numpy(), 2))
        hits = after[np.argsort(-before, kind="stable")].cumsum()[held - 1] / after.sum()
        parts.append(pd.DataFrame({"keys": name, "cache_ratio": held / num_rows, "hit_rate": hits}))
    return pd.concat(parts, ignore_index=True)


def through_model(
    model: RankingModel, batch: SequenceBatch, experiment: ExperimentConfig, device: torch.device
) -> pd.DataFrame:
    """A row a table that can be had here, with the model's items in it: how far logits are from those over the model's
    own table, ids and distinct keys of the batch, what an update of one row does, and ms to update all rows."""
    own, weight = model.predict(batch), model.sequence.item_embedding.weight.detach().cpu()
    pages, rows = 2 + batch.batch_size * (1 + model.config.max_history_tokens // 16), []
    for table, (engine, options) in tables(device, experiment).items():
        if refusal(engine, weight, device, options):
            continue
        store, cache = fill(engine, weight, device, options), model.make_cache(num_pages=pages, page_size=16)
        model.use_stores({"item": store})
        found = {"table": table, "logits off by": float((model.predict(batch) - own).abs().max())}
        found |= {"ids": len(batch.item_ids) + len(batch.candidate_ids), "distinct keys": store.num_keys}
        model.predict_cached(batch)
        before = model.predict_cached(batch)
        store.update(batch.candidate_ids[:1].to(device), torch.ones(1, store.dim, device=device))
        found["update shows"] = not torch.equal(model.predict_cached(batch), before)
        found["KV cache emptied"] = set(cache.statistics()["tier"].tail(batch.batch_size)) == {"miss"}
        call = (torch.arange(len(weight), device=device), weight.to(device))
        found["update of all, ms"] = measure(store.update, [call], device=device, min_runs=3, max_runs=10).p50_ms
        rows.append(found)
    model.use_stores({})
    return pd.DataFrame(rows)


@style
def plot_lookups(frame: pd.DataFrame, streams: Streams, title: str) -> Plot:
    """Left the time of a lookup, a line a table; right what a table takes and how far its rows are from float32."""
    figure, timed = Plot(10, 4.2), frame[frame["status"] == "ok"]
    (left, right), groups = figure.panels(2, sharey=False), timed.groupby("table", sort=False)
    for (table, part), colour, marker in zip(groups, cycle(PALETTE), cycle(MARKERS + "<>h"), strict=False):
        middle, spread = medians(part)
        at = [list(streams).index(name) for name in part["keys"]]
        left.errorbar(at, middle, spread, label=str(table), color=colour, marker=marker, ls="")
        left.plot(at[:-1], middle[:-1], color=colour)  # the last are of no exponent
        for point in zip(at, middle, strict=True) if len(groups) <= 4 else ():
            figure.beside(left, digits(point[1]), point, colour)
        device, host, error = (part[name].iloc[0] for name in ("device_bytes", "host_bytes", "error"))
        where = f", {host / (device + host):.0%} on the host" if host else ""
        bars = right.barh(str(table), (device + host) / 2**20, color=colour)
        exact = f"error {error:.2%}" if error else "exact"
        right.bar_label(bars, [f"{digits((device + host) / 2**20)} MiB, {exact}{where}"], padding=3)
    left.set(yscale="log", ylabel=f"ms, {timed['num_tokens'].iloc[0]:,} keys (median, p10 to p90)")
    left.set_xticks(range(len(streams)), list(streams))
    left.set_xlabel("keys: Zipf's law by exponent, or a log")
    plain(left.yaxis)
    right.set_xlabel("memory of the table, MiB")
    right.margins(x=0.6)
    right.invert_yaxis()
    figure.key()
    return figure.titled(title)


@style
def plot_hits(static: pd.DataFrame, frame: pd.DataFrame, title: str) -> Plot:
    """Lines: ``static_hits``. Markers: what engines with a cache report, the colour the keys'."""
    figure = Plot(9, 4.5)
    (axes,) = figure.panels(1)
    colours = dict(zip(static["keys"].unique(), cycle(PALETTE), strict=False))
    for (name, part), line in zip(static.groupby("keys", sort=False), cycle(("-", "--", "-.", ":")), strict=False):
        axes.plot(part["cache_ratio"], 100 * part["hit_rate"], color=colours[name], ls=line, label=name)
    caching = frame[(frame["status"] == "ok") & (frame["cache_ratio"] < 1)]
    for (engine, part), marker in zip(caching.groupby("engine", sort=False), cycle(MARKERS), strict=False):
        part = part[part["hit_rate"].notna()]
        colour, label = list(part["keys"].map(colours)), f"{engine}{'' if len(part) else ': unknown'}"
        axes.scatter(part["cache_ratio"], 100 * part["hit_rate"], c=colour, marker=marker, label=label)
    if caching.empty:
        axes.plot([], [], " ", label="no engine here has a cache")
    axes.set(xscale="log", xlabel="cached rows / rows", ylabel="keys found in the cache, %", ylim=(0, 102))
    axes.xaxis.set_major_formatter("{x:g}")
    figure.key()
    return figure.titled(title)


def sentences(frame: pd.DataFrame, static: pd.DataFrame, through: pd.DataFrame) -> list[str]:
    """What the run showed, in words."""
    timed, said = frame[frame["status"] == "ok"].sort_values("p50_ms"), []
    for keys in static["keys"].iloc[[0, -1]]:
        best = timed[timed["keys"] == keys].iloc[0]
        said.append(f"{best['num_tokens']:,} keys of {keys}: {best['p50_ms']:.3g} ms at best ({best['table']}).")
    for lost in through[through["logits off by"] > 0].to_dict("records"):
        said.append(f"{lost['table']} moved a logit by up to {lost['logits off by']:.1g}.")
    far = (static["cache_ratio"] - 0.05).abs()
    near = static[far == far.min()]
    hits = ", ".join(f"{hit:.0%} ({keys})" for keys, hit in zip(near["keys"], near["hit_rate"], strict=True))
    return [*said, f"{near['cache_ratio'].iloc[0]:.1%} of the rows, cached once, would hit {hits} of later keys."]
