"""Sweeps: a grid becomes points, each point a row of the record, whatever happens to it."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import cloudpickle
import pandas as pd
import torch
from tqdm.auto import tqdm

from recexp import devices
from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.config.load import validate
from recexp.experiments.cluster import ray_workers
from recexp.experiments.record import to_frame
from recexp.experiments.workers import process_workers
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


def kind_of(sweep: SweepConfig) -> PointKind:
    """The kind of a sweep's points, its modules imported; ValueError with the nearest known one."""
    for module in (*(f"recexp.experiments.{name}" for name in MODULES), *sweep.modules):
        import_module(module)
    return points[sweep.point]


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
        found[key_of(point)] = point
    frame = pd.json_normalize(list(found.values()))
    for condition in sweep.where:
        try:
            frame = frame.query(condition)
        except Exception as error:
            raise ValueError(f"sweep.where {condition!r}: {error}; known: {', '.join(frame.columns)}") from error
    if not len(frame):
        raise ValueError(f"no point of the sweep is left; check sweep.grid and sweep.where {sweep.where}")
    return [list(found.values())[i] for i in frame.index]


def run_sweep(sweep: SweepConfig, folder: Path, quiet: bool = False) -> pd.DataFrame:
    """Run every point of a sweep; a row each, as a frame of the record, in the order of ``expand``.

    Each finished point goes to <folder>/points.jsonl at once; what that holds already is not run again. Whatever stops
    the sweep, Ctrl-C included, keeps it. ValueError for an unknown kind and for a point that is none, before any runs.
    """
    kind, found = kind_of(sweep), expand(sweep)
    for values in found:
        validate(kind.config, values, f"sweep.point {sweep.point}: {label(sweep, values)}")
    path = folder / "points.jsonl"
    done = read_journal(path)
    left = [values for values in found if key_of(values) not in done]
    engine: Any = ray_workers if sweep.engine == "ray" else process_workers
    idle: SimpleQueue[Any] = SimpleQueue()

    def serve(values: dict[str, Any]) -> dict[str, Any]:
        worker = idle.get()
        bar.set_postfix_str(label(sweep, values))
        begin = time.monotonic()
        try:
            answer = worker.run(values)
        finally:
            idle.put(worker)
        return {"point": values, "seconds": round(time.monotonic() - begin, 3), "row": answer}

    if left:
        with (
            tqdm(total=len(found), initial=len(done), desc=sweep.point, disable=quiet, smoothing=0.1) as bar,
            path.open("a") as journal,
            engine(sweep, cloudpickle.dumps(kind)) as workers,
            ThreadPoolExecutor(len(workers)) as threads,
        ):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            for worker in workers:
                idle.put(worker)
            try:
                for served in as_completed([threads.submit(serve, values) for values in left]):
                    journal.write(json.dumps(served.result(), default=lambda number: number.item()) + "\n")
                    journal.flush()
                    bar.update()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.close()
        done = read_journal(path)
    return to_frame(done[key_of(values)]["row"] for values in found)


def plan(sweep: SweepConfig, where: torch.device | devices.DeviceProfile | None) -> pd.DataFrame:
    """What run_sweep would do: per point what varies, and why a device, or an assumed one, refuses it ("" if not, or if
    there is none to ask)."""
    kind, planned = kind_of(sweep), []
    for values in expand(sweep):
        point = validate(kind.config, values, f"sweep.point {sweep.point}: {label(sweep, values)}")
        planned.append({**varying(sweep, values), "refused": kind.refuses(point, where) or "" if where else ""})
    return pd.DataFrame(planned)


def key_of(values: dict[str, Any]) -> str:
    """What a point is known by: its content."""
    return json.dumps(values, sort_keys=True)


def varying(sweep: SweepConfig, values: dict[str, Any]) -> dict[str, Any]:
    """What tells a point of a sweep from the others, by dotted keys."""
    keys = itertools.chain(sweep.grid, *sweep.zipped)
    return {key: reduce(lambda inner, part: inner[part], key.split("."), values) for key in keys}


def label(sweep: SweepConfig, values: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varying(sweep, values).items())


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of a points.jsonl (point, seconds, row) by ``key_of`` their points, without a last line cut off."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return {key_of(entry["point"]): entry for entry in map(json.loads, whole.splitlines())}
