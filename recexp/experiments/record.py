"""Runs on disk: results/<experiment>/<run>/ with manifest, configuration, tables and figures, whole or not at all."""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from matplotlib.figure import Figure
from pydantic import BaseModel

from recexp.devices import cpu_name
from recexp.experiments.measure import Latency
from recexp.registry import nearest

SCHEMA_VERSION = 2
STATUSES = ("ok", "refused", "wrong", "out of memory", "timed out", "failed")
MODES = ("eager", "graph", "segmented", "static", "compiled", "package")
TIERS = ("none", "device", "host", "partial", "miss", "mixed")

TEXTS = ("status", "reason", "device", "device_id", "backbone", "backend", "dtype", "mode", "tier")
MODEL = ("num_layers", "hidden_size", "num_heads", "head_dim", "page_size")
CACHE = ("num_pages", "host_pages", "cached_tokens", "new_tokens")
SHAPES = (*MODEL, *CACHE, "batch_size", "history_pairs", "num_tokens", "num_candidates")
TIMES = (*Latency.__dataclass_fields__, "tflops", "tflops_share", "gbps", "gbps_share", "allocate_us", "host_copy_us")
INTEGERS = (*SHAPES, "count", "peak_memory_bytes")
COLUMNS = (*TEXTS, *SHAPES, *TIMES, "wasted_share", "error")  # their meaning: results/README.md


def row(status: str, *, latency: Latency | None = None, **columns: Any) -> dict[str, Any]:
    """One point of an experiment as a row with all COLUMNS, None where nothing is given. The only way a row is made, so
    its rules hold everywhere; breaking one is a ValueError: known columns, status, mode and tier; numbers from 0 on,
    counts whole; no time of any kind without status "ok", and a reason instead; a time names device, mode and tier and
    is positive, p10 to p90 in order; the numerical error of an "ok" point is finite."""
    given = {**(asdict(latency) if latency else {}), **columns}
    for name in given:
        if name not in COLUMNS:
            raise ValueError(f"unknown column {name!r}; {nearest(name, list(COLUMNS))}")
    values: dict[str, Any] = {"status": status, **{name: given.get(name) for name in COLUMNS[1:]}}
    for name, known in (("status", STATUSES), ("mode", MODES), ("tier", TIERS)):
        if (values[name] is not None or name == "status") and values[name] not in known:
            raise ValueError(f"unknown {name} {values[name]!r}; {nearest(str(values[name]), list(known))}")
    numbers = {name: values[name] for name in COLUMNS if name not in TEXTS and values[name] is not None}
    for name, x in numbers.items():
        if not isinstance(x, Real) or x < 0 or (name in INTEGERS and (x % 1 or x // 2**63)):  # NaN has a rest, too
            raise ValueError(f"{name} must be a {'whole ' * (name in INTEGERS)}number from 0 on, got {x!r}")
    timed = [name for name in TIMES if name != "peak_memory_bytes" and name in numbers]
    if status != "ok" and timed:
        raise ValueError(f"a point that is {status!r} has no times, got {', '.join(timed)}")
    if status != "ok" and not values["reason"]:
        raise ValueError(f"a point that is {status!r} needs a reason")
    if missing := [name for name in ("device", "mode", "tier") if timed and not values[name]]:
        raise ValueError(f"a time says where it was taken: {', '.join(missing)} missing")
    if bad := [name for name in timed if not 0 < values[name] < math.inf]:
        raise ValueError(f"{bad[0]} must be a positive number, got {values[bad[0]]}")
    spread = [numbers[name] for name in ("p10_ms", "p50_ms", "p90_ms") if name in numbers]
    if spread != sorted(spread):
        raise ValueError(f"p10_ms, p50_ms and p90_ms must be in order, got {spread}")
    if status == "ok" and not math.isfinite(numbers.get("error", 0)):
        raise ValueError(f"a point with numerical error {values['error']} is 'wrong', not 'ok'")
    return values


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame with one type a column (string, Int64, Float64), whatever is missing."""
    types = {name: "string" if name in TEXTS else "Int64" if name in INTEGERS else "Float64" for name in COLUMNS}
    return pd.DataFrame(list(rows), columns=list(COLUMNS)).astype(types)


@dataclass(frozen=True)
class Run:
    """A run being written, in `<run>.partial`: whatever stops it before finish() leaves that folder, never a run."""

    path: Path
    quiet: bool = False
    owned: bool = True  # False in a notebook that writes into the run of the command that executes it

    def save(self, frame: pd.DataFrame, name: str = "measurements") -> None:
        """Write <name>.parquet and <name>.csv."""
        self._write(f"{name}.parquet", frame.to_parquet)
        self._write(f"{name}.csv", lambda path: frame.to_csv(path, index=False))

    def figure(self, figure: Figure, name: str) -> Figure:
        """Write figures/<name>.png and .svg; returns the figure, to be shown."""
        for kind, more in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            self._write(f"figures/{name}.{kind}", lambda path: figure.savefig(path, format=kind, **more))  # noqa: B023
        return figure

    def finish(self) -> Path:
        """Make the folder a run: the manifest goes last, then the folder gets its name. Returns its path. In a run that
        another process owns there is nothing to do."""
        if not self.owned:
            return self.path
        manifest = json.loads((self.path / "start.json").read_text())
        files = sorted(p for p in self.path.rglob("*") if p.is_file() and p.name != "start.json")
        manifest["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        manifest["files"] = {p.relative_to(self.path).as_posix(): _stamp(p) for p in files}
        self._write("manifest.json", lambda path: path.write_text(json.dumps(manifest, indent=2)))
        (self.path / "start.json").unlink()
        final = self.path.rename(self.path.with_suffix(""))
        if not self.quiet:
            print(f"finished {final}")
        return final

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Through a neighbour and a rename, so that no file is ever half of itself, a full disk included."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            write(part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise OSError(error.errno, f"{path} could not be written: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)
        if not self.quiet:
            print(f"wrote {path}")


def start_run(
    experiment: str, config: BaseModel | Mapping[str, Any], results_dir: Path | str = "results", *,
    run_dir: Path | str | None = None, quiet: bool = False,
) -> Run:  # fmt: skip
    """Begin a run in <results_dir>/<experiment>/<UTC time>.partial and write config.yaml, defaults included. With
    run_dir (the path of a run begun elsewhere) write into that one instead, and leave finishing to its owner."""
    if not re.fullmatch(r"\w[\w-]*", experiment):
        raise ValueError(f"an experiment's name is letters, digits, _ and -, got {experiment!r}")
    resolved = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    if run_dir:
        run = Run(Path(run_dir), quiet, owned=False)
        if not (run.path / "start.json").exists():
            raise ValueError(f"{run.path} is not a run being written: it has no start.json")
    else:
        now = datetime.now(UTC)
        run = Run(Path(results_dir) / experiment / f"{now:%Y%m%d-%H%M%S}-{now.microsecond:06}.partial", quiet)
        run.path.mkdir(parents=True)
        start: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "experiment": experiment}
        start |= {"started": now.isoformat(timespec="seconds"), "environment": environment()}
        run._write("start.json", lambda path: path.write_text(json.dumps(start, indent=2)))
    run._write("config.yaml", lambda path: path.write_text(yaml.safe_dump(resolved, sort_keys=False)))
    return run


@dataclass(frozen=True)
class SavedRun:
    """A whole run, read back. missing_columns: those of today's schema that an older run does not have."""

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    measurements: pd.DataFrame
    missing_columns: tuple[str, ...]


def load_run(path: Path | str) -> SavedRun:
    """Read a finished run. ValueError, naming all that is missing or changed, for anything else."""
    path = Path(path)
    if path.suffix == ".partial" or not (path / "manifest.json").is_file():
        raise ValueError(f"{path} is not a whole run: {'it was never finished' if path.is_dir() else 'no such folder'}")
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        version, files = manifest["schema_version"] + 0, {**manifest["files"]}
        _ = manifest["experiment"], manifest["environment"]["versions"], manifest["environment"]["git_revision"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}/manifest.json is damaged: {error!r}") from None
    if version > SCHEMA_VERSION:
        raise ValueError(f"{path} has schema version {version}, this recexp reads up to {SCHEMA_VERSION}: update it")
    needed = {"config.yaml", "measurements.parquet", *files}
    faults = [f"{name} is missing" for name in sorted(needed) if not (path / name).is_file()]
    present = [name for name in files if (path / name).is_file()]
    faults += [f"{name} has changed" for name in present if _stamp(path / name) != files[name]]
    if faults:
        raise ValueError(f"{path} is not a whole run: {', '.join(faults)}")
    frame = pd.read_parquet(path / "measurements.parquet")
    config = yaml.safe_load((path / "config.yaml").read_text())
    return SavedRun(path, manifest, config, frame, tuple(name for name in COLUMNS if name not in frame))


def _stamp(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def environment() -> dict[str, Any]:
    """This machine and this code, None for what is absent: device, driver and clocks as nvidia-smi tells them, CPU,
    threads, versions, git revision and whether the tree was clean (of the checkout recexp runs from, if it does)."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    cards = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    git = ("git", "-C", str(Path(__file__).parent))
    ours = _output(*git, "rev-parse", "--show-prefix") == "recexp/experiments/"
    changes = _output(*git, "status", "--porcelain") if ours else None
    packages = ("recexp", "torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pandas")
    return {
        "gpus": [dict(zip(fields.split(","), line.split(", "), strict=False)) for line in (cards or "").splitlines()],
        "cpu": cpu_name(),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {d.name: d.version for name in packages for d in distributions(name=name)},
        "cuda": torch.version.cuda,
        "git_revision": _output(*git, "rev-parse", "HEAD") if ours else None,
        "git_clean": None if changes is None else changes == "",
    }


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
