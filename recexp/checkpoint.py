"""Checkpoints: ``model.safetensors`` with the model's configuration, ``config.yaml``, beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recexp.config import ModelConfig, load_config
from recexp.registry import nearest

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"
MEANING = ["backbone", "num_heads", "head_dim", "residual", "scaling_seqlen"]
MEANING += ["max_history_pairs", "window_hop", "context"]


def save(model: nn.Module, config: ModelConfig, folder: str | Path) -> Path:
    """Write both files, weights last and whole: a folder that has them is complete. Rows in stores are not written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{WEIGHTS}.{os.getpid()}"
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}, part)
        (folder / WEIGHTS).unlink(missing_ok=True)  # never old weights beside a new configuration
        (folder / CONFIG).write_text(config.to_yaml(), encoding="utf-8")
        os.replace(part, folder / WEIGHTS)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{folder / WEIGHTS} could not be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return folder / WEIGHTS


def load_config_of(folder: str | Path) -> ModelConfig:
    """The configuration beside a checkpoint's weights."""
    if not (Path(folder) / WEIGHTS).is_file():
        raise ValueError(f"no checkpoint in {folder}: {WEIGHTS} is missing; name a folder that `save` wrote")
    return load_model_config(Path(folder) / CONFIG)


def load_model_config(path: Path) -> ModelConfig:
    """``load_config`` of a file that has to be a model's."""
    if not isinstance(config := load_config(path), ModelConfig):
        raise ValueError(f"{path} describes a {config.kind}, not a model")
    return config


def read(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the CPU. ValueError for what is not there or not whole."""
    path = Path(folder) / WEIGHTS
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def load_weights(model: nn.Module, config: ModelConfig, folder: str | Path, convert: bool = False) -> None:
    """Load the weights of ``folder`` into a model of ``config``; convert: to the model's dtype, if theirs is another.

    Raises ValueError that lists all that does not fit: settings that give the same weights another meaning (heads,
    scaling_seqlen, the order of context features, …) and tensors; the model then keeps its old weights.
    """
    found, theirs = read(folder), load_config_of(folder)
    settings = [(name, _ordered(getattr(theirs, name)), _ordered(getattr(config, name))) for name in MEANING]
    problems = [f"{name} is {a!r}, the model's is {b!r}" for name, a, b in settings if a != b]
    check_fit(Path(folder) / WEIGHTS, found, model.state_dict(), convert, problems)
    model.load_state_dict(found)


def _ordered(value: Any) -> Any:
    """A mapping as a list: tables are numbered in its order."""
    return list(value.items()) if isinstance(value, dict) else value


def check_fit(
    path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor], convert: bool, problems: Sequence[str] = ()
) -> None:
    """Raise ValueError that lists all that is wrong with what was found, ``problems`` first."""
    lines = [*problems, *(f"missing {name} {list(wanted[name].shape)}" for name in wanted if name not in found)]
    for name, tensor in found.items():
        if name not in wanted:
            near = nearest(name, list(wanted)).split("known:")[0].strip()
            lines.append(f"unknown {name}; {near or 'no name like it in the model'}")
        elif tensor.shape != wanted[name].shape:
            lines.append(f"{name} is {list(tensor.shape)}, the model's is {list(wanted[name].shape)}")
        elif tensor.dtype != wanted[name].dtype and not (convert and tensor.dtype.is_floating_point):
            lines.append(f"{name} is {tensor.dtype}, the model's is {wanted[name].dtype}; name a dtype to convert to")
    if lines:
        raise ValueError(f"{path} does not fit the model ({len(lines)} differences):\n  " + "\n  ".join(lines))
