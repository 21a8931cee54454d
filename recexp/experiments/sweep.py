"""Sweeps: a grid becomes points, each point a row of the record, whatever happens to it."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from copy import deepcopy
from functools import reduce
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import cloudpickle
import pandas as pd
import torch
from joblib import cpu_count
from tqdm.auto import tqdm

from recexp import devices
from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.config.load import blaming, validate
from recexp.experiments.cluster import ray_workers
from recexp.experiments.record import COLUMNS, row, to_frame
from recexp.experiments.workers import process_workers
from recexp.registry import Registry

MODULES: tuple[str, ...] = ("page_sizes",)  # of recexp.experiments, which register the package's own kinds of points
JOURNAL = "points.jsonl"


Run = Callable[[Any, torch.device], dict[str, Any]]
Refuses = Callable[[Any, torch.device | devices.DeviceProfile], str | None]


class PointKind(NamedTuple):
    """What a point is (config), how it is run (run(point, device) -> row) and why not (refuses(point, device or
    profile of an assumed one) -> reason or None)."""

    config: type[Strict]
    run: Run
    refuses: Refuses


points: Registry[PointKind] = Registry("kind of point")


def register_point(
    name: str, *, config: type[Strict], refuses: Refuses = lambda point, where: None
) -> Callable[[Run], Run]:
    """Decorates ``run(point, device) -> record.row(...)``. Fields of ``config`` that are columns of the record fill
    them in rows of points that do not get to run."""

    def register(run: Run) -> Run:
        points.add(name, PointKind(config, run, refuses))
        return run

    return register


def kind_of(sweep: SweepConfig) -> PointKind:
    """The kind of a sweep's points, its modules imported; ValueError with the nearest known one."""
    for module in (*(f"recexp.experiments.{name}" for name in MODULES), *sweep.modules):
        with blaming(f"sweep.modules {module!r} (installed, or on PYTHONPATH?)"):
            import_module(module)
    return points[sweep.point]


def device_names(wanted: list[str], here: bool = True) -> list[str]:
    """Devices of a sweep by name: "auto" is every CUDA device, else the CPU. ValueError for one that is none, or, if
    points are to run here, is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    same = {"auto": [f"cuda:{i}" for i in range(count)] or ["cpu"], "cuda": ["cuda:0"]}
    names = list(dict.fromkeys(name for given in wanted for name in same.get(given, [given])))
    for name in names:
        if here or not name.startswith("cuda"):
            devices.resolve(name)
    return names


def expand(sweep: SweepConfig) -> list[dict[str, Any]]:
    """The points of a sweep as nested mappings, in the order of its lists, each once. ValueError if none is left."""
    groups = [*({key: values} for key, values in sweep.grid.items()), *sweep.zipped]
    axes = [pd.DataFrame(group, dtype=object).to_dict("records") for group in groups]
    found: dict[str, dict[str, Any]] = {}
    for choice in itertools.product(*axes):
        point = deepcopy(sweep.base)
        for key, value in itertools.chain.from_iterable(part.items() for part in choice):
            *parents, last = str(key).split(".")
            inner: Any = point
            for parent in parents:
                inner = inner.setdefault(parent, {})
                if not isinstance(inner, dict):
                    raise ValueError(f"sweep: {key} varies, but {parent} is {inner!r}; make it a mapping, or drop one")
            inner[last] = deepcopy(value)
        found[key_of(point)] = point
    frame = pd.json_normalize(list(found.values()))
    for condition in sweep.where if found else []:
        try:
            met = frame.eval(condition)
            if not isinstance(met, pd.Series) or met.dtype != bool:
                raise TypeError("it is neither true nor false of a point")
            frame = frame[met]
        except Exception as error:
            raise ValueError(f"sweep.where {condition!r}: {error}; known: {', '.join(frame.columns)}") from error
    if not len(frame):
        raise ValueError(f"no point of the sweep is left; check sweep.grid and sweep.where {sweep.where}")
    return [list(found.values())[i] for i in frame.index]


def points_left(sweep: SweepConfig, folder: Path | None) -> dict[str, Strict]:
    """The points that the journal in ``folder`` does not have, by ``key_of``. ValueError for an unknown kind, a point
    that is none or could not be a row, and, where points are left, a device that is not here."""
    kind, done = kind_of(sweep), read_journal(folder / JOURNAL) if folder else {}
    found = {key_of(values): validate(kind.config, values, name_of(sweep, values)) for values in expand(sweep)}
    left = {key: point for key, point in found.items() if key not in done}
    for point in left.values():
        row(**columns_of(point) | {"status": "failed", "reason": "so that it could be told"})
    if left:
        device_names(sweep.devices)
    return left


def run_sweep(sweep: SweepConfig, folder: Path, quiet: bool = False) -> pd.DataFrame:
    """Run every point of a sweep; a row each, as a frame of the record, in the order of ``expand``.

    Each finished point goes to <folder>/points.jsonl at once; what that holds already is not run again, and needs no
    device. Whatever stops the sweep, Ctrl-C included, keeps it. ValueError as of ``points_left``, before any runs.
    """
    left, path, found = points_left(sweep, folder), folder / JOURNAL, expand(sweep)
    idle: SimpleQueue[Any] = SimpleQueue()

    def serve(values: dict[str, Any], point: Strict) -> dict[str, Any]:
        worker = idle.get()
        bar.set_postfix_str(label(sweep, values))
        begin = time.monotonic()
        try:
            answer = worker.run(values)
        finally:
            idle.put(worker)
        finished = row(**columns_of(point) | answer)
        return {"point": values, "seconds": round(time.monotonic() - begin, 3), "row": finished}

    if left:
        names = device_names(sweep.devices)
        threads = min(torch.get_num_threads(), max(1, cpu_count() // len(names)))
        engine: Any = ray_workers if sweep.engine == "ray" else process_workers
        with (
            engine(sweep, names, cloudpickle.dumps(points[sweep.point]), sweep.seconds_per_point, threads) as workers,
            tqdm(total=len(found), initial=len(found) - len(left), desc=sweep.point, disable=quiet) as bar,
            path.open("a") as journal,
            ThreadPoolExecutor(len(workers)) as pool,
        ):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            for worker in workers:
                idle.put(worker)
            todo = [(values, left[key_of(values)]) for values in found if key_of(values) in left]
            try:
                for served in as_completed([pool.submit(serve, *each) for each in todo]):
                    journal.write(json.dumps(served.result()) + "\n")
                    journal.flush()
                    bar.update()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.close()
    done = read_journal(path)
    return to_frame(done[key_of(values)]["row"] for values in found)


def plan(sweep: SweepConfig, where: torch.device | devices.DeviceProfile | None) -> pd.DataFrame:
    """What run_sweep would do: per point what varies, and why a device, or an assumed one, refuses it ("" if not, or if
    there is none to ask)."""
    kind, planned = kind_of(sweep), []
    for values in expand(sweep):
        point = validate(kind.config, values, name_of(sweep, values))
        planned.append({**varying(sweep, values), "refused": kind.refuses(point, where) or "" if where else ""})
    return pd.DataFrame(planned)


def columns_of(point: Strict) -> dict[str, Any]:
    return {name: value for name, value in point.model_dump(mode="json").items() if name in COLUMNS}


def key_of(values: dict[str, Any]) -> str:
    """What a point is known by: its content."""
    return json.dumps(values, sort_keys=True)


def varying(sweep: SweepConfig, values: dict[str, Any]) -> dict[str, Any]:
    """What tells a point of a sweep from the others, by dotted keys."""
    keys = itertools.chain(sweep.grid, *sweep.zipped)
    return {key: reduce(lambda inner, part: inner[part], key.split("."), values) for key in keys}


def label(sweep: SweepConfig, values: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varying(sweep, values).items())


def name_of(sweep: SweepConfig, values: dict[str, Any]) -> str:
    return f"sweep.point {sweep.point}: {label(sweep, values)}"


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of a points.jsonl (point, seconds, row) by ``key_of`` their points, without a last line cut off.
    ValueError for a line that is none."""
    entries, lines = {}, path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            entries[key_of(entry["point"])] = {
                "point": entry["point"],
                "seconds": entry["seconds"],
                "row": entry["row"],
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}, is damaged: {error!r}; delete it, and it runs again") from error
    return entries
