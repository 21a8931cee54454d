"""Quality of trained models and of plain baselines on the same test rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from recexp import devices
from recexp.config import DataConfig, ExperimentConfig, TaskConfig
from recexp.data import load_interactions, make_splits
from recexp.data.baselines import baseline_scores
from recexp.data.interactions import Interactions
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import Splits, candidate_rows, labels
from recexp.experiments.backbone_figures import plot_quality
from recexp.experiments.plots import Plot
from recexp.experiments.record import start_run, to_frame
from recexp.experiments.run import check_data, data_of, load_experiment
from recexp.model import RankingModel
from recexp.parallel import processes
from recexp.train import predict_requests, train

METRICS = {"auc": "AUC", "gauc": "GAUC", "ndcg": "NDCG@10"}


def quality(
    models: Mapping[str, RankingModel],
    tasks: Sequence[TaskConfig],
    interactions: Interactions,
    splits: Splits,
    seed: int = 0,
) -> pd.DataFrame:
    """Test quality, a row each: task, model, metric (AUC, GAUC, NDCG@10), value, seed.

    Beside the models: a random order, and the baselines, fitted on everything before the test candidates. The models
    were trained on less: validation rows are in their histories only.
    """
    requests = splits.test
    wanted = labels(interactions.action_ids[candidate_rows(interactions, requests)], tasks, interactions.action_values)
    scores = {"random": np.random.default_rng(seed).random(len(wanted))}
    scores |= baseline_scores(interactions, splits.test_start, requests)
    by_task = {name: predict_requests(model, interactions, requests) for name, model in models.items()}
    by_task |= {name: np.repeat(column[:, None], len(tasks), axis=1) for name, column in scores.items()}
    rows = []
    for t, task in enumerate(tasks):
        for name, logits in by_task.items():
            found = ranking_metrics(logits[:, t], wanted[:, t], requests.candidate_users)
            point = {"task": task.name, "model": name, "seed": seed}
            rows += [{**point, "metric": label, "value": found[key]} for key, label in METRICS.items()]
    return pd.DataFrame(rows)


def quality_plot(frame: pd.DataFrame, task: str, title: str) -> Plot:
    """The bars of one task, each metric from what a random order reaches."""
    frame = frame[frame["task"] == task]
    random = frame[frame["model"] == "random"].groupby("metric")["value"].mean()
    chance = {"AUC": 0.5, "GAUC": 0.5, "NDCG@10": round(float(random["NDCG@10"]), 3)}
    return plot_quality(frame[frame["model"] != "random"], chance, title)


def _prepare(
    path: Path, overrides: Sequence[str], quiet: bool
) -> tuple[ExperimentConfig, DataConfig, Interactions, Splits]:
    """An experiment, and its data, interactions and splits, which fit it."""
    config = load_experiment(path, overrides)
    interactions = load_interactions(data_of(config), quiet)
    splits = make_splits(data_of(config), interactions)
    check_data(config, interactions, splits)
    return config, data_of(config), interactions, splits


def train_models(path: Path, overrides: Sequence[str], quiet: bool) -> None:
    """Train every model of an experiment and keep the checkpoints, which running the experiment finds."""
    config, data, interactions, splits = _prepare(path, overrides, quiet)
    with processes(devices.resolve(config.device)) as group:
        for name, model in config.models.items():
            trained = train(model, data, config.training, interactions, splits, device=str(group.device), quiet=quiet)
            if not group.rank:
                print(f"{name}: {json.dumps(trained.history[-1])} in {trained.folder}")


def seed_table(path: Path, overrides: Sequence[str], number: int, results: Path, quiet: bool) -> Path:
    """Train every model with seeds 0 … number − 1 and record their quality as the run <experiment>_seeds."""
    config, data, interactions, splits = _prepare(path, overrides, quiet)
    run, device = start_run(f"{config.name}_seeds", config, results, quiet=quiet), str(devices.resolve(config.device))
    frames = []
    for seed in range(number):
        models, training = {}, config.training.model_copy(update={"seed": seed})
        for name, model in config.models.items():
            seeded = model.model_copy(update={"seed": seed})
            models[name] = train(seeded, data, training, interactions, splits, device=device, quiet=quiet).model
        frames.append(quality(models, data.tasks, interactions, splits, seed))
    frame = pd.concat(frames, ignore_index=True)
    run.save(to_frame([]))
    run.save(frame, "quality")
    for i, task in enumerate(data.tasks):
        run.figure(quality_plot(frame, task.name, f"{interactions.name}, {task.name}"), f"quality_task{i + 1}")
    table = frame.groupby(["task", "model", "metric"], sort=False)["value"].agg(["mean", "min", "max"])
    print(table.round(4).to_string())
    return run.finish()
