"""kv_cache end to end on made-up data: the rows of a run, and what its functions compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recexp import RankingModel
from recexp.data import load_interactions
from recexp.data.requests import replay
from recexp.experiments.cache_figures import sentences
from recexp.experiments.kv_cache import OUTCOMES, latencies, replays, request_log, summarise
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "configs/experiments/kv_cache_quick.yaml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_experiment(QUICK, ["training.num_steps=3"], tmp_path_factory.mktemp("results"), quiet=True)


def test_every_time_names_its_tier_and_was_checked(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    assert set(rows["status"]) == {"ok"} and set(rows["backbone"]) == {"hstu", "transformer"}
    assert set(rows["backend"]) == {"padded"}  # what was used, not "auto"
    assert set(rows["tier"]) == {"none", "device", "host", "miss"}
    assert (rows["p10_ms"] <= rows["p50_ms"]).all() and (rows["count"] >= 2).all()
    without = rows["tier"] == "none"
    assert rows.loc[without, ["num_pages", "error"]].isna().all().all()
    assert (rows.loc[~without, "error"] < 1e-5).all() and (rows.loc[~without, "page_size"] == 8).all()
    assert set(rows.loc[rows["tier"] == "host", "host_pages"]) == {512}
    assert (rows["num_tokens"] == 2 * rows["history_pairs"] + 10).all()


def test_more_pages_and_a_host_tier_find_more(run_folder: Path) -> None:
    caches = pd.read_parquet(run_folder / "caches.parquet").set_index(["model", "num_pages", "host_pages"])
    assert np.allclose(caches[list(OUTCOMES)].sum(axis=1), 1)
    for model in ("hstu", "transformer"):
        small, tiered, large = (caches.loc[key] for key in ((model, 16, 0), (model, 16, 512), (model, 257, 0)))
        assert small["miss: evicted"] > 0 == tiered["miss: evicted"] == large["miss: evicted"]
        assert small["hit rate"] < tiered["hit rate"] and small["tokens saved"] < tiered["tokens saved"]
        assert tiered["host"] > 0 == small["host"] and tiered["MB onloaded"] > 0 == small["MB offloaded"]
    assert (caches["largest logit difference"] < 1e-5).all()


def test_the_report_draws_every_figure_and_says_that_a_cpu_hides_nothing(run_folder: Path) -> None:
    figures = {path.stem for path in (run_folder / "figures").glob("*.png")}
    assert figures == {"tiers", "latency_hstu", "latency_transformer", "copies"}
    copies = pd.read_parquet(run_folder / "copies.parquet")
    assert (copies["copy ms"] > 0).all() and (copies["hidden share"] == 0).all()
    text = (run_folder / "report.html").read_text()
    assert "only CUDA can hide them" in text and "tier host" in text


@pytest.fixture(scope="module")
def small() -> tuple:
    """Untrained models and the first requests: the experiment, the models, the log."""
    overrides = ["data.synthetic.num_users=300", "cache.num_requests=60", "cache.num_pages=[16]"]
    experiment = load_experiment(QUICK, overrides)
    log = request_log(load_interactions(experiment.data), 10, experiment.cache.num_requests)
    return experiment, {name: RankingModel(config) for name, config in experiment.models.items()}, log


def test_the_log_is_the_replay_in_order(small) -> None:
    experiment, _, log = small
    interactions = load_interactions(experiment.data)
    wanted = replay(interactions, 10)
    assert [int(batch.user_ids[0]) for batch in log] == wanted.user_rows[:60].tolist()
    assert [int(batch.num_pairs[0]) for batch in log] == wanted.split[:60].tolist()
    assert len(request_log(interactions, 10, None)) == len(wanted)


def test_a_miss_has_the_reason_that_the_log_gives(small) -> None:
    """Every user alone: only histories not kept before and moved windows are missed. 40 pairs at most, hop 10."""
    experiment, models, log = small
    user = max({int(batch.user_ids[0]) for batch in log}, key=lambda u: sum(int(b.user_ids[0]) == u for b in log))
    alone = [batch for batch in log if int(batch.user_ids[0]) == user]
    frame = replays({"hstu": models["hstu"]}, alone, experiment.cache, quiet=True)
    outcomes = frame.loc[frame["host_pages"] == 0, "outcome"].tolist()
    assert len(outcomes) >= 7 and outcomes[:5] == ["miss: new user"] * 2 + ["device"] * 3
    assert set(outcomes[5:]) <= {"miss: window moved", "partial"}  # a full window moves at every visit of ten pairs
    assert "miss: window moved" in outcomes[5:]  # partial: the new window happens to begin with the same item


def test_a_wrong_answer_has_no_time(small, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, models, log = small
    right = RankingModel.predict_cached
    monkeypatch.setattr(RankingModel, "predict_cached", lambda self, batch: right(self, batch) * 1.001)
    frame = replays(models, log, experiment.cache, quiet=True)
    rows = latencies(models, frame, experiment)
    cached = rows["tier"] != "none"
    assert set(rows.loc[cached, "status"]) == {"wrong"} and rows.loc[cached, "p50_ms"].isna().all()
    assert set(rows.loc[~cached, "status"]) == {"ok"}
    assert summarise(frame)["largest logit difference"].min() > 1e-5


@pytest.mark.parametrize("path", ["predict", "predict_cached"])
def test_an_answer_that_is_no_number_has_no_time(small, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request in three: a mean or a maximum that leaves NaN out would not see it."""
    experiment, models, log = small
    right, calls = getattr(RankingModel, path), iter(range(10**6))
    monkeypatch.setattr(RankingModel, path, lambda self, b: right(self, b) * (torch.nan if next(calls) % 3 == 0 else 1))
    frame = replays({"hstu": models["hstu"]}, log, experiment.cache, quiet=True)
    rows = latencies(models, frame, experiment)
    assert "wrong" in set(rows.loc[rows["tier"] != "none", "status"])
    assert ("wrong" in set(rows.loc[rows["tier"] == "none", "status"])) == (path == "predict")
    assert (summarise(frame)["largest logit difference"] == np.inf).all()


def test_the_sentences_say_what_the_tables_say(run_folder: Path) -> None:
    caches, points, copies = (
        pd.read_parquet(run_folder / f"{n}.parquet") for n in ("caches", "measurements", "copies")
    )
    first, *others = sentences(caches, points, copies, "cuda")
    assert f"{caches['hit rate'].iloc[0]:.1%} of the requests" in first and "16 pages and 0 on the host" in first
    assert all("(tier device)" in text and "(tier none)" in text for text in others[:2])
    assert others[2] == "Of a copy from the host, 0% is hidden (median)."


@pytest.mark.gpu
def test_on_a_gpu_both_clocks_run(small) -> None:
    experiment, models, log = small
    models = {name: RankingModel(model.config, "cuda") for name, model in models.items()}
    rows = latencies(models, replays(models, log, experiment.cache, quiet=True), experiment)
    assert set(rows["status"]) == {"ok"} and (rows["host_p50_ms"] > 0).all()
    assert torch.cuda.get_device_name() in rows["device"].iloc[0]
