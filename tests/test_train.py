"""The trainer: labels in the right places, checkpoints reused, and the quality it must reach on real data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from recexp import load_config
from recexp.batch import SequenceBatch
from recexp.config import DataConfig, ModelConfig, SyntheticConfig, TrainingConfig
from recexp.data import load_interactions, make_splits
from recexp.parallel import Processes
from recexp.train import _item_actions, _windows, evaluate, predict_requests, train

ROOT = Path(__file__).parents[1]
DATA = DataConfig(
    dataset="synthetic", synthetic=SyntheticConfig(num_users=60, num_items=40, length_quantiles=[8, 30, 60])
)
SMALL = ModelConfig(num_items=40, hidden_size=16, num_layers=1, head_dim=8, max_history_pairs=20)
SHORT = TrainingConfig(num_steps=60, evaluate_every=20, users_per_batch=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path))
    return tmp_path


def test_training_learns_and_the_same_training_is_reused(cache: Path) -> None:
    interactions = load_interactions(DATA)
    splits = make_splits(DATA, interactions)
    first = train(SMALL, DATA, SHORT, interactions, splits, quiet=True)
    assert [h["step"] for h in first.history] == [20, 40, 60]
    assert max(h["validation_auc"] for h in first.history) > 0.6  # chance is 0.5
    again = train(SMALL, DATA, SHORT, interactions, splits, quiet=True)
    assert again.folder == first.folder and again.history == first.history
    scores = [predict_requests(t.model, interactions, splits.test) for t in (first, again)]
    assert np.array_equal(*scores)
    other = train(SMALL, DATA, SHORT.model_copy(update={"seed": 1, "num_steps": 2}), interactions, splits, quiet=True)
    assert other.folder != first.folder


@pytest.mark.parametrize("name", ["model.safetensors", "training.json"])
def test_a_damaged_checkpoint_is_made_anew(cache: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    interactions = load_interactions(DATA)
    splits, short = make_splits(DATA, interactions), SHORT.model_copy(update={"num_steps": 2})
    first = train(SMALL, DATA, short, interactions, splits, quiet=True)
    path = first.folder / name
    path.write_bytes(path.read_bytes()[:-20])
    again = train(SMALL, DATA, short, interactions, splits, quiet=True)
    assert "is damaged and made anew" in capsys.readouterr().out and again.history == first.history


def test_an_interrupted_training_leaves_no_checkpoint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("recexp.train.evaluate", stop)
    interactions = load_interactions(DATA)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, DATA, SHORT, interactions, make_splits(DATA, interactions), quiet=True)
    assert not list(cache.glob("checkpoints/*/model.safetensors"))


def test_windows_stay_inside_the_training_part_and_labels_follow_item_tokens() -> None:
    interactions = load_interactions(DATA)
    splits = make_splits(DATA, interactions)
    windows = _windows(interactions, splits.train_end, SHORT, Processes(torch.device("cpu")))
    seen = set()
    for _ in range(20):
        batch, actions = next(windows)
        assert (batch.num_pairs + batch.num_candidates <= torch.from_numpy(splits.train_end)[batch.user_ids]).all()
        assert (batch.num_candidates >= 1).all() and (batch.num_candidates <= 10).all() and (batch.num_pairs >= 1).all()
        assert len(actions) == batch.candidate_ids.shape[0]
        seen |= set(batch.user_ids.tolist())
    assert seen == set(np.flatnonzero(splits.train_end >= 2).tolist())


def test_item_actions_are_history_then_candidates_user_by_user() -> None:
    batch = SequenceBatch.from_lists([0, 1, 2], [[1, 1], [], [1]], [[11, 12], [], [31]], [[1], [1, 1], []])
    assert _item_actions(batch, np.array([13, 21, 22])).tolist() == [11, 12, 13, 21, 22, 31]


@pytest.mark.parametrize(("name", "auc", "gauc"), [("hstu", 0.765, 0.68), ("transformer", 0.76, 0.675)])
def test_quality_on_movielens(name: str, auc: float, gauc: float) -> None:
    """The committed configuration, trained as `make compare` trains it, reaches these on the test candidates."""
    config = load_config(ROOT / "configs/experiments/compare_backbones.yaml")
    interactions = load_interactions(config.data, quiet=True)
    splits = make_splits(config.data, interactions)
    trained = train(config.models[name], config.data, config.training, interactions, splits, quiet=True)
    found = evaluate(trained.model, config.data.tasks, interactions, splits.test)[0]
    assert found["num_rows"] == 8374
    assert found["auc"] >= auc and found["gauc"] >= gauc


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Without dropout the gradients are the same sums: the loss of every step agrees but for rounding. Batches of one
    user, an epoch's last ones, leave a process without any."""
    config = tmp_path / "experiment.yaml"
    models = {"hstu": SMALL.model_dump(mode="json"), "transformer": SMALL.model_dump(mode="json")}
    models["transformer"]["backbone"] = "transformer"
    training = SHORT.model_copy(update={"num_steps": 8, "evaluate_every": 1, "patience": 99, "users_per_batch": 59})
    experiment = {"kind": "experiment", "name": "both", "notebook": "none.ipynb", "device": "cpu", "models": models}
    experiment |= {"training": training.model_dump(mode="json"), "data": DATA.model_dump(mode="json")}
    config.write_text(yaml.safe_dump(experiment | {"measure": {"history_pairs": [10]}}))
    histories = []
    for count in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "recexp", "train", str(config), "--quiet"],
            env=os.environ | {"RECEXP_CACHE": str(tmp_path / str(count)), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        files = sorted((tmp_path / str(count)).glob("checkpoints/*/training.json"))
        histories.append([[h["loss"] for h in json.loads(file.read_text())] for file in files])
    assert len(histories[0]) == 2
    assert np.allclose(*histories, rtol=1e-4, atol=0)
