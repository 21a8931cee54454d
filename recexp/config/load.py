"""From a YAML file of any kind, and overrides, to its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from recexp.config.base import Strict
from recexp.config.data import DataConfig, TrainingConfig
from recexp.config.experiment import ExperimentConfig
from recexp.config.model import ModelConfig
from recexp.config.serving import ServingConfig
from recexp.registry import nearest

Model = TypeVar("Model", bound=Strict)
KINDS: dict[str, type[Strict]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "experiment": ExperimentConfig,
    "serving": ServingConfig,
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
    return validate(KINDS[kind], values, str(path))


def validate(model: type[Model], values: dict[str, Any], what: str) -> Model:
    """The configuration that ``values`` describe; ValueError of ``what`` with a line for each fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = (
            f"  {'.'.join(map(str, e['loc'])) or 'all'}: {e['msg'].removeprefix('Value error, ')}{_given(e)}"
            for e in error.errors()
        )
        raise ValueError(f"{what}:\n" + "\n".join(lines)) from error


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Make all that the user's own code raises, a syntax error or an exit too, a ValueError of ``what`` with the line:
    that in a file called so, else the innermost."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = extract_tb(error.__traceback__)
        at = ([frame for frame in frames if frame.filename == what] or frames)[-1]
        known = isinstance(error, SyntaxError) or at.filename.startswith("<")  # its text says it; not found by Python
        where = "" if known else f" ({Path(at.filename).name}, line {at.lineno})"
        raise ValueError(f"{what}: {type(error).__name__}: {error}{where}") from error


def _given(error: Any) -> str:
    """The value at fault, for the errors whose own text does not hold it."""
    return "" if error["type"] in ("value_error", "missing") else f" (got {error['input']!r})"
