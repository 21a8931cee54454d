"""Checkpoints: ``model.safetensors`` with the model's configuration, ``config.yaml``, beside it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from recexp.config import ModelConfig, load_config
from recexp.registry import nearest

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"
MEANING = (
    "backbone",
    "num_heads",
    "head_dim",
    "residual",
    "scaling_seqlen",
    "max_history_pairs",
    "window_hop",
    "context",
)


def save(model: nn.Module, config: ModelConfig, folder: str | Path) -> Path:
    """Write both files; the weights last and whole, so that a folder that has them is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)  # never old weights beside a new configuration
    (folder / CONFIG).write_text(config.to_yaml(), encoding="utf-8")
    part = folder / f".{WEIGHTS}.{os.getpid()}"
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}, part)
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
    config = load_config(Path(folder) / CONFIG)
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{Path(folder) / CONFIG} describes a {config.kind}, not a model")
    return config


def load_weights(model: nn.Module, config: ModelConfig, folder: str | Path) -> None:
    """Load the weights of ``folder`` into a model of ``config``, converted to its dtype.

    Raises ValueError that lists every missing, unknown and wrongly shaped tensor, and every setting that gives the same
    weights another meaning (heads, scaling_seqlen, …); the model then keeps its old weights.
    """
    path = Path(folder) / WEIGHTS
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    wanted = model.state_dict()
    problems = [f"missing {name} {list(wanted[name].shape)}" for name in wanted if name not in found]
    problems += [f"unknown {name}; {_near(name, list(wanted))}" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name].shape)}, the model's is {list(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    theirs = load_config_of(folder)
    problems += [
        f"{name} is {getattr(theirs, name)!r}, the model's is {getattr(config, name)!r}"
        for name in MEANING
        if getattr(theirs, name) != getattr(config, name)
    ]
    if problems:
        raise ValueError(f"{path} does not fit the model ({len(problems)} differences):\n  " + "\n  ".join(problems))
    with torch.no_grad():
        model.load_state_dict(found)


def _near(name: str, known: list[str]) -> str:
    return nearest(name, known).split("known:")[0].strip() or "no name like it in the model"
