"""compare_backbones end to end on made-up data: the rows of a run, and what its functions compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from recexp import RankingModel, SequenceBatch
from recexp.config import ModelConfig
from recexp.data import load_interactions, make_splits
from recexp.data.interactions import Interactions
from recexp.data.requests import Requests
from recexp.experiments.backbones import check_rule, example_tokens, sizes, summarise
from recexp.experiments.latency import _cached, in_dtype, latencies, requests_of_length
from recexp.experiments.quality import seed_table
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment
from recexp.layers import backbones, register_backbone

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "configs/experiments/compare_backbones_quick.yaml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_experiment(QUICK, ["training.num_steps=3"], tmp_path_factory.mktemp("results"), quiet=True)


def test_run_has_a_row_a_point_and_path_with_checked_times(run_folder: Path) -> None:
    run = load_run(run_folder)
    rows, own = run.measurements, run.measurements["backbone"] == "attention_free"
    paths = {("eager", "none"), ("eager", "device"), ("static", "device")}
    found = set(zip(*(rows[c] for c in ("backbone", "batch_size", "history_pairs", "mode", "tier")), strict=True))
    assert len(rows) == 36 and found == {
        (name, b, n, *path) for name in run.config["models"] for b in (1, 2) for n in (5, 10) for path in paths
    }
    refused = rows["status"] == "refused"
    assert (refused == (own & (rows["tier"] == "device"))).all() and (rows["status"][~refused] == "ok").all()
    assert rows["reason"][refused].str.contains("it has no paged cache").all() and rows["p50_ms"][refused].isna().all()
    timed = rows[~refused]
    assert (timed["error"] < 1e-5).all() and (timed["p10_ms"] <= timed["p50_ms"]).all() and (timed["p50_ms"] > 0).all()
    assert (timed["tflops_share"] > 0).all() and set(rows["device_id"]) == {"cpu"}
    assert (rows["num_tokens"] == rows["batch_size"] * (2 * rows["history_pairs"] + 3)).all()
    cached = rows["tier"] == "device"
    assert (rows["new_tokens"] == (2 * rows["history_pairs"]).where(~cached, 4)).all()
    assert (rows["cached_tokens"] + rows["new_tokens"] == 2 * rows["history_pairs"]).all()
    assert set(rows["backend"][rows["mode"] == "static"]) == {"paged", "none"}
    assert run.config["training"]["num_steps"] == 3 and run.config["models"]["hstu"]["window_hop"] == 5


def test_run_has_quality_figures_and_a_report_of_its_own(run_folder: Path) -> None:
    quality = pd.read_parquet(run_folder / "quality.parquet")
    models = {"hstu", "transformer", "attention_free"}
    models |= {"random", "item mean", "ridge bias model", "ALS on its residuals"}
    assert set(quality["model"]) == models and set(quality["metric"]) == {"AUC", "GAUC", "NDCG@10"}
    names = {path.name for path in (run_folder / "figures").iterdir()}
    figures = ("data", "quality_task1", "sizes", "latency_batch", "latency_history", "training", "tradeoffs")
    assert {f"{name}.png" for name in figures} <= names
    report = (run_folder / "report.html").read_text()
    assert report.count("data:image/png") >= 8 and "<script" not in report


def test_every_figure_has_the_layer_of_the_notebook(run_folder: Path) -> None:
    for name in ("quality_task1", "sizes", "latency_batch", "latency_history", "training", "tradeoffs"):
        assert "attention_free" in (run_folder / f"figures/{name}.svg").read_text(), name  # glyphs come with a comment


class Broken(nn.Module):
    """A linear layer, and what a way to break the rule adds."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.spoil = nn.Linear(64, 64), spoil

    def forward(self, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return self.linear(x) + self.spoil(x)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.mean(0, keepdim=True), "lets history token 0 see history token 1"),
        (lambda x: x.cumsum(0), "lets candidate 1 see candidate 0"),
        (lambda x: torch.cat([x[:6] * 0, x[:3]]), "lets history token 0 of the next user see history token 0"),
        (lambda x: x / (x * 0), "must make 9, of finite numbers"),
        (lambda x: x[:, :3], "fails: RuntimeError: The size of tensor"),
    ],
)
def test_a_layer_that_breaks_the_rule_is_refused(
    spoil: Callable[[torch.Tensor], torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbones, "_entries", dict(backbones._entries))
    config = load_experiment(QUICK).models["attention_free"]
    register_backbone("attention_free")(lambda config: Broken(spoil))
    with pytest.raises(ValueError, match=f"^models.mine: .*{message}"):
        check_rule("mine", config)


def test_the_layers_of_the_experiment_keep_the_rule() -> None:
    for name, config in load_experiment(QUICK).models.items():
        check_rule(name, config)


def test_the_layer_of_the_notebook_keeps_the_rule_of_visibility() -> None:
    """A history token sees nothing later, a candidate all of the history and no other candidate."""
    model = RankingModel(load_experiment(QUICK).models["attention_free"], dtype=torch.float64)

    def items(history: list[int], candidates: list[int]) -> torch.Tensor:
        actions = [[1] * len(history), [2]]
        batch = SequenceBatch.from_lists([0, 1], [history, [5]], actions, [candidates, [9, 8]])
        with torch.no_grad():
            return model.eval()(batch, rows="items")

    first, more = items([3, 4, 5], [6, 7]), items([3, 4, 6], [6])
    assert torch.allclose(first[:2], more[:2], rtol=1e-12) and not torch.allclose(first[3], more[3], rtol=1e-3)
    alone, swapped = items([3, 4, 5], [7]), items([3, 4, 5], [7, 6])
    assert torch.allclose(first[4], alone[3], rtol=1e-12) and torch.allclose(first[3], swapped[4], rtol=1e-12)
    assert torch.allclose(first[-3:], alone[-3:], rtol=1e-12)  # of the other user


def test_sizes_count_parameters_and_cached_users(run_folder: Path) -> None:
    config = load_experiment(QUICK)
    models = {name: RankingModel(model) for name, model in config.models.items()}
    frame = sizes(models, load_run(run_folder).measurements, config.measure).set_index("model")
    width, hstu = 64, frame.loc["hstu"]
    assert hstu["parameters in layers"] == 4 * width * (width + 1) + width * width + 4 * width
    assert (
        hstu["KV cache, bytes per token"] == 2 * 1 * 64 * 4
        and hstu["parameters"] * 4 + 1000 * 20 * 512 == hstu.iloc[-1]
    )
    assert frame.loc["attention_free", "KV cache, bytes per token"] == 0


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
    rows = latencies(models, load_interactions(config.data), config, quiet=True)
    assert rows["status"].tolist() == ["wrong", "wrong", "ok"]  # static buffers take another backend, which says so
    assert rows["p50_ms"][:2].isna().all() and "differ from float64 by" in rows["reason"][0]


def test_a_cached_request_is_answered_from_the_cache_and_needs_one() -> None:
    """A table with other values changes the logits, so what was cached was read; without any, the point is refused."""
    config = load_experiment(QUICK, ["measure.batch_sizes=[1]", "measure.history_pairs=[5]", "replay.new_pairs=5"])
    models = {"hstu": RankingModel(config.models["hstu"])}
    rows = latencies(models, load_interactions(config.data), config, quiet=True)
    assert rows["status"].tolist() == ["ok", "refused", "refused"] and "lower replay.new_pairs" in rows["reason"][1]
    batch = SequenceBatch.from_lists([7, 8], [[1, 2, 3], [4, 5, 6]], [[1] * 3] * 2, [[9, 8]] * 2)
    for tier, mode in (("device", "eager"), ("device", "static")):
        model = in_dtype(models["hstu"], torch.float32, attention_backend="paged")
        call, inputs = _cached(model, [batch] * 4, 1, 4, tier, mode)
        before = call(*inputs[0])
        assert torch.allclose(before, model.predict(batch), atol=1e-5) and len(inputs) == 8
        call(*inputs[4])  # the other newest pairs
        model.cache.tables[0].neg_()
        assert not torch.allclose(call(*inputs[0]), before, atol=1e-3)


def test_summary_compares_no_latency_that_failed_its_check(run_folder: Path) -> None:
    names = ("quality", "measurements", "sizes")
    quality, latency, size = (pd.read_parquet(run_folder / f"{name}.parquet") for name in names)
    latency = latency[latency["backbone"] != "attention_free"]
    times, hstu = ["p10_ms", "p50_ms", "p90_ms"], latency["backbone"] == "hstu"
    latency.loc[hstu, times], latency.loc[~hstu, times] = [1.0, 2.0, 3.0], [3.5, 4.0, 5.0]
    table, sentences = summarise(quality, latency, size)
    assert table.loc["hstu", "p50 ms, eager, tier device"] == 2 and table.loc["hstu", "parameters"] > 0
    assert all("hstu is 2.0 times as fast as transformer" in said for said in sentences[1:]) and len(sentences) == 3
    latency.loc[hstu, times] = [1.0, 2.0, 3.6]
    assert "the spreads overlap, so none is called faster" in summarise(quality, latency, size)[1][1]
    latency.loc[hstu, times], latency.loc[hstu, "status"] = pd.NA, "wrong"
    assert summarise(quality, latency, size)[1][1].endswith("transformer in 4.00 ms (3.50 to 5.00), hstu not (wrong).")


def test_tradeoffs_join_quality_time_and_memory(run_folder: Path) -> None:
    frame = pd.read_parquet(run_folder / "tradeoffs.parquet").set_index(["model", "path"])
    assert len(frame) == 9 and frame.loc[("hstu", "static, tier device"), "p50_ms"] > 0
    quality = pd.read_parquet(run_folder / "quality.parquet").query("model == 'hstu' and metric == 'AUC'")["value"]
    assert (frame.loc["hstu", "AUC"] == quality.iloc[0]).all() and frame.loc["attention_free", "MB"].max() < 1
    assert frame["p50_ms"].isna().sum() == 2


def test_summary_says_who_is_ahead_by_either_metric(run_folder: Path) -> None:
    frames = [pd.read_parquet(run_folder / f"{name}.parquet") for name in ("quality", "measurements", "sizes")]
    values = {
        "ridge bias model": 0.7,
        "item mean": 0.65,
        "ALS on its residuals": 0.71,
        "transformer": 0.5,
        "attention_free": 0.5,
    }
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


def test_example_tokens_by_hand() -> None:
    """User b has more candidates; items and ratings appear as in the source, the newest last."""
    users, items, times = list("aabbbbb"), [7, 8, 9, 7, 8, 5, 6], [1, 2, 5, 4, 3, 6, 7]
    log = Interactions.from_events("made up", users, items, [1, 1, 1, 2, 1, 2, 2], times, [math.nan, 0.5, 5.0])
    requests = Requests(np.array([0, 1]), np.array([1, 3]), np.array([2, 5]))
    assert example_tokens(log, requests, num_pairs=2, num_candidates=1) == [
        ("item", "item\n7"), ("action", "rated\n5"), ("item", "item\n9"), ("action", "rated\n0.5"),
        ("candidate", "item\n5?"),
    ]  # fmt: skip
