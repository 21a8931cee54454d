"""A small trainer, for checkpoints that mean something.

One random window a user and epoch: a prefix of the user's training interactions as history, the next few as candidates.
The loss is binary cross-entropy on every item token, history and candidates alike: an item comes before its action, so
its row sees no label. Trained checkpoints are kept by the hash of everything they came from. Under torchrun every
process computes its share of each batch's users, and the gradients are those of the whole batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm

from recexp import __version__
from recexp.batch import SequenceBatch
from recexp.checkpoint import WEIGHTS
from recexp.config import DataConfig, ModelConfig, TaskConfig, TrainingConfig, cache_dir
from recexp.data.interactions import Interactions
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import Requests, Splits, candidate_rows, labels, make_batch
from recexp.layers import backbones
from recexp.model import RankingModel
from recexp.parallel import Processes, processes


@dataclass(frozen=True)
class Trained:
    """A trained model, where its checkpoint lies, and the validation AUC (first task) after each evaluation."""

    model: RankingModel
    folder: Path
    history: list[dict[str, float]]


def predict_requests(
    model: RankingModel, interactions: Interactions, requests: Requests, batch_size: int = 64
) -> np.ndarray:
    """Logits [sum(candidates), num_tasks] of all requests, in order; computed by history length, to pad little."""
    order = np.argsort(requests.split, kind="stable")
    scores: list[np.ndarray] = [np.empty(0)] * len(order)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch, _ = make_batch(interactions, requests.select(rows))
        parts = model.predict(batch).double().cpu().split(batch.num_candidates.tolist())
        for row, part in zip(rows, parts, strict=True):
            scores[row] = part.numpy()
    return np.concatenate(scores)


def evaluate(
    model: RankingModel, tasks: Sequence[TaskConfig], interactions: Interactions, requests: Requests
) -> list[dict[str, float]]:
    """``ranking_metrics`` of the model's logits, one dictionary a task."""
    scores = predict_requests(model, interactions, requests)
    wanted = labels(interactions.action_ids[candidate_rows(interactions, requests)], tasks, interactions.action_values)
    users = requests.candidate_users
    return [ranking_metrics(scores[:, t], wanted[:, t], users) for t in range(len(tasks))]


def train(
    config: ModelConfig,
    data: DataConfig,
    training: TrainingConfig,
    interactions: Interactions,
    splits: Splits,
    *,
    device: str = "cpu",
    quiet: bool = False,
) -> Trained:
    """Train a model, or take the checkpoint of an earlier training of the very same configuration, data and version. A
    backbone of the user's own is always trained: its code may have changed.

    The best averaged weights by validation AUC of the first task are kept.
    """
    parts = (part.model_dump(mode="json") for part in (config, data, training))
    text = json.dumps([__version__, interactions.fingerprint, *parts], sort_keys=True)
    folder = cache_dir() / "checkpoints" / f"{config.backbone}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    history_file = folder / "training.json"
    if backbones.is_fixed(config.backbone) and (folder / WEIGHTS).is_file():
        try:
            return Trained(RankingModel.load(folder, device), folder, json.loads(history_file.read_text()))
        except (ValueError, OSError) as error:  # JSON errors are ValueErrors
            print(f"the kept training {folder} is damaged and made anew: {error}")
    with _threads(training.num_threads), processes(torch.device(device)) as group:
        model = RankingModel(config, group.device)
        history = _fit(model, data.tasks, training, interactions, splits, group, quiet or group.rank > 0)
    if group.rank > 0:  # rank 0 writes, and every process has the same weights
        return Trained(model, folder, history)
    folder.mkdir(parents=True, exist_ok=True)
    history_file.write_text(json.dumps(history))
    model.save(folder)
    if not quiet:
        print(f"wrote {folder}")
    return Trained(model, folder, history)


def _fit(
    model: RankingModel,
    tasks: list[TaskConfig],
    training: TrainingConfig,
    interactions: Interactions,
    splits: Splits,
    group: Processes,
    quiet: bool,
) -> list[dict[str, float]]:
    """Train in place; the model ends with its best averaged weights."""
    torch.manual_seed(training.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
    )
    total, warmup = training.num_steps, max(1, math.ceil(training.warmup_fraction * training.num_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (total - step) / max(1, total - warmup))
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.averaging))
    averaged = cast(RankingModel, average.module)
    full_batch = training.users_per_batch * model.config.max_history_pairs * len(tasks)
    best, best_weights, waited, history = -math.inf, None, 0, []
    batches = _windows(interactions, splits.train_end, training, group)
    parallel: nn.Module = model
    if group.count > 1:  # a process without users in a batch has parameters without gradients
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
    with tqdm(total=total, desc=f"train {model.config.backbone}", disable=quiet, unit="step") as bar:
        for step in range(1, total + 1):
            model.train()
            batch, actions = next(batches)
            batch = batch.windowed(model.config.max_history_pairs, model.config.window_hop or 1)
            logits = parallel(batch, rows="items")
            wanted = labels(_item_actions(batch, actions), tasks, interactions.action_values)
            # A fixed divisor, so that every item token weighs the same, whatever batch it is in: the mean over a batch
            # would favour users with short histories, who share batches. Between processes gradients are averaged.
            target = torch.from_numpy(wanted).to(logits.device)
            loss = binary_cross_entropy_with_logits(logits, target, reduction="sum") / full_batch * group.count
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            bar.update()
            if step % training.evaluate_every and step != total:
                continue
            score = group.mean(evaluate(averaged, tasks[:1], interactions, splits.validation)[0]["auc"])
            history.append({"step": step, "loss": group.mean(loss.item()), "validation_auc": score})
            bar.set_postfix(loss=f"{history[-1]['loss']:.3f}", validation_auc=f"{score:.4f}")
            if score > best or best_weights is None:
                best, waited = score, 0
                best_weights = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
            elif (waited := waited + 1) >= training.patience:
                break
    model.load_state_dict(best_weights or {})
    model.eval()
    return history


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _windows(
    interactions: Interactions, train_end: np.ndarray, training: TrainingConfig, group: Processes
) -> Iterator[tuple[SequenceBatch, np.ndarray]]:
    """Endless batches of random windows, of each batch this process's share; users of similar history lengths together,
    batches in random order."""
    generator = np.random.default_rng(training.seed)
    users = np.flatnonzero(train_end >= 2)
    while True:
        cut = generator.integers(1, train_end[users])  # history of 1 … n − 1 interactions
        end = np.minimum(cut + training.max_candidates, train_end[users])
        order = np.argsort(cut, kind="stable")
        starts = np.arange(0, len(order), training.users_per_batch)
        for start in generator.permutation(starts):
            rows = order[start : start + training.users_per_batch][group.rank :: group.count]
            yield make_batch(interactions, Requests(users[rows], cut[rows], end[rows]))


def _item_actions(batch: SequenceBatch, candidate_actions: np.ndarray) -> np.ndarray:
    """Actions of every item token, in the order of ``forward(rows="items")``: each user's history, then candidates."""
    rows = np.arange(batch.batch_size)
    user = np.concatenate([rows.repeat(batch.num_pairs.numpy()), rows.repeat(batch.num_candidates.numpy())])
    actions = np.concatenate([batch.action_ids.cpu().numpy(), candidate_actions])
    return actions[np.argsort(user, kind="stable")]
