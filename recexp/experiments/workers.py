"""Points in processes of their own, one a device: what happens to a point happens to nothing else.

Only these processes import torch: a worker's own, an actor of Ray say, is to have them running at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import cloudpickle
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from recexp.config import SweepConfig, cache_dir

LEFT_BYTES = 128 * 2**20  # on the device after a point; cuBLAS keeps some 32 MiB
START_SECONDS = 300.0  # for a new process to import torch and find its device


def device_id(name: str) -> str:
    """What tells a device from all others of this machine: a GPU's UUID (as CUDA_VISIBLE_DEVICES takes it); "cpu"."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return name
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entry = visible.split(",")[int(index or 0)] if visible else index or "0"
    query = ("nvidia-smi", f"--id={entry}", "--query-gpu=uuid", "--format=csv,noheader")
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or entry
    except (OSError, subprocess.SubprocessError):
        return entry


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
    """Points one after another in a process that sees one device only, and that starts at once. A fresh one takes over
    after a point that failed, hung, crashed, or left memory on the device. The device is held until ``close()``.

    packed: the kind of point by cloudpickle, which takes in what a cell of a notebook defines; seconds: the limit of a
    point, the start of its process not counted.
    """

    def __init__(self, name: str, packed: bytes, seconds: float, num_threads: int) -> None:
        self.id, self._packed, self._seconds = device_id(name), packed, seconds
        visible = "" if name.startswith("cpu") else self.id  # set before the process imports torch
        self._env = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(num_threads)}
        self._held = hold(self.id)
        self._held.__enter__()
        self._start()

    def _start(self) -> None:
        self._process = ProcessPoolExecutor(1, env=self._env, initializer=_begin, initargs=(os.getpid(),))
        self._device = self._process.submit(_prepare, self._packed)
        self._used_up = False

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The point's row, or, if it came to none, status and reason; device_id, and device where the row has none.
        RuntimeError when the process does not start."""
        if self._used_up:
            self._start()
        try:
            device = self._device.result(START_SECONDS)
        except (TimeoutError, TerminatedWorkerError) as error:
            raise RuntimeError(f"no process for points starts on {self.id}: {error!r}") from error
        try:
            answer, self._used_up = self._process.submit(_run_point, self._packed, values).result(self._seconds)
        except TimeoutError:
            answer, self._used_up = {"status": "timed out", "reason": f"no answer within {self._seconds:g} s"}, True
        except TerminatedWorkerError as error:  # its text ends in the exit codes: {SIGSEGV(-11)}
            codes = str(error).rpartition("{")[2].partition("}")[0]
            answer, self._used_up = {"status": "failed", "reason": f"its process died: {codes}"}, True
        if self._used_up:
            self._process.shutdown(kill_workers=True)
        return {"device": device, **answer, "device_id": self.id}

    def close(self) -> None:
        """End the process, whatever it does, and let go of the device."""
        self._process.shutdown(kill_workers=True)
        self._held.__exit__(None, None, None)


@contextmanager
def process_workers(sweep: SweepConfig, names: list[str], *arguments: Any) -> Iterator[list[Worker]]:
    """A worker for every device of this machine that is named; ``arguments`` are the further ones of ``Worker``."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Worker(name, *arguments))) for name in names]


def _begin(parent: int) -> None:
    """In a new process: leave Ctrl-C to the parent, and end when it does, in the middle of a point too."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _prepare(packed: bytes) -> str:
    """In that process: import what points need, outside of their time; returns the device's name."""
    from recexp.devices import describe_device, resolve

    cloudpickle.loads(packed)
    return describe_device(resolve("auto"))


def _run_point(packed: bytes, values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """In that process: the point's row, or its status and reason, and whether a fresh process should take over."""
    import gc
    import json

    import torch

    from recexp.experiments.record import row

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # there is no other
    kind = cloudpickle.loads(packed)
    try:
        point = kind.config.model_validate(values)
        if reason := kind.refuses(point, device):
            return {"status": "refused", "reason": reason}, False
        answer = row(**kind.run(point, device))
        answer = json.loads(json.dumps(answer, default=lambda number: number.item()))  # as the journal keeps it
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"status": "out of memory", "reason": str(error) or "host memory"}, True
    except BaseException as error:  # whatever a point raises, SystemExit and KeyboardInterrupt too
        status = "out of memory" if "DefaultCPUAllocator" in str(error) else "failed"  # a plain RuntimeError
        return {"status": status, "reason": f"{type(error).__name__}: {error}"}, True
    gc.collect()
    return answer, device.type == "cuda" and torch.cuda.memory_allocated(device) > LEFT_BYTES
