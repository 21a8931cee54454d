"""Points in processes of their own, one a device: what happens to a point happens to nothing else."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from recexp import devices
from recexp.config import SweepConfig, cache_dir
from recexp.experiments.record import COLUMNS, row
from recexp.experiments.record import _output as output_of

if TYPE_CHECKING:
    from recexp.experiments.sweep import PointKind

LEFT_BYTES = 128 * 2**20  # on the device after a point; cuBLAS keeps some 32 MiB
START_SECONDS = 300.0  # for a new process to import torch and find its device


def device_names(wanted: list[str]) -> list[str]:
    """Devices of a sweep by name: "auto" is every CUDA device, else the CPU. ValueError for one that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{i}" for i in range(count)] or ["cpu"] if wanted == ["auto"] else list(dict.fromkeys(wanted))
    for name in names:
        devices.resolve(name)
    return names


def device_id(name: str) -> str:
    """What tells a device from all others of this machine: a GPU's UUID (as CUDA_VISIBLE_DEVICES takes it); "cpu"."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return name
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entry = visible.split(",")[int(index or 0)] if visible else index or "0"
    return output_of("nvidia-smi", f"--id={entry}", "--query-gpu=uuid", "--format=csv,noheader") or entry


def threads_of(num_devices: int) -> int:
    """Threads of each device's process, so that together they do not ask for more than one would."""
    return max(1, torch.get_num_threads() // num_devices)


@contextmanager
def hold(device: str) -> Iterator[None]:
    """Keep other processes of this user off a device (by its id) until the block ends or this process dies.

    Waits $RECEXP_WAIT seconds (300 unless set) for another holder, then raises RuntimeError with the holder's pid.
    """
    import fcntl  # there is none on Windows

    path = cache_dir() / "locks" / f"{device.replace(':', '_')}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    wait = float(os.environ.get("RECEXP_WAIT", 300))
    with path.open("a+") as file:
        for attempt in range(max(1, int(wait * 5))):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = f"{device} is held by process {path.read_text()}"
                if attempt == 0:
                    print(f"{holder}; waiting up to {wait:g} s", flush=True)
                time.sleep(0.2)
        else:
            raise RuntimeError(f"{holder} after {wait:g} s; end that one, or wait longer: RECEXP_WAIT=3600")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Worker:
    """Points one after another in a process that sees one device only. A fresh process takes over after a point that
    failed, hung, crashed, or left memory on the device. The device is held until ``close()``.

    packed: the kind of point by cloudpickle, which takes in what a cell of a notebook defines; seconds: the limit of a
    point, the start of its process not counted.
    """

    def __init__(self, name: str, packed: bytes, seconds: float, num_threads: int) -> None:
        self.id, self._packed, self._seconds = device_id(name), packed, seconds
        visible = "" if name.startswith("cpu") else self.id  # set before the process imports torch
        self._env = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(num_threads)}
        self._process: ProcessPoolExecutor | None = None
        self._held = hold(self.id)
        self._held.__enter__()

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The point's row."""
        if self._process is None:
            self._process = ProcessPoolExecutor(1, env=self._env, initializer=_begin, initargs=(os.getpid(),))
            self._device = self._process.submit(_start, self._packed).result(START_SECONDS)
        try:
            answer, fresh = self._process.submit(_run_point, self._packed, values).result(self._seconds)
        except TimeoutError:
            answer, fresh = self._lost(values, "timed out", f"no answer within {self._seconds:g} s"), True
        except TerminatedWorkerError as error:  # its text ends in the exit codes: {SIGSEGV(-11)}
            codes = str(error).rpartition("{")[2].partition("}")[0]
            answer, fresh = self._lost(values, "failed", f"its process died: {codes}"), True
        if fresh:
            self.stop()
        return {**answer, "device_id": self.id}

    def _lost(self, values: dict[str, Any], status: str, reason: str) -> dict[str, Any]:
        return row(status, **(_unpack(self._packed, values)[2] | {"reason": reason, "device": self._device}))

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process:
            self._process.shutdown(kill_workers=True)
        self._process = None

    def close(self) -> None:
        """End the process and let go of the device."""
        self.stop()
        self._held.__exit__(None, None, None)


@contextmanager
def process_workers(sweep: SweepConfig, packed: bytes) -> Iterator[list[Worker]]:
    """A worker for every device of the sweep on this machine."""
    names = device_names(sweep.devices)
    yield [Worker(name, packed, sweep.seconds_per_point, threads_of(len(names))) for name in names]


def _unpack(packed: bytes, values: dict[str, Any]) -> tuple[PointKind, Any, dict[str, Any]]:
    """The kind, the point, and those of its fields that are columns of the record."""
    kind = cloudpickle.loads(packed)
    point = kind.config.model_validate(values)
    return kind, point, {name: value for name, value in point.model_dump(mode="json").items() if name in COLUMNS}


def _begin(parent: int) -> None:
    """In a new process: leave Ctrl-C to the parent, and end when it does, in the middle of a point too."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _start(packed: bytes) -> str:
    """In that process: import what points need, outside of their time; returns the device's name."""
    cloudpickle.loads(packed)
    return _device_name()


def _device_name() -> str:
    return devices.describe_device(devices.resolve("auto"))


def _run_point(packed: bytes, values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """In that process: the point's row, and whether a fresh process should take over."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # there is no other
    kind, point, columns = _unpack(packed, values)
    columns |= {"device": _device_name()}
    try:
        reason = kind.refuses(point, device)
        answer = row("refused", **(columns | {"reason": reason})) if reason else kind.run(point, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return row("out of memory", **(columns | {"reason": str(error) or "host memory"})), True
    except (Exception, SystemExit) as error:
        return row("failed", **(columns | {"reason": f"{type(error).__name__}: {error}"})), True
    gc.collect()
    return answer, device.type == "cuda" and torch.cuda.memory_allocated(device) > LEFT_BYTES
