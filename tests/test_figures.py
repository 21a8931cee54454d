"""The committed runs' figures, drawn anew from their saved data, can be read: text is large, whole and apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.text import Text

from recexp.experiments import (
    backbone_figures,
    cache_figures,
    difference_figures,
    embedding_cache,
    export,
    graph_figures,
    page_figures,
    plots,
    quality,
)
from recexp.experiments.plots import Plot

GALLERY = Path(__file__).parents[1] / "results/gallery"
CPU, H200 = "CPU (AMD EPYC, 2 threads)", "NVIDIA H200 (SM90)"


def read(run: str, name: str = "measurements") -> pd.DataFrame:
    return pd.read_parquet(GALLERY / run / f"{name}.parquet")


def compare_backbones() -> Iterator[tuple[str, Plot]]:
    run = "compare_backbones/cpu"
    latency = read(run)
    for x, other in (("batch_size", "history_pairs"), ("history_pairs", "batch_size")):
        points = latency[latency[other] == latency[other].max()].drop(columns=["num_tokens", "num_candidates"])
        picture = plots.plot_latency(points, x, "Latency, 5 new pairs where cached", panels=True)
        yield f"{run}/latency_{x.split('_')[0]}", picture
    yield f"{run}/sizes", backbone_figures.plot_sizes(read(run, "sizes"), "What each model costs, float32")
    title = f"ml-100k, rating >= 4, {CPU}"
    yield f"{run}/tradeoffs", backbone_figures.plot_tradeoffs(read(run, "tradeoffs"), title)
    for run in ("compare_backbones/cpu", "compare_backbones_seeds/cpu"):
        scores = read(run, "quality")
        for number, task in enumerate(scores["task"].unique(), 1):
            yield f"{run}/quality_task{number}", quality.quality_plot(scores, task, f"ml-100k, {task}")


def page_sizes() -> Iterator[tuple[str, Plot]]:
    run, shape = "page_sizes/h200", "8 heads of 128, 100 new tokens a user"
    points, how = read(run), "bfloat16, graph, tier device"
    lines = points.drop(columns=["num_pages", "num_tokens", "num_candidates", "device_id", "mode"])
    lines = lines[lines["cached_tokens"] == lines["cached_tokens"].max()]
    for backbone, frame in points.groupby("backbone", sort=False):
        title = f"{backbone}: median ms of append and attention, one layer, {shape}\n{H200}, {how}"
        yield f"{run}/map_{backbone}", page_figures.plot_pages(frame, title)
        mine = lines[lines["backbone"] == backbone]
        picture = plots.plot_latency(mine, "page_size", f"{backbone}: append and attention, {how}")
        yield f"{run}/latency_{backbone}", picture
    yield f"{run}/costs", page_figures.plot_costs(points, f"What pages cost, {H200}, {shape}")


def numerical_diff() -> Iterator[tuple[str, Plot]]:
    run, (differences, growth) = (
        "numerical_diff/h200",
        (read("numerical_diff/h200", n) for n in ("differences", "growth")),
    )
    title = f"Logits on {H200}: how much of the limit is used"
    yield f"{run}/verdicts", difference_figures.plot_verdicts(differences, title)
    by_dtype = differences[(differences["kind"] == "dtype") & (differences["layer"] != "backbone")]
    for name, frame in by_dtype.groupby("model", sort=False):
        layer = frame["layer"].where(~frame["layer"].str.isdigit(), "layer " + frame["layer"])
        title = f"{name} against float64 on {H200}, ‖a − r‖ / ‖r‖"
        picture = plots.plot_error_heatmap(frame.assign(layer=frame["dtype"] + ", " + layer), title)
        yield f"{run}/operations_{name}", picture
    stream = growth[growth["layer"].str.isdigit() & (growth["operation"] == "output") & (growth["dtype"] != "float64")]
    title = f"Error against depth on {H200}, untrained weights"
    yield f"{run}/growth", difference_figures.plot_growth(stream, title)
    deep = growth[(growth["dtype"] == "bfloat16") & (growth["layer"] != "backbone")]
    for name, frame in deep.groupby("model", sort=False):
        title = f"{name}, 16 layers, bfloat16 against float64 on {H200}, ‖a − r‖ / ‖r‖"
        yield f"{run}/depth_{name}", plots.plot_error_heatmap(frame, title)
    title = f"943 requests of ml-100k on {H200}, against float64"
    yield f"{run}/rankings", difference_figures.plot_rankings(read(run, "rankings"), title)


def cuda_graphs() -> Iterator[tuple[str, Plot]]:
    run = "cuda_graphs/h200"
    for backbone, frame in read(run).groupby("backbone", sort=False):
        shown = frame.drop(columns=["num_tokens", "num_candidates"])
        yield f"{run}/latency_{backbone}", plots.plot_latency(shown, "batch_size", f"{backbone}, cached")
    yield f"{run}/launches", graph_figures.plot_launches(read(run, "launches"), f"Busy and idle, tier device, {H200}")
    report = read(run, "capture")
    first = report[(report["backbone"] == report["backbone"].iloc[0]) & (report["mode"] == "graph")]
    yield f"{run}/memory", graph_figures.plot_memory(first, read(run, "pools"), f"Memory of the buckets, {H200}")
    title = "Padding of 10,439 requests of ml-100k, 10 to 1467 tokens"
    yield f"{run}/padding", graph_figures.plot_padding(read(run, "padding"), title)


def kv_cache() -> Iterator[tuple[str, Plot]]:
    run = "kv_cache/cpu"
    caches, latency, copies = read(run, "caches"), read(run), read(run, "copies")
    title = f"Tier of 10,439 requests of ml-100k, hstu, pages of 32 tokens, {CPU}"
    yield f"{run}/tiers", cache_figures.plot_outcomes(caches[caches["model"] == "hstu"], title)
    shown = latency[(latency["tier"] == "none") | (latency["num_pages"] == 9) & (latency["host_pages"] == 4096)]
    shown = shown.drop(columns=["page_size", "num_pages", "host_pages", "num_tokens"])
    title = "Latency by tier through 9 pages of 32 tokens on the device and 4096 on the host"
    for name, frame in shown.groupby("backbone", sort=False):
        yield f"{run}/latency_{name}", plots.plot_latency(frame, "history_pairs", title)
    title = f"Tier host against tier device: what of an onload an answer waits for, {CPU}"
    yield f"{run}/copies", cache_figures.plot_copies(copies, title)


def others() -> Iterator[tuple[str, Plot]]:
    frame = read(run := "embedding_cache/cpu")
    sizes = "200,000 rows of 128 float32"
    streams = dict.fromkeys(frame["keys"].dropna().unique())
    yield f"{run}/lookups", embedding_cache.plot_lookups(frame, streams, f"Tables of {sizes}, {CPU}")
    title = f"Cache hits, {sizes}, {CPU}"
    yield f"{run}/hits", embedding_cache.plot_hits(read(run, "static_hits"), frame, title)
    title = f"100 pairs, 50 candidates a user, float32, {CPU}"
    yield "export/cpu/latency_100", export.plot_ways(read("export/cpu"), title)


def serving() -> Iterator[tuple[str, Plot]]:
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")
    from recexp.serving.rates import plot_rates

    title = "ml-100k over gRPC, CPU (AMD EPYC, 1 thread), 5 s a point"
    yield "serving/cpu/latency_against_rate", plot_rates(read("serving/cpu"), title)


RUNS = (compare_backbones, page_sizes, numerical_diff, cuda_graphs, kv_cache, others, serving)


def drawn_texts(figure: Plot) -> list[Text]:
    """What is written, but for slanted labels, whose boxes overlap where their letters do not."""
    figure.savefig("/dev/null", format="png")
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [
            *axes.texts,
            axes.title,
            *(text for legend in (axes.get_legend(),) if legend for text in legend.texts),
        ]
        for side in (axes, *axes.child_axes):
            for axis in (side.xaxis, side.yaxis):
                ticks = [tick for tick in axis._update_ticks() if axis.get_visible()]
                found += [axis.label, *(label for tick in ticks for label in (tick.label1, tick.label2))]
    shown = [text for text in found if text.get_visible() and text.get_text().strip()]
    return [text for text in shown if text.get_rotation() % 90 == 0]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_text_is_large_whole_and_apart(run) -> None:
    for name, figure in run():
        problems = unreadable(figure)
        assert not problems, (name, problems)


def unreadable(figure: Plot) -> list[str]:
    texts = drawn_texts(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = figure.bbox.size
    least = 8 * max(1, figure.get_figwidth() / 10)
    found = [f"small: {text.get_text()}" for text in texts if text.get_fontsize() < least]
    found += [f"cut: {t}" for t, b in boxes if min(b.x0, b.y0) < -1 or b.x1 > width + 1 or b.y1 > height + 1]
    pairs = combinations(boxes, 2)
    return found + [f"{a} over {b}" for (a, one), (b, two) in pairs if one.padded(-0.5).overlaps(two.padded(-0.5))]
