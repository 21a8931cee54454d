"""From an experiment's YAML to a finished run: sweep and notebook executed into results/<experiment>/<run>/."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import nbformat
import pandas as pd
import torch

from recexp import devices
from recexp.config import DataConfig, ExperimentConfig, load_config
from recexp.config.load import blaming
from recexp.data import load_interactions, make_splits
from recexp.data.interactions import Interactions
from recexp.data.requests import Splits
from recexp.devices import profile_of
from recexp.experiments.record import environment, load_run, start_run
from recexp.experiments.report import check_parameters, execute
from recexp.experiments.sweep import JOURNAL, device_names, plan, points_left, read_journal, run_sweep
from recexp.experiments.workers import device_id, hold
from recexp.layers import backbones
from recexp.model import check_names


def load_experiment(path: str | Path, overrides: Sequence[str] = (), here: bool = True) -> ExperimentConfig:
    """The experiment at ``path``; ValueError for any other kind, unknown names and, if it is to run here, an absent
    device."""
    config = load_config(path, overrides)
    if not isinstance(config, ExperimentConfig):
        raise ValueError(
            f"{path} describes a {config.kind}; an experiment is needed, such as "
            "configs/experiments/compare_backbones.yaml"
        )
    if here and not config.sweep:  # whose own devices are asked for when points run
        devices.resolve(config.device)
    if any(model.backbone not in backbones for model in config.models.values()):
        notebook = find_above(Path(path).parent, config.notebook)
        for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells, 1):
            if "backbone" in cell.metadata.get("tags", []):
                with blaming(what := f"{notebook}, cell {number} (tagged backbone)"):
                    exec(compile(cell.source, what, "exec"), {"__name__": config.notebook.stem})
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


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from running into the same folder until the block ends or this process dies; ValueError
    if one does."""
    import fcntl  # there is none on Windows

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process runs into {folder}; let it end first, or begin anew") from None
        yield
    finally:
        os.close(handle)


def run_experiment(
    path: Path,
    overrides: Sequence[str] = (),
    results: Path = Path("results"),
    quiet: bool = False,
    resume: Path | None = None,
) -> Path:
    """Run the experiment's sweep, if it has one, then its notebook; returns the finished run's folder. What fails or is
    stopped leaves <run>.partial; given as ``resume``, the sweep's finished points in it are not run again."""
    config = load_experiment(path, overrides)
    notebook = find_above(path.parent, config.notebook)
    check_parameters(notebook, {"config": "", "run_dir": "", "quiet": quiet})
    if results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is a file; name a folder")
    if resume and len(changed := changes(_plain(load_experiment(resume / "config.yaml")), _plain(config))):
        raise ValueError(f"{resume} was begun with other values; keep them, or begin anew:\n{changed.to_string()}")
    if config.data:  # what is wrong with it shows now, not in the middle of the notebook
        interactions = load_interactions(config.data, quiet)
        check_data(config, interactions, make_splits(config.data, interactions))
    if config.sweep:
        points_left(config.sweep, resume)
    with nullcontext() if config.sweep else hold(device_id(str(devices.resolve(config.device)))):
        run = replace(start_run(config.name, config, results, run_dir=resume, quiet=quiet), owned=True)
        with alone(run.path):
            kept = run.path / "config.yaml"
            try:
                if config.sweep:  # here, where the terminal and Ctrl-C are; the notebook finds it done
                    run_sweep(config.sweep, run.path, quiet)
                execute(notebook, {"config": str(kept), "run_dir": str(run.path), "quiet": quiet}, run.path, quiet)
            except BaseException:
                if config.sweep:
                    again = shlex.join(["recexp", "run", str(kept), "--resume", str(run.path)])
                    print(f"to go on from here: {again}", file=sys.stderr)
                raise
            finished = run.finish()
    print(f"report: {finished / 'report.html'}")
    return finished


def rerun(saved: Path, results: Path = Path("results"), quiet: bool = False) -> Path:
    """Run a saved run's own configuration again and say what changed since in the environment; returns the new run."""
    before, now = load_run(saved).manifest["environment"], environment()
    changed = changes(before, now)
    changed = changed[~changed.index.str.contains(r"clocks\.(?:sm|mem)$")]  # as they were at that moment
    print(changed.to_string() if len(changed) else "nothing changed in the environment")
    try:
        return run_experiment(saved / "config.yaml", (), results, quiet)
    except ValueError as error:
        written = f"recexp {before['versions'].get('recexp')}, git revision {before['git_revision']}"
        raise ValueError(f"{error}\nif today's recexp does not know such a value: {saved} is of {written}") from error


def changes(before: dict[str, Any], now: dict[str, Any]) -> pd.DataFrame:
    """What differs between two nested mappings: a row a dotted key, with the columns before and now."""
    old, new = _flat(before), _flat(now)
    differing = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    return pd.DataFrame(differing.values(), index=pd.Index(list(differing), dtype=str), columns=["before", "now"])


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict | list):
        return {key: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for name, part in parts for k, v in _flat(part, f"{key}.{name}".lstrip(".")).items()}


def _plain(config: ExperimentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def dry_run(path: Path, overrides: Sequence[str] = (), results: Path = Path("results"), assume: str = "") -> None:
    """Print the points of an experiment's sweep, which are refused here or by an assumed SM, and how long it takes: by
    the newest earlier run in ``results``, and at most. Needs no CUDA, whatever the configuration says."""
    config = load_experiment(path, overrides, here=False)
    sweep = config.sweep
    if sweep is None:
        raise ValueError(f"{path} has no sweep, so there are no points to print")
    names = device_names(sweep.devices, here=False)
    here = torch.device(names[0]) if names[0].startswith("cpu") or torch.cuda.is_available() else None
    planned = plan(sweep, profile_of(assume) if assume else here)
    todo = int((planned["refused"] == "").sum())
    by = f"refused by {assume or here}" if assume or here else "refused (no CUDA to ask: try --assume sm90)"
    print(planned.to_string())
    print(f"{len(planned)} points, {len(planned) - todo} {by}; {len(names)} at a time")
    journals = sorted(results.glob(f"{config.name}/*/{JOURNAL}"))
    took = [entry["seconds"] for entry in read_journal(journals[-1]).values()] if journals else []
    about = f"about {_duration(todo * mean(took) / len(names))} as in {journals[-1]}, " if took else ""
    print(f"time: {about}at most {_duration(todo * sweep.seconds_per_point / len(names))}")


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
