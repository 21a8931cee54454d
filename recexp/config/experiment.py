"""The configuration of an experiment: its models and data, and what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from recexp.config.base import Count, Counts, Dtype, Name, Positive, Strict
from recexp.config.data import DataConfig, TrainingConfig
from recexp.config.model import ModelConfig
from recexp.config.serving import LoadConfig, ServingConfig
from recexp.config.sweep import SweepConfig


class MeasureConfig(Strict):
    """Which points are measured, and how long one may take."""

    batch_sizes: Counts = [1, 4, 16]
    history_pairs: Counts = [10]  # none above a model's max_history_pairs
    num_candidates: Count = 10
    min_runs: Count = 10
    max_runs: Count = 50
    max_seconds: Positive = 1.0  # per point
    precision_requests: Count = 1000  # test requests on which dtypes are compared

    @model_validator(mode="after")
    def _runs_ordered(self) -> MeasureConfig:
        if self.min_runs > self.max_runs:
            raise ValueError(f"min_runs {self.min_runs} exceeds max_runs {self.max_runs}; lower it, or raise max_runs")
        return self

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments of ``measure``."""
        return self.model_dump(include={"min_runs", "max_runs", "max_seconds"})


class CacheConfig(Strict):
    """The caches of ``kv_cache``: the request log is replayed through every pair of a device and a host size."""

    page_size: Count = 32
    num_pages: list[Annotated[int, Field(ge=2)]] = [9, 65, 1025]  # of the device; one is the scratch page
    host_pages: list[Annotated[int, Field(ge=0)]] = [0, 4096]  # 0: no host tier
    host_chunk_pages: Count = 4
    num_requests: Count | None = None  # the first so many of the log; None: all


class Bucket(NamedTuple):
    """A shape that is captured as a CUDA graph: most users and tokens of a request, and candidates while capturing."""

    batch_size: int
    num_tokens: int  # of all users together, candidates included
    num_candidates: int


class GraphConfig(Strict):
    """Which shapes are captured: every batch size with every number of (new) tokens a user."""

    batch_sizes: list[Count] = [1, 2, 4, 8, 16]
    tokens_per_user: list[Count] | None = None  # None: the candidates, and a 32nd, a 16th, … all of the longest history
    eager_fallback: bool = False  # what no bucket holds runs eagerly and is counted, instead of being an error

    def buckets(self, model: ModelConfig) -> list[Bucket]:
        """The buckets for a model; ValueError where a user cannot have so many tokens."""
        history, candidates = model.max_history_tokens, model.max_candidates
        tokens = self.tokens_per_user or sorted({candidates + -(-history // 2**k) for k in range(6)})
        if max(tokens) > history + candidates:
            raise ValueError(
                f"graphs.tokens_per_user has {max(tokens)}, and a user has at most {history + candidates} tokens "
                f"({history} of history, {candidates} candidates); lower it or raise the model's max_history_pairs"
            )
        return [Bucket(b, b * t, b * min(candidates, t)) for b in self.batch_sizes for t in tokens]


class ReplayConfig(Strict):
    """Requests of ``cuda_graphs`` (the longest history) and ``compare_backbones``, cached but for the newest pairs."""

    dtype: Dtype = "bfloat16"
    page_size: Count = 32
    new_pairs: Count = 64
    bucket_counts: list[Count] = [1, 2, 3, 4, 6, 8, 12]  # how many token counts, for the share of padding


class DifferenceConfig(Strict):
    """The paths that ``numerical_diff`` compares."""

    dtypes: list[Dtype | Literal["tf32"]] = ["float64", "float32", "tf32", "bfloat16", "float16"]
    page_sizes: Counts = [8, 32, 128]
    num_requests: Count = 4  # the longest, whose operations are compared
    depth: Count = 16  # layers of the model along which the error grows
    top_k: Count = 3
    saved: list[Path] = []  # runs, of other machines say, that this one is compared with

    @field_validator("dtypes")
    @classmethod
    def _truth_and_another(cls, dtypes: list[str]) -> list[str]:
        if "float64" not in dtypes or not {*dtypes} - {"float64", "tf32"}:
            raise ValueError(f"needs float64, the truth, and another that every device has, got {dtypes}")
        return dtypes


class EmbeddingsConfig(Strict):
    """Tables and keys of ``embedding_cache``: float32 rows, keys by Zipf's law and those of the data's log."""

    num_rows: Count = 200_000  # at least as many as the data's items
    dim: Annotated[int, Field(ge=2, multiple_of=2)] = 128
    num_keys: Count = 8192  # of a lookup
    num_lookups: Annotated[int, Field(ge=5)] = 12  # different ones; the last four are timed
    zipf_exponents: list[Annotated[float, Field(ge=0)]] = [0.0, 0.5, 0.8, 1.0, 1.2]  # 0: every key as often
    cache_ratios: list[Annotated[float, Field(gt=0, lt=1)]] = [0.01, 0.05, 0.2]  # of engines that have a cache


class ExperimentConfig(Strict):
    """One experiment: its notebook, and everything the notebook needs."""

    kind: Literal["experiment"] = "experiment"
    name: Name
    notebook: Path  # relative to the nearest folder above the configuration that holds it
    device: str = "auto"  # auto: cuda where there is one, else cpu
    data: DataConfig | None = None  # None: the experiment makes its own requests
    models: dict[Name, ModelConfig] = {}  # a sweep may do without
    training: TrainingConfig = TrainingConfig()
    measure: MeasureConfig = MeasureConfig()
    cache: CacheConfig = CacheConfig()
    graphs: GraphConfig = GraphConfig()
    replay: ReplayConfig = ReplayConfig()
    difference: DifferenceConfig = DifferenceConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    serving: ServingConfig = ServingConfig()
    load: LoadConfig = LoadConfig()
    sweep: SweepConfig | None = None

    @model_validator(mode="after")
    def _models_fit(self) -> ExperimentConfig:
        if not self.models and self.sweep is None:
            raise ValueError("models is empty; name at least one, such as models.hstu: ../models/hstu_small.yaml")
        pairs, candidates, tasks = max(self.measure.history_pairs), self.measure.num_candidates, None
        if self.data:
            candidates, tasks = max(candidates, self.data.max_candidates), len(self.data.tasks)
        for name, model in self.models.items():
            self.graphs.buckets(model)
            if name == "random":
                raise ValueError("models.random: the report calls a random order so; choose another name")
            if tasks not in (None, model.num_tasks):
                raise ValueError(
                    f"models.{name}.num_tasks is {model.num_tasks} for {tasks} data.tasks; make them equal"
                )
            if model.max_candidates < candidates:
                raise ValueError(
                    f"models.{name}.max_candidates {model.max_candidates} is below the {candidates} of data or measure"
                )
            if model.max_history_pairs < pairs:
                raise ValueError(
                    f"measure.history_pairs has {pairs}, above models.{name}.max_history_pairs "
                    f"{model.max_history_pairs}; lower it, or raise that of the model"
                )
        return self
