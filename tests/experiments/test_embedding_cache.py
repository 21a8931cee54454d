"""embedding_cache end to end on made-up data: the rows of a run, and what its functions compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recexp import RankingModel, SequenceBatch
from recexp.cache.embeddings import engines
from recexp.data import load_interactions
from recexp.experiments.embedding_cache import (
    key_streams,
    lookups,
    plot_hits,
    plot_lookups,
    static_hits,
    tables,
    through_model,
)
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "configs/experiments/embedding_cache_quick.yaml"
PRESENT = [
    name
    for name, (engine, _) in tables(torch.device("cpu"), load_experiment(QUICK)).items()
    if not engines[engine].missing("cpu")
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_experiment(QUICK, ["training.num_steps=3"], tmp_path_factory.mktemp("results"), quiet=True)


def test_every_engine_has_its_times_or_its_reason(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    timed, absent = rows[rows["status"] == "ok"], rows[rows["status"] == "refused"]
    assert set(timed["table"]) == set(PRESENT) >= {"torch", "fbgemm", "fbgemm int8", "fbgemm int4"}
    assert set(rows["table"]) == {*PRESENT, *absent["table"]} and "nve host" in set(rows["table"])
    assert absent["reason"].str.contains("build NVIDIA/nv-embedding-cache").all()
    assert timed.groupby("table")["keys"].agg(list).map(lambda k: k == ["zipf 0", "zipf 1", "synthetic"]).all()
    assert (timed["p50_ms"] > 0).all() and timed["hit_rate"].isna().all()  # no engine has a cache on a CPU
    error = timed.groupby("table")["error"].max()
    assert error["torch"] == error["fbgemm"] == 0 < error["fbgemm int8"] < 0.02 < error["fbgemm int4"] < 0.2
    size = timed.groupby("table")["device_bytes"].max()
    assert size["torch"] == size["fbgemm"] == 2000 * 16 * 4 and size["fbgemm int8"] == 2000 * (16 + 4)
    assert size["fbgemm int4"] == 2000 * (8 + 4)
    assert {path.stem for path in (run_folder / "figures").glob("*.png")} == {"lookups", "hits"}


def test_a_model_gets_the_same_logits_and_follows_updates(run_folder: Path) -> None:
    rows = pd.read_parquet(run_folder / "through_model.parquet").set_index("table")
    assert list(rows.index) == PRESENT
    assert rows["update shows"].all() and rows["KV cache emptied"].all()
    assert rows.loc["torch", "logits off by"] == rows.loc["fbgemm", "logits off by"] == 0
    assert 0 < rows.loc["fbgemm int8", "logits off by"] < rows.loc["fbgemm int4", "logits off by"]
    assert (rows["distinct keys"] <= 60).all() and (rows["ids"] > 60).all()


def test_a_table_too_small_for_the_items_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path))
    experiment = load_experiment(QUICK, ["embeddings.num_rows=59"])
    with pytest.raises(ValueError, match="num_rows is 59, and synthetic has 60"):
        key_streams(experiment, load_interactions(experiment.data, quiet=True))


def test_the_streams_have_the_skew_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path))
    experiment = load_experiment(QUICK, ["embeddings.num_lookups=40", "embeddings.zipf_exponents=[0.0, 1.0]"])
    interactions = load_interactions(experiment.data, quiet=True)
    streams = key_streams(experiment, interactions)
    config = experiment.embeddings
    assert {keys.shape for keys in streams.values()} == {(config.num_lookups, config.num_keys)}
    counts = {
        name: np.sort(np.bincount(keys.flatten(), minlength=config.num_rows))[::-1] for name, keys in streams.items()
    }
    harmonic = (1 / np.arange(1, config.num_rows + 1)).sum()
    total = config.num_lookups * config.num_keys
    assert counts["zipf 1"][0] == pytest.approx(total / harmonic, rel=0.1)
    assert counts["zipf 1"][:10].sum() == pytest.approx(total * (1 / np.arange(1, 11)).sum() / harmonic, rel=0.05)
    assert counts["zipf 0"].max() < 5 * total / config.num_rows
    items = np.sort(np.bincount(interactions.item_ids))[::-1]
    assert np.corrcoef(items, counts["synthetic"][: len(items)])[0, 1] > 0.99

    hits = static_hits(streams, experiment).set_index("keys")
    uniform, skewed = hits.loc["zipf 0"], hits.loc["zipf 1"]
    assert np.abs(uniform["hit_rate"] - uniform["cache_ratio"]).max() < 0.1  # it says nothing about later keys
    expected = [(1 / np.arange(1, round(r * config.num_rows) + 1)).sum() / harmonic for r in skewed["cache_ratio"]]
    assert np.abs(skewed["hit_rate"] - expected).max() < 0.08
    assert (hits[hits["cache_ratio"] == 1]["hit_rate"] == 1).all()


def test_an_engine_that_returns_other_rows_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load_experiment(QUICK)
    streams = {"some": torch.arange(8 * 4).view(8, 4)}
    gather = engines["torch"]._gather
    monkeypatch.setattr(engines["torch"], "_gather", lambda self, keys: gather(self, keys).flip(0))
    frame = lookups(streams, experiment, torch.device("cpu"), quiet=True).set_index("table")
    assert frame.loc["torch", "status"] == "wrong" and pd.isna(frame.loc["torch", "p50_ms"])
    assert frame.loc["fbgemm", "status"] == "ok"


def test_a_table_that_rows_do_not_fit_is_shown_with_the_reason() -> None:
    """int4 takes rows of a multiple of 4 only; the others are measured all the same."""
    experiment = load_experiment(QUICK, ["embeddings.dim=6", "models.hstu.hidden_size=18"])
    frame = lookups({"some": torch.arange(8 * 4).view(8, 4)}, experiment, torch.device("cpu"), quiet=True)
    status = frame.set_index("table")["status"].to_dict()
    assert status.pop("fbgemm int4") == "refused" and {status[name] for name in PRESENT if name in status} == {"ok"}
    assert "dim=6" in frame.set_index("table").loc["fbgemm int4", "reason"]
    batch = SequenceBatch.from_lists([0], [[1, 2]], [[1, 0]], [[5]])
    model = RankingModel(experiment.models["hstu"])
    through = through_model(model, batch, experiment, torch.device("cpu"))
    assert list(through["table"]) == [name for name in PRESENT if name != "fbgemm int4"]


def test_hit_rates_are_drawn_or_called_unknown() -> None:
    static = pd.DataFrame({"keys": ["zipf 1"] * 2, "cache_ratio": [0.1, 1.0], "hit_rate": [0.5, 1.0]})
    points = [("fbgemm", 0.1, 0.4), ("fbgemm", 0.2, 0.6), ("nve", 0.1, np.nan), ("torch", 1.0, np.nan)]
    frame = pd.DataFrame(points, columns=["engine", "cache_ratio", "hit_rate"]).assign(status="ok", keys="zipf 1")

    def legend(figure) -> list[str]:
        return [text.get_text() for text in figure.legends[0].get_texts()]

    figure = plot_hits(static, frame, "")
    assert legend(figure) == ["zipf 1", "fbgemm", "nve: unknown"]
    assert [len(drawn.get_offsets()) for drawn in figure.axes[0].collections] == [2, 0]
    assert legend(plot_hits(static, frame[3:], "")) == ["zipf 1", "no engine here has a cache"]


def test_rows_on_the_host_are_told_apart() -> None:
    common = {"status": "ok", "num_tokens": 8, "p10_ms": 1.0, "p50_ms": 2.0, "p90_ms": 3.0}
    resident = common | {"table": "torch", "device_bytes": 2**20, "host_bytes": 0, "error": 0.0}
    cached = common | {"table": "fbgemm", "device_bytes": 2**20, "host_bytes": 3 * 2**20, "error": 0.1}
    streams = {"zipf 0": torch.zeros(1), "zipf 1": torch.zeros(1)}
    frame = pd.DataFrame([row | {"keys": keys} for row in (resident, cached) for keys in streams])
    right = plot_lookups(frame, streams, "").axes[1]
    assert [text.get_text() for text in right.texts] == ["1.00 MiB, exact", "4.00 MiB, error 10.00%, 75% on the host"]
    assert [bar.get_width() for bar in right.patches] == [1, 4]
