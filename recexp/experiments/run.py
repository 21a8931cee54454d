"""From an experiment's YAML to a finished run: its notebook executed into results/<experiment>/<run>/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recexp import devices
from recexp.config import ExperimentConfig, load_config
from recexp.experiments.record import start_run
from recexp.experiments.report import execute
from recexp.model import check_names


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment at ``path``; ValueError for any other kind, unknown names and an absent device."""
    config = load_config(path, overrides)
    if not isinstance(config, ExperimentConfig):
        raise ValueError(
            f"{path} describes a {config.kind}; an experiment is needed, such as "
            "configs/experiments/compare_backbones.yaml"
        )
    devices.resolve(config.device)
    for model in config.models.values():
        check_names(model)
    return config


def find_above(start: Path, relative: Path) -> Path:
    """``relative`` in the nearest folder at or above ``start`` that holds it."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / relative).is_file():
            return folder / relative
    raise ValueError(
        f"no {relative} in {start} or any folder above it; keep the configuration inside the checkout, "
        "or name a full path"
    )


def run_experiment(
    path: Path, overrides: Sequence[str] = (), results: Path = Path("results"), quiet: bool = False
) -> Path:
    """Execute the experiment; returns the finished run's folder. What fails or is stopped leaves <run>.partial."""
    config = load_experiment(path, overrides)
    notebook = find_above(path.parent, config.notebook)
    run = start_run(config.name, config, results, quiet=quiet)
    execute(
        notebook, {"config": str(run.path / "config.yaml"), "run_dir": str(run.path), "quiet": quiet}, run.path, quiet
    )
    return run.finish()
