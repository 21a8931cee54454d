"""Sweeps: a grid becomes points, each point a row of the record, whatever happens to it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from recexp import devices
from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.experiments.record import COLUMNS, row, to_frame
from recexp.registry import Registry

MODULES: tuple[str, ...] = ("page_sizes",)  # of recexp.experiments, which register the package's own kinds of points


@dataclass(frozen=True)
class PointKind:
    """What a point is (config), how it is run (run(point, device) -> row) and why not (refuses(point, device or
    profile of an assumed one) -> reason or None)."""

    config: type[Strict]
    run: Callable[[Any, torch.device], dict[str, Any]]
    refuses: Callable[[Any, torch.device | devices.DeviceProfile], str | None]


points: Registry[PointKind] = Registry("kind of point")


def register_point(
    name: str,
    *,
    config: type[Strict],
    refuses: Callable[[Any, Any], str | None] = lambda point, where: None,
) -> Callable[[Callable[[Any, torch.device], dict[str, Any]]], Callable[[Any, torch.device], dict[str, Any]]]:
    """Decorates ``run(point, device) -> record.row(...)``. Fields of ``config`` that are columns of the record fill
    them in rows of points that do not get to run."""

    def register(run: Callable[[Any, torch.device], dict[str, Any]]) -> Callable[[Any, torch.device], dict[str, Any]]:
        points.add(name, PointKind(config, run, refuses))
        return run

    return register


def kind_of(name: str) -> PointKind:
    """The kind of that name; ValueError with the nearest known one."""
    for module in MODULES:
        import_module(f"recexp.experiments.{module}")
    return points[name]


def expand(sweep: SweepConfig) -> list[dict[str, Any]]:
    """The points of a sweep as nested mappings, in the order of its lists, each once. ValueError if none is left."""
    axes = [[{key: value} for value in values] for key, values in sweep.grid.items()]
    axes += [
        [dict(zip(group, values, strict=True)) for values in zip(*group.values(), strict=True)]
        for group in sweep.zipped
    ]
    found: dict[str, dict[str, Any]] = {}
    for choice in itertools.product(*axes):
        point = json.loads(json.dumps(sweep.base))
        for key, value in itertools.chain.from_iterable(part.items() for part in choice):
            *parents, last = key.split(".")
            inner = point
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        found[json.dumps(point, sort_keys=True)] = point
    frame = pd.json_normalize(list(found.values()))
    for condition in sweep.where:
        try:
            frame = frame.query(condition)
        except Exception as error:
            raise ValueError(f"sweep.where {condition!r}: {error}; known: {', '.join(frame.columns)}") from error
    if frame.empty:
        raise ValueError(f"no point of the sweep is left; check sweep.grid and sweep.where {sweep.where}")
    return [list(found.values())[i] for i in frame.index]


def columns_of(point: Strict) -> dict[str, Any]:
    """The fields of a point that are columns of the record."""
    return {name: value for name, value in point.model_dump(mode="json").items() if name in COLUMNS}


def run_sweep(sweep: SweepConfig, folder: Path, quiet: bool = False) -> pd.DataFrame:
    """Run every point of a sweep; a row each, as a frame of the record."""
    kind, rows = kind_of(sweep.point), []
    device = devices.resolve("auto" if sweep.devices == ["auto"] else sweep.devices[0].partition(":")[0])
    for values in tqdm(expand(sweep), desc=sweep.point, disable=quiet):
        point = kind.config.model_validate(values)
        if reason := kind.refuses(point, device):
            rows.append(row("refused", reason=reason, device=devices.describe_device(device), **columns_of(point)))
        else:
            rows.append(kind.run(point, device))
        rows[-1]["device_id"] = str(device)
    return to_frame(rows)
