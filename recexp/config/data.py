"""The configurations of data, their tasks, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from recexp.config.base import Count, Counts, Fraction, Positive, Seed, Strict


class TaskConfig(Strict):
    """A binary task on a candidate's action: ``threshold``: at least ``value``; ``bit``: that bit of the id is set."""

    name: str
    kind: Literal["threshold", "bit"] = "threshold"
    value: int = Field(ge=0, le=62)


class SyntheticConfig(Strict):
    """Seeded made-up interactions: history lengths by quantiles, item popularity by Zipf's law."""

    num_users: Count = 200
    num_items: Count = 500
    num_actions: int = Field(6, ge=2)
    length_quantiles: Counts = [10, 30, 60, 120, 300]  # evenly spaced quantiles, minimum and maximum included
    zipf_exponent: float = Field(1.0, ge=0, allow_inf_nan=False)
    seed: Seed = 0


class DataConfig(Strict):
    """Which interactions, and how they become requests with labels."""

    kind: Literal["data"] = "data"
    dataset: Literal["ml-100k", "movielens", "synthetic"] = "ml-100k"
    folder: Path | None = None  # of "movielens": a folder in one of its official layouts
    protocol: Literal["leave_last", "global_time"] = "leave_last"
    max_candidates: Count = 10
    tasks: list[TaskConfig] = [TaskConfig(name="rating >= 4", value=4), TaskConfig(name="rating = 5", value=5)]
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="after")
    def _folder_given(self) -> DataConfig:
        if self.dataset == "movielens" and self.folder is None:
            raise ValueError(
                "dataset 'movielens' needs folder: the folder that holds ratings.csv, ratings.dat or u.data"
            )
        if self.dataset != "movielens" and self.folder is not None:
            raise ValueError(f"dataset {self.dataset!r} takes no folder (got {self.folder}); use dataset: movielens")
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one, such as {name: liked, kind: threshold, value: 4}")
        if len(names := [task.name for task in self.tasks]) > len(set(names)):
            raise ValueError(f"tasks {names} share a name; results are told apart by it")
        return self


class TrainingConfig(Strict):
    """The small trainer of ``recexp.train``."""

    kind: Literal["training"] = "training"
    num_steps: Count = 1500
    users_per_batch: Count = 16
    learning_rate: Positive = 3e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    warmup_fraction: Fraction = 0.05
    gradient_clip: Positive = 1.0
    averaging: Fraction = 0.99  # decay of the exponential average of the weights, which is what is evaluated and kept
    evaluate_every: Count = 100  # steps between validations; the best averaged weights are kept
    patience: Count = 5  # validations without a better one before training stops
    max_candidates: Count = 10  # candidates behind each random window
    num_threads: Count = 1  # on a CPU: more than one hardly helps a small model, and the weights would depend on it
    seed: Seed = 0
