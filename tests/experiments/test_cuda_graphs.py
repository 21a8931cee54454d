"""cuda_graphs end to end without CUDA: the rows of a run, and what its functions compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from recexp.experiments.cuda_graphs import cached_request, capture, latencies, make_model, memory_alone
from recexp.experiments.graph_figures import padding, plot_launches, plot_memory, sentences
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment

QUICK = Path(__file__).parents[2] / "configs/experiments/cuda_graphs_quick.yaml"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(QUICK, [], tmp_path_factory.mktemp("results"), quiet=True)


def test_every_point_was_checked(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    assert set(rows["status"]) == {"ok"} and len(rows) == 8
    assert set(zip(rows["backbone"], rows["batch_size"], rows["mode"], strict=True)) == {
        (name, b, mode) for name in ("hstu", "transformer") for b in (1, 2) for mode in ("eager", "static")
    }
    assert (rows["error"] < 1e-5).all() and (rows["p50_ms"] > 0).all() and set(rows["tier"]) == {"device"}
    assert (rows["num_tokens"] == 46 * rows["batch_size"]).all() and set(rows["page_size"]) == {8}
    assert set(rows["cached_tokens"]) == {34} and set(rows["new_tokens"]) == {6} and (rows["tflops_share"] > 0).all()


def test_the_run_says_what_it_cost(run_folder: Path) -> None:
    report = pd.read_parquet(run_folder / "capture.parquet")
    tokens = (10, 11, 13, 18, 28, 48)  # 8 candidates, and a 32nd to all of 40 history tokens
    assert set(report["num_tokens"] / report["batch_size"]) == set(tokens) and len(report) == 2 * 3 * len(tokens)
    assert set(report["mode"]) == {"static"} and (report["replays"] > 0).sum() == 4
    used = report[report["replays"] > 0]
    assert np.allclose(used["padding"], 1 - 12 / 13) and set(used["num_tokens"]) == {13, 26}
    names = {path.name for path in (run_folder / "figures").iterdir()}
    assert {"latency_hstu.png", "latency_transformer.png", "padding.png"} <= names


def test_requests_find_all_but_their_newest_tokens_cached() -> None:
    """Eager and replayed logits agree, and both read what the tables hold: other keys, other logits."""
    experiment = load_experiment(QUICK)
    model = make_model("hstu", experiment, CPU)
    (graphs,) = capture(model, experiment).values()
    with cached_request(model, 2, 6, 5) as request:
        first = request.inputs[0][0]
        assert first.shape == (2 * 11, 64) and not torch.equal(first, request.inputs[1][0])
        before = request.eager(first)
        assert before.shape == (10, 2) and torch.allclose(request.replay(graphs, first), before, rtol=1e-5, atol=1e-6)
        model.cache.tables[0].neg_()
        assert not torch.allclose(request.eager(first), before, rtol=1e-3, atol=1e-4)
    assert model.cache.statistics()["tokens_reused"].tolist() == [0, 0, 34, 34]


def test_a_wrong_replay_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load_experiment(QUICK)
    model = make_model("hstu", experiment, CPU)
    modes = capture(model, experiment)
    replay = modes["static"].replay

    def off(*args: object) -> Tensor:
        return replay(*args) * 1.01

    monkeypatch.setattr(modes["static"], "replay", off)
    rows, _ = latencies(model, "hstu", modes, experiment, quiet=True)
    assert rows["status"].tolist() == ["ok", "wrong"] * 2 and rows.loc[rows["status"] == "wrong", "p50_ms"].isna().all()


def test_padding_by_hand() -> None:
    """Lengths 2, 5 and 9 in sizes 9: 16 of 27 used; in 5 and 9 (halving: 1 + 8/2, 9): 16 of 19."""
    frame = padding([2, 5, 9], 1, [1, 2]).set_index(["buckets", "spacing"])["padding"]
    assert frame[1, "halving"] == frame[1, "even"] == 1 - 16 / 27
    assert frame[2, "halving"] == 1 - 16 / 19


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_bucket_is_captured_alone_too(device: str) -> None:
    experiment = load_experiment(QUICK)
    model = make_model("hstu", experiment, torch.device(device))
    together = model.make_graphs(experiment.graphs).report()
    alone = memory_alone(model, experiment)
    shape = ["batch_size", "num_tokens"]
    assert sorted(map(tuple, alone[shape].to_numpy())) == sorted(map(tuple, together[shape].to_numpy()))
    assert model.graphs is None
    if device == "cuda":
        assert (alone["memory_bytes"] > 0).all() and alone["memory_bytes"].sum() > together["memory_bytes"].sum()


def test_figures_and_words_of_a_gpu_run() -> None:
    """What only a run with CUDA draws, from frames like its own."""
    points = [("eager", 300, 0.6, 2.0), ("graph", 300, 0.6, 0.7)]
    rows = [
        {"backbone": "hstu", "batch_size": 1, "mode": m, "launches": n, "busy_ms": busy, "p50_ms": p50, "status": "ok"}
        for m, n, busy, p50 in points
    ]
    figure = plot_launches(pd.DataFrame(rows), "Busy and idle, a GPU")
    widths = [bar.get_width() for bars in figure.axes[0].containers[:2] for bar in bars]
    assert np.allclose(widths, [0.6, 0.6, 1.4, 0.1])
    report = pd.DataFrame({"batch_size": [2, 1], "num_tokens": [20, 10], "memory_bytes": [10**9, 0]})
    figure = plot_memory(report, report.assign(memory_bytes=[10**9, 5 * 10**8]), "Memory")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["a pool each: 1.50 GB together", "one pool: 1.00 GB together"]
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["1,000", "500"], ["1,000", "0"]]
    made = report.assign(backbone="hstu", mode="graph", segments=1, capture_ms=[1500.0, 500.0])
    said = " ".join(sentences(pd.DataFrame(rows), made))
    assert "graph 0.700 ms (2.86 times as fast)" in said and "2 buckets were captured in 2.0 s" in said
