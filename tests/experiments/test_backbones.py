"""compare_backbones end to end on made-up data: the rows of a run, and what its functions compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from recexp import RankingModel
from recexp.config import ModelConfig
from recexp.data import load_interactions, make_splits
from recexp.data.requests import make_batch
from recexp.experiments.backbones import count_flops, latencies, requests_of_length, sizes, summarise
from recexp.experiments.quality import seed_table
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "configs/experiments/compare_backbones_quick.yaml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_experiment(QUICK, ["training.num_steps=3"], tmp_path_factory.mktemp("results"), quiet=True)


def test_run_has_a_row_a_point_with_checked_times(run_folder: Path) -> None:
    run = load_run(run_folder)
    rows = run.measurements
    assert len(rows) == 8 and set(rows["status"]) == {"ok"}
    assert set(zip(rows["backbone"], rows["batch_size"], rows["history_pairs"], strict=True)) == {
        (name, b, n) for name in ("hstu", "transformer") for b in (1, 2) for n in (5, 10)
    }
    assert (rows["error"] < 1e-5).all() and (rows["p10_ms"] <= rows["p50_ms"]).all() and (rows["p50_ms"] > 0).all()
    assert (
        set(rows["tier"]) == {"none"}
        and (rows["num_tokens"] == rows["batch_size"] * (2 * rows["history_pairs"] + 3)).all()
    )
    assert run.config["training"]["num_steps"] == 3 and run.config["models"]["hstu"]["window_hop"] == 5


def test_run_has_quality_precision_figures_and_a_report_of_its_own(run_folder: Path) -> None:
    quality = pd.read_parquet(run_folder / "quality.parquet")
    models = {"hstu", "transformer", "random", "item mean", "ridge bias model", "ALS on its residuals"}
    assert set(quality["model"]) == models and set(quality["metric"]) == {"AUC", "GAUC", "NDCG@10"}
    precision = pd.read_parquet(run_folder / "precision.parquet").set_index(["model", "dtype"])
    error = precision["relative error of logits"]
    for name in ("hstu", "transformer"):
        assert error[name]["float64"] < 1e-12 < error[name]["float32"] < 1e-5 < error[name]["bfloat16"] < 0.1
        assert (
            precision["Kendall tau"][name]["float64"] > 0.98
        )  # an item twice among the candidates may fall either way
    operations = pd.read_parquet(run_folder / "differences.parquet")
    assert {"uvqk", "attention", "output_norm", "proj"} <= set(operations.query("model == 'hstu'")["operation"])
    names = {path.name for path in (run_folder / "figures").iterdir()}
    assert {
        "data.png",
        "quality_task1.png",
        "sizes.png",
        "latency_batch.png",
        "latency_history.png",
        "training.png",
    } <= names
    report = (run_folder / "report.html").read_text()
    assert report.count("data:image/png") >= 9 and "<script" not in report


def test_flops_are_those_of_the_formulas() -> None:
    """One layer of width D = Hd, T tokens: projections 2·T·D·outputs, attention 4·T·T·D, head 2·c·(D·64 + 64·t)."""
    config = load_experiment(QUICK)
    interactions = load_interactions(config.data)
    batch, _ = make_batch(interactions, requests_of_length(interactions, 8, 3, 1))
    tokens, width, head = 2 * 8 + 3, 64, 2 * 3 * (64 * 64 + 64 * 2)
    for name, outputs in (("hstu", 4 * width + width), ("transformer", 3 * width + width + 2 * 32)):
        expected = 2 * tokens * width * outputs + 4 * tokens * tokens * width + head
        assert count_flops(RankingModel(config.models[name]), batch) == expected


def test_sizes_count_parameters() -> None:
    config = load_experiment(QUICK)
    frame = sizes(
        {n: RankingModel(m) for n, m in config.models.items()}, load_interactions(config.data), config.measure
    )
    hstu = frame.set_index("model").loc["hstu"]
    width = 64
    assert hstu["parameters in layers"] == 4 * width * (width + 1) + width * width + 4 * width
    assert hstu["KV cache, bytes per token (float32)"] == 2 * 1 * 64 * 4


def test_a_wrong_backend_gets_no_latency() -> None:
    """A backend whose values are off by a tenth is caught by the check before it is timed."""
    from recexp.layers import attention_backends, register_attention_backend
    from recexp.layers.attention import AttentionCall

    @register_attention_backend("off")
    def off(call: AttentionCall) -> torch.Tensor:
        return attention_backends["padded"].run(replace(call, v=0.9 * call.v))

    config = load_experiment(QUICK, ["measure.batch_sizes=[1]", "measure.history_pairs=[5]"])
    models = {
        "hstu": RankingModel(ModelConfig(num_items=60, num_layers=1, max_history_pairs=20, attention_backend="off"))
    }
    rows = latencies(models, load_interactions(config.data), config.measure, quiet=True)
    assert rows["status"].tolist() == ["wrong"] and rows["p50_ms"].isna().all() and "1e-5" in rows["reason"][0]


def test_summary_compares_no_latency_that_failed_its_check(run_folder: Path) -> None:
    frames = [pd.read_parquet(run_folder / f"{name}.parquet") for name in ("quality", "measurements", "sizes")]
    times = ["p10_ms", "p50_ms", "p90_ms"]
    hstu = frames[1]["backbone"] == "hstu"
    frames[1].loc[hstu, times], frames[1].loc[~hstu, times] = [1.0, 2.0, 3.0], [3.5, 4.0, 5.0]
    table, sentences = summarise(*frames)
    assert list(table.loc["hstu"].index)[-1] == "parameters" and "hstu is 2.0 times as fast as" in sentences[1]
    frames[1].loc[hstu, times] = [1.0, 2.0, 3.6]
    assert "the spreads overlap, so neither is called faster" in summarise(*frames)[1][1]
    frames[1].loc[hstu, times] = pd.NA
    assert "not compared" in summarise(*frames)[1][1]


def test_summary_says_who_is_ahead_by_either_metric(run_folder: Path) -> None:
    frames = [pd.read_parquet(run_folder / f"{name}.parquet") for name in ("quality", "measurements", "sizes")]
    values = {"ridge bias model": 0.7, "item mean": 0.65, "ALS on its residuals": 0.71, "transformer": 0.5}
    for value, verdict in ((0.705, "only ties with"), (0.72, "is ahead of"), (0.68, "stays behind")):
        frames[0]["value"] = frames[0]["model"].map(values | {"hstu": value, "random": 0.5})
        sentence = summarise(*frames)[1][0]
        assert sentence.count(f"hstu {verdict} the ridge bias model") == 2
        assert ("so small a set" in sentence) == (value < 0.71)


def test_seed_table_has_every_seed_and_the_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path))
    folder = seed_table(QUICK, ["training.num_steps=2"], 2, tmp_path / "results", quiet=True)
    frame = pd.read_parquet(load_run(folder).path / "quality.parquet")
    by_seed = frame.query("metric == 'AUC'").groupby(["model", "task"])["value"]
    assert set(frame["seed"]) == {0, 1} and (by_seed.count() == 2).all()
    assert by_seed.nunique()["hstu"].min() == 2 and by_seed.nunique()["ridge bias model"].max() == 1


def test_too_long_a_history_names_the_longest() -> None:
    config = load_experiment(QUICK)
    interactions = load_interactions(config.data)
    assert make_splits(config.data, interactions).test.end.max() == interactions.lengths.max()
    with pytest.raises(ValueError, match=f"the longest history has {interactions.lengths.max()}: lower history_pairs"):
        requests_of_length(interactions, 500, 3, 1)
