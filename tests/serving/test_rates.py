"""serving end to end on made-up data: the rows of a run, and their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from recexp.batch import SequenceBatch
from recexp.experiments.record import load_run
from recexp.experiments.run import load_experiment, run_experiment
from recexp.serving.client import Client
from recexp.serving.rates import rates

from .conftest import make_model, request_of

QUICK = Path(__file__).parents[2] / "configs/experiments/serving_quick.yaml"


@pytest.fixture(scope="module")
def run_folder(triton, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_experiment(QUICK, [], tmp_path_factory.mktemp("results"), quiet=True)


def test_every_backbone_path_and_rate_has_a_checked_time(run_folder: Path) -> None:
    points = load_run(run_folder).measurements
    found = list(zip(points["backbone"], points["tier"], points["rate"], strict=True))
    assert found == [(b, t, r) for b in ("hstu", "transformer") for t in ("mixed", "none") for r in (20, 40)]
    assert set(points["status"]) == {"ok"} and (points["error"] < 1e-5).all()
    assert (points["p10_ms"] <= points["p50_ms"]).all() and (points["p90_ms"] <= points["p99_ms"]).all()
    assert (points["count"] == points["rate"] * 0.5).all() and (points["lost_share"] == 0).all()
    cached = points["tier"] == "mixed"
    assert (points.loc[cached, "reused_per_request"] > 0).all() and (
        points.loc[~cached, "reused_per_request"] == 0
    ).all()
    assert (points.loc[cached, "page_size"] == 8).all() and points.loc[~cached, "page_size"].isna().all()
    assert (run_folder / "figures" / "latency_against_rate.png").exists()
    text = (run_folder / "report.html").read_text()
    assert "hstu, 20 requests a second: median" in text


def test_a_wrong_answer_has_no_time_and_a_lost_one_is_counted(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load_experiment(QUICK, ["load.rates=[20]", "load.num_warm=1"])
    log = [request_of(i, 5) for i in range(11)]
    models = {"other": make_model("hstu").float()}
    right = Client.request
    wrong = request_of(99, 1)

    def other(self: Client, batch: SequenceBatch, cache: bool = True) -> dict:
        return right(self, wrong if cache else batch if int(batch.user_ids[0]) % 2 else out_of_range, cache)

    out_of_range = SequenceBatch.from_lists([0], [[1000]], [[0]], [[0]], {"age": [0]})
    monkeypatch.setattr(Client, "request", other)
    points = rates(models, log, experiment, quiet=True).set_index("tier")
    assert points.loc["mixed", "status"] == "wrong" and points["p50_ms"].isna().tolist() == [True, False]
    assert points.loc["none", "status"] == "ok" and points.loc["none", "lost_share"] == 0.5


def test_a_log_that_is_too_short(triton) -> None:
    with pytest.raises(ValueError, match="load needs 130 requests, the log has 3"):
        rates({}, [request_of(0, 1)] * 3, load_experiment(QUICK))
