"""Pydantic models of every YAML file: model, data, training, measurement, experiment.

An unknown key is an error that names the nearest known one; an impossible value is an error that names the limit.
``load_config`` reads one file of any kind (its ``kind`` key says which), follows paths to other files, and applies
``a.b=c`` overrides; ``to_yaml`` writes the resolved configuration back, defaults included, because defaults drift.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recexp.registry import nearest

Count = Annotated[int, Field(ge=1, strict=True)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
Counts = Annotated[list[Count], Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def cache_dir() -> Path:
    """Where data and trained checkpoints are kept: $RECEXP_CACHE, else $XDG_CACHE_HOME/recexp, else ~/.cache/recexp."""
    if home := os.environ.get("RECEXP_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recexp"


class Strict(BaseModel):
    """Base of all configurations: frozen, defaults validated, unknown keys refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}; {nearest(str(key), list(cls.model_fields))}")
        return values

    def to_yaml(self) -> str:
        """The configuration with every default written out; ``load_config`` reads it back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)


class ModelConfig(Strict):
    """A ranking model: embedding tables, sequence stage, a stack of backbone layers, a multi-task head.

    ``num_positions`` and ``window_hop`` are filled in when absent, so that a saved configuration is complete.
    """

    kind: Literal["model"] = "model"
    backbone: str = "hstu"
    num_items: Count
    num_actions: Count = 6
    context: dict[str, Count] = {}  # feature name -> number of ids; "user_id" reads the batch's user ids
    embedding_size: Count | None = None  # of item and context tables; other than hidden_size it needs mlp_size
    mlp_size: Count | None = None  # hidden width of the item and context MLPs; None: no projection
    hidden_size: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    head_dim: Count = 32
    ffn_size: Count | None = None  # Transformer only; None: 4 * hidden_size
    residual: bool = True
    scaling_seqlen: Positive = 20.0  # N of SiLU attention, the same on every path
    max_history_pairs: Count = 100
    window_hop: Count | None = None  # pairs by which the window of a long history moves; None: a quarter of the maximum
    max_candidates: Count = 256
    num_positions: Count | None = None  # rows of the position table; None: maximum history tokens + 1
    num_tasks: Count = 2
    head_sizes: list[Count] = [64]
    dropout: Fraction = 0.0  # on embeddings, in layers and in the head, while training
    item_id_dropout: Fraction = 0.0  # whole item embeddings dropped while training, so that ids alone do not overfit
    embedding_std: Positive = 0.02
    attention_backend: str = "auto"  # the fastest that takes the request, or a name of `recexp list`
    fused_layers: bool = False  # HSTU without gradients: five kernels a layer (recexp.layers.fused)
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        pairs = values.get("max_history_pairs", cls.model_fields["max_history_pairs"].default)
        if isinstance(pairs, int) and values.get("window_hop") is None:
            values["window_hop"] = max(1, pairs // 4)
        if isinstance(pairs, int) and values.get("num_positions") is None:
            values["num_positions"] = max(1, len(values.get("context") or {}) + 2 * pairs + 1)
        return values

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        if (self.num_positions or 0) < self.max_history_tokens + 1:
            raise ValueError(
                f"num_positions {self.num_positions} is below {self.max_history_tokens + 1}: the maximum history of "
                f"{self.max_history_tokens} tokens ({len(self.context)} context + 2 x {self.max_history_pairs} pairs) "
                "and one row for candidates; raise num_positions or lower max_history_pairs"
            )
        if (self.window_hop or 1) > self.max_history_pairs:
            raise ValueError(
                f"window_hop {self.window_hop} exceeds max_history_pairs {self.max_history_pairs}; lower window_hop"
            )
        if self.embedding_size not in (None, self.hidden_size) and self.mlp_size is None:
            raise ValueError(
                f"embedding_size {self.embedding_size} differs from hidden_size {self.hidden_size}, and no MLP "
                "projects it; set mlp_size or leave embedding_size out"
            )
        return self

    @property
    def max_history_tokens(self) -> int:
        """Context tokens and two tokens a pair: the longest history of one user."""
        return len(self.context) + 2 * self.max_history_pairs


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
    length_quantiles: Counts = [
        10,
        30,
        60,
        120,
        300,
    ]  # evenly spaced quantiles, minimum and maximum included
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


class MeasureConfig(Strict):
    """What ``compare_backbones`` measures, and how long a point may take."""

    batch_sizes: Counts = [1, 4, 16]
    history_pairs: Counts = [10]  # none above a model's max_history_pairs
    num_candidates: Count = 10
    dtypes: Annotated[list[Dtype], Field(min_length=1)] = ["float64", "float32", "bfloat16"]
    min_runs: Count = 10
    max_runs: Count = 50
    max_seconds: Positive = 1.0  # per point
    precision_requests: Count = 1000  # test requests on which dtypes are compared

    @model_validator(mode="after")
    def _runs_ordered(self) -> MeasureConfig:
        if self.min_runs > self.max_runs:
            raise ValueError(
                f"min_runs {self.min_runs} exceeds max_runs {self.max_runs}; lower min_runs or raise max_runs"
            )
        return self


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
    """The requests of ``cuda_graphs``: the longest history, cached but for its newest pairs."""

    dtype: Dtype = "bfloat16"
    page_size: Count = 32
    new_pairs: Count = 64
    bucket_counts: list[Count] = [1, 2, 3, 4, 6, 8, 12]  # how many token counts, for the share of padding


class ExperimentConfig(Strict):
    """One experiment: its notebook, and everything the notebook needs."""

    kind: Literal["experiment"] = "experiment"
    name: Name
    notebook: Path  # relative to the nearest folder above the configuration that holds it
    device: str = "auto"  # auto: cuda where there is one, else cpu
    data: DataConfig | None = None  # None: the experiment makes its own requests
    models: Annotated[dict[Name, ModelConfig], Field(min_length=1)]
    training: TrainingConfig = TrainingConfig()
    measure: MeasureConfig = MeasureConfig()
    cache: CacheConfig = CacheConfig()
    graphs: GraphConfig = GraphConfig()
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _models_fit(self) -> ExperimentConfig:
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


KINDS: dict[str, type[Strict]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "experiment": ExperimentConfig,
}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent
        there = sorted(p.name for p in folder.glob("*.yaml")) if folder.is_dir() else []
        raise ValueError(
            f"no configuration file {path}; " + (nearest(path.name, there) if there else f"no .yaml file in {folder}")
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a mapping; write 'key: value' lines")
    return content


def _follow(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace paths of an experiment (models, data, training) by what the files hold; anchor the data's folder."""
    values = dict(values)
    for key in ("data", "training"):
        if isinstance(values.get(key), str):
            values[key] = _read(folder / values[key])
    if isinstance(models := values.get("models"), dict):
        values["models"] = {n: _read(folder / m) if isinstance(m, str) else m for n, m in models.items()}
    for data in (values, values.get("data")):
        if isinstance(data, dict) and isinstance(data.get("folder"), str):
            data["folder"] = str((folder / data["folder"]).resolve())
    return values


def _override(values: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"override {assignment!r} is not of the form key.subkey=value")
    *parents, last = path.strip().split(".")
    for depth, key in enumerate(parents):
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {assignment!r}: {'.'.join(parents[: depth + 1])} is not a mapping")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {assignment!r}: {text!r} is not a YAML value") from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a configuration of any kind, with overrides like ``models.hstu.hidden_size=128`` (values are YAML).

    Paths in the file are relative to it, those in overrides to the working directory.

    Returns a ModelConfig, DataConfig, TrainingConfig or ExperimentConfig, by the file's ``kind``.
    Raises ValueError: no such file, not a mapping, unknown kind or key (with the nearest known one), impossible value.
    """
    path = Path(path)
    values = _read(path)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{path}: kind {kind!r}; " + nearest(str(kind), list(KINDS)))
    values = _follow(values, path.parent)
    for assignment in overrides:
        _override(values, assignment)
    values = _follow(values, Path())  # paths in overrides are the caller's
    try:
        return KINDS[kind].model_validate(values)
    except ValidationError as error:
        lines = (
            f"  {'.'.join(map(str, e['loc'])) or kind}: {e['msg'].removeprefix('Value error, ')}{_given(e)}"
            for e in error.errors()
        )
        raise ValueError(f"{path}:\n" + "\n".join(lines)) from error


def _given(error: Any) -> str:
    """The value at fault, for the errors whose own text does not hold it."""
    return "" if error["type"] in ("value_error", "missing") else f" (got {error['input']!r})"
