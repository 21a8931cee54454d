"""From an experiment's YAML to a finished run: its notebook executed into results/<experiment>/<run>/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nbformat

from recexp import devices
from recexp.config import DataConfig, ExperimentConfig, load_config
from recexp.data import load_interactions, make_splits
from recexp.data.interactions import Interactions
from recexp.data.requests import Splits
from recexp.experiments.record import start_run
from recexp.experiments.report import execute
from recexp.layers import backbones
from recexp.model import check_names


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment at ``path``; ValueError for any other kind, unknown names and an absent device.

    A backbone that nobody registered may be one of the notebook's own: its cells tagged "backbone" are run first.
    """
    config = load_config(path, overrides)
    if not isinstance(config, ExperimentConfig):
        raise ValueError(
            f"{path} describes a {config.kind}; an experiment is needed, such as "
            "configs/experiments/compare_backbones.yaml"
        )
    devices.resolve(config.device)
    if any(model.backbone not in backbones for model in config.models.values()):
        for cell in nbformat.read(find_above(Path(path).parent, config.notebook), as_version=4).cells:
            if "backbone" in cell.metadata.get("tags", []):
                exec(cell.source, {"__name__": config.notebook.stem})
    for model in config.models.values():
        check_names(model)
    return config


def data_of(config: ExperimentConfig) -> DataConfig:
    """The data of an experiment that cannot do without."""
    if config.data is None:
        raise ValueError(f"experiment {config.name} needs data; add data: {{dataset: ml-100k}}")
    return config.data


def check_data(config: ExperimentConfig, interactions: Interactions, splits: Splits) -> None:
    """Raise ValueError that lists all that does not fit: tables too small, no test candidates, nobody long enough."""
    problems = [
        f"models.{name}.{size} is {getattr(model, size)}, too few: "
        f"--set models.{name}.{size}={getattr(interactions, size)}"
        for name, model in config.models.items()
        for size in ("num_items", "num_actions")
        if getattr(model, size) < getattr(interactions, size)
    ]
    if not len(splits.test):
        problems.append("there are no test candidates; users need 4 interactions or more")
    most = int(interactions.lengths.max()) - config.measure.num_candidates
    if max(config.measure.history_pairs) > most:
        problems.append(
            f"nobody has measure.history_pairs {max(config.measure.history_pairs)} and {config.measure.num_candidates} "
            f"candidates; at most: --set measure.history_pairs=[{most}]"
        )
    if problems:
        raise ValueError(f"{interactions.name} and the configuration do not fit:\n  " + "\n  ".join(problems))


def find_above(start: Path, relative: Path) -> Path:
    """``relative`` in the nearest folder at or above ``start``, else the working directory, that holds it."""
    for folder in (start.resolve(), *start.resolve().parents, Path.cwd(), *Path.cwd().parents):
        if (folder / relative).is_file():
            return folder / relative
    raise ValueError(
        f"no {relative} in {start}, the working directory or any folder above them; "
        "run it inside the checkout, or name a full path"
    )


def run_experiment(
    path: Path, overrides: Sequence[str] = (), results: Path = Path("results"), quiet: bool = False
) -> Path:
    """Execute the experiment; returns the finished run's folder. What fails or is stopped leaves <run>.partial."""
    config = load_experiment(path, overrides)
    notebook = find_above(path.parent, config.notebook)
    if results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is a file; name a folder")
    if config.data:  # what is wrong with it shows now, not in the middle of the notebook
        interactions = load_interactions(config.data, quiet)
        check_data(config, interactions, make_splits(config.data, interactions))
    run = start_run(config.name, config, results, quiet=quiet)
    execute(
        notebook, {"config": str(run.path / "config.yaml"), "run_dir": str(run.path), "quiet": quiet}, run.path, quiet
    )
    finished = run.finish()
    print(f"report: {finished / 'report.html'}")
    return finished
