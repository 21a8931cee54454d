import math
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest

from recexp.experiments.backbone_figures import plot_data, plot_quality, plot_sizes, plot_tradeoffs
from recexp.experiments.measure import Latency
from recexp.experiments.plots import PALETTE, Plot, plot_error_heatmap, plot_latency, table
from recexp.experiments.record import row, to_frame

PLACE = {"device": "H200", "mode": "eager", "tier": "host", "dtype": "bfloat16"}


def texts(figure: Plot) -> str:
    """Everything that is written in a figure, after drawing it."""
    figure.savefig("/dev/null", format="png")
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible())


def points() -> list[dict]:
    rows = []
    for backbone, scale in (("hstu", 1.0), ("transformer", 2.0)):
        for batch in (1, 8, 64):
            p50 = scale * (0.217 + batch)
            latency = Latency(0.9 * p50, p50, 1.5 * p50, 40 + batch, p50, 1)
            rows.append(row("ok", latency=latency, backbone=backbone, batch_size=batch, **PLACE))
    return rows


def test_latency_shows_medians_spread_and_where_it_was_measured() -> None:
    figure = plot_latency(to_frame(points()), "batch_size", "Latency of a call")
    text = texts(figure)
    axes = figure.axes[0]
    assert figure.get_suptitle().startswith("Latency of a call\nH200, bfloat16, eager, tier host, 41 to 104 runs")
    assert axes.get_ylabel() == "latency, ms (median, p10 to p90)"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == ["hstu", "transformer"]
    assert {"1.22", "2.43", "64.2", "128"} <= set(text.split("\n"))
    line, _, (bar,) = axes.containers[0]
    assert line.get_ydata() == pytest.approx([1.217, 8.217, 64.217])
    assert bar.get_segments()[0][:, 1] == pytest.approx([0.9 * 1.217, 1.5 * 1.217])


def test_latency_shows_points_without_a_time_and_their_reason() -> None:
    refused = [row("refused", reason="no graphs here", backbone="hstu", batch_size=128, **PLACE)]
    figure = plot_latency(to_frame(points() + refused), "batch_size")
    axes, labels = figure.axes[0], [text.get_text() for text in figure.legends[0].get_texts()]
    assert "hstu refused: no graphs here" in labels
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in crosses] == [[128]]
    alone = plot_latency(to_frame(refused), "batch_size")
    assert "nothing was timed" in texts(alone)
    assert not alone.axes[0].get_yticks().size


def test_latency_in_panels_keeps_the_colour_of_a_backbone() -> None:
    """A panel a mode and tier; a backbone without a time in one of them changes nobody's colour."""
    rows = points()[:3] + [r | {"mode": "graph", "tier": "device", "page_size": 32} for r in points()[3:]]
    rows.append(
        rows[0] | {"status": "refused", "reason": "no cache", "p50_ms": None, "mode": "graph", "tier": "device"}
    )
    figure = plot_latency(to_frame(rows), "batch_size", panels=True)
    assert [axes.get_title().split(",")[:2] for axes in figure.axes] == [["hstu", " eager"], ["graph", " tier device"]]
    lines = {
        line.get_label(): line.get_color() for axes in figure.axes for line in axes.lines if line.get_marker() == "x"
    }
    assert lines == {"hstu refused: no cache": PALETTE[0]}
    assert figure.axes[1].containers[0][0].get_color() == PALETTE[1] and "H200, bfloat16" in figure.get_suptitle()


def test_a_table_keeps_every_number_and_says_once_what_is_shared() -> None:
    html = table(to_frame(points())[["backbone", "batch_size", "p50_ms", "device", "tier", "reason"]]).to_html()
    assert "H200, tier host" in html and "reason" not in html and html.count("<tr>") == 7
    assert all(number in html for number in ("1.217", "128.4", ">64<"))


def test_tradeoffs_draw_every_path_and_join_sizes() -> None:
    rows = [
        {"model": f"{layer}_{i}", "layer": layer, "path": path, "p10_ms": 1.0 + i, "p50_ms": 2.0 + i, "p90_ms": 3.0 + i}
        | {"AUC": 0.7 + i / 10, "MB": 10.0 * i}
        for layer in ("hstu", "own")
        for i in (1, 2)
        for path in ("eager, tier none", "graph, tier device")
    ]
    frame = pd.DataFrame(rows)
    frame.loc[(frame["layer"] == "own") & (frame["path"] == "graph, tier device"), ["p10_ms", "p50_ms", "p90_ms"]] = (
        None
    )
    left, right = plot_tradeoffs(frame, "title").axes
    assert len(left.containers) == 3 and left.containers[0][0].get_xdata().tolist() == [3, 4]
    assert [line.get_xdata().tolist() for line in right.lines] == [[10, 20], [10, 20]]
    assert "own_2\n0.900, 20 MB" in [text.get_text() for text in right.texts]


def test_latency_survives_what_runs_bring() -> None:
    """A backbone of no name, a traceback for a reason, twelve series, one row, spans of twelve decades."""
    failed = row("failed", reason="E: " + "x" * 300 + "\n  at line 1", backbone=None, batch_size=1, **PLACE)
    labels = plot_latency(to_frame([*points(), failed]), "batch_size").legends[0].get_texts()
    assert max(len(label.get_text()) for label in labels) < 230 and "at line" not in str(labels)
    many = [{**p, "backend": f"b{i}"} for i in range(12) for p in points()[:3]]
    lines = {
        (bar[0].get_color(), bar[0].get_linestyle())
        for bar in plot_latency(to_frame(many), "batch_size").axes[0].containers
    }
    assert len(lines) == 12
    texts(plot_latency(to_frame(points()[:1]), "batch_size", panels=True))
    far = [
        {**points()[0], "p10_ms": t, "p50_ms": t, "p90_ms": t, "batch_size": n} for n, t in ((1, 1e-6), (10**6, 1e6))
    ]
    assert plot_latency(to_frame(far), "batch_size").axes[0].get_yscale() == "log"


def test_quality_below_chance_stays_in_the_picture() -> None:
    rows = pd.DataFrame([("a", "AUC", 0.3), ("b", "AUC", 0.8)], columns=["model", "metric", "value"])
    for frame in (rows, rows[:1]):
        axes = plot_quality(frame, {"AUC": 0.5}).axes[0]
        assert axes.get_xlim()[0] <= 0.3 and axes.get_xlim()[1] > max(0.5, frame["value"].max())


def test_latency_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row has page_size"):
        plot_latency(to_frame([row("ok", batch_size=1)]), "page_size")


def test_error_heatmap_writes_every_cell() -> None:
    cells = [("0", "proj", 1e-7), ("0", "ffn", 0.0), ("1", "proj", math.inf), ("1", "ffn", math.nan)]
    cells += [("head", "output", 3.2e-3)]
    figure = plot_error_heatmap(pd.DataFrame(cells, columns=["layer", "operation", "relative"]))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.0e-7", "0", "inf", "n/a", "3.2e-3"]
    assert [text.get_position() for text in axes.texts] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 2)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1", "head"]
    faces = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in axes.patches]
    assert faces[1:4] == ["#ffffff", "#cc0000", "#bbbbbb"]
    assert faces[0] != faces[4]
    texts(plot_error_heatmap(pd.DataFrame([("0", "proj", 0.0)], columns=["layer", "operation", "relative"])))


def test_quality_bars_carry_their_numbers_and_start_at_chance() -> None:
    rows = [
        ("hstu", "AUC", 0.76, 0),
        ("hstu", "AUC", 0.78, 1),
        ("item mean", "AUC", 0.738, 0),
        ("hstu", "NDCG", 0.8, 0),
    ]
    figure = plot_quality(pd.DataFrame(rows, columns=["model", "metric", "value", "seed"]), {"AUC": 0.5})
    text = texts(figure).split("\n")
    assert {"0.770", "(0.760 to 0.780)", "0.738", "0.800", "AUC (bars start at chance, 0.5)", "NDCG"} <= set(text)
    bars = figure.axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0.5, pytest.approx(0.27)), (0.5, pytest.approx(0.238))]
    assert "mean and range of 2 seeds" in figure.get_suptitle()


def test_data_counts_users_and_draws_one_request() -> None:
    example = [("context", "user 7"), ("item", "film 3"), ("action", "5"), ("candidate", "film 8")]
    figure = plot_data(np.array([20, 40, 737]), np.array([1, 5, 5, 5]), example, "MovieLens-100K")
    text = texts(figure)
    for expected in ("3 users, 797 interactions", "median 40, longest 737", "25.0%", "75.0%", "film 3", "film 8"):
        assert expected in text
    assert len(figure.axes[2].patches) == len(example)


def test_sizes_write_the_numbers() -> None:
    frame = pd.DataFrame(
        {"model": ["hstu", "other"], "parameters": [412_345, 2_500_000], "KV, bytes per token": [1024, 2048]}
    )
    text = texts(plot_sizes(frame)).split("\n")
    assert {"412,345", "2.50 M", "1,024", "2,048", "KV, bytes per token", "hstu", "other"} <= set(text)


def test_figures_are_shown_without_pyplot() -> None:
    figure = plot_sizes(pd.DataFrame({"model": ["a"], "parameters": [1]}))
    assert figure._repr_png_().startswith(b"\x89PNG")
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []
