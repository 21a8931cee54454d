"""Devices: their ids, and that one process holds one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.experiments.record import row
from recexp.experiments.sweep import device_names, points, register_point, run_sweep
from recexp.experiments.workers import Worker, device_id, hold

cloudpickle.register_pickle_by_value(sys.modules[__name__])
HOLD = """
import sys, time
from recexp.experiments.workers import hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("RECEXP_WAIT", "0.3")


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds cpu:1."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, "cpu:1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_one_process_holds_a_device_at_a_time(
    holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with hold("cpu:0"):
        pass  # another device
    with pytest.raises(RuntimeError, match=rf"cpu:1 is held by process {holder.pid} after 0\.3 s"), hold("cpu:1"):
        pass
    assert f"cpu:1 is held by process {holder.pid}; waiting up to 0.3 s" in capsys.readouterr().out


def test_a_sweep_waits_for_its_device_and_refuses(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    sweep = SweepConfig(point="leftover", grid={"megabytes": [1]}, devices=["cpu:0", "cpu:1"])
    with pytest.raises(RuntimeError, match=f"held by process {holder.pid}"):
        run_sweep(sweep, tmp_path, quiet=True)
    with hold("cpu:0"):
        pass  # let go of again


def test_a_lock_does_not_outlive_its_holder(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    holder.kill()
    holder.wait()
    with hold("cpu:1"):
        pass


def test_waiting_ends_when_the_device_is_free(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_WAIT", "60")
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill {holder.pid}"])
    begin = time.monotonic()
    with hold("cpu:1"):
        assert 0.4 < time.monotonic() - begin < 30


def test_names_and_ids_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_names(["cpu:1", "cpu:0", "cpu:1"]) == ["cpu:1", "cpu:0"]
    with pytest.raises(ValueError, match="device 'cuda:77' asked for"):
        device_names(["cuda:77"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_names(["auto"]) == device_names(["cuda", "auto", "cuda:1"]) == ["cuda:0", "cuda:1"]
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a")
    assert [device_id(name) for name in ("cpu", "cpu:1", "cuda", "cuda:1")] == ["cpu", "cpu:1", "3", "GPU-5a"]


def test_a_worker_is_born_with_its_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not told later, when torch may have been imported: the variable is in the environment that its process got."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    worker = Worker("cuda:1", cloudpickle.dumps(points["leftover"]), 60.0, 3)
    assert worker._device.result(60).startswith("CPU")  # it has begun before its first point
    answer = worker.run({"megabytes": 1})
    assert answer["device_id"] == "GPU-b"
    assert "CUDA_VISIBLE_DEVICES=GPU-b" in answer["reason"] and "OMP_NUM_THREADS=3" in answer["reason"]
    with pytest.raises(RuntimeError, match=f"GPU-b is held by process {os.getpid()}"), hold("GPU-b"):
        pass
    worker.close()
    with hold("GPU-b"):
        pass


def test_a_worker_itself_needs_no_torch() -> None:
    """An actor of Ray is one, and its own process imports torch as well."""
    code = "import sys, recexp.experiments.cluster; print([x for x in ('torch', 'pandas') if x in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


kept = []


class Leftover(Strict):
    megabytes: int


@register_point("leftover", config=Leftover)
def leave(point: Leftover, device: torch.device) -> dict[str, object]:
    kept.append(torch.empty(point.megabytes << 20, dtype=torch.uint8, device=device))
    born = Path("/proc/self/environ").read_text().replace("\0", "\n")
    return row("ok", reason=born, device=str(device), num_tokens=os.getpid())


@pytest.mark.gpu
def test_memory_left_behind_costs_the_worker_its_place(tmp_path: Path) -> None:
    sweep = SweepConfig(point="leftover", grid={"megabytes": [1, 2, 300, 3]}, devices=["cuda:0"])
    rows = run_sweep(sweep, tmp_path, quiet=True)
    process = list(rows["num_tokens"])
    assert process[0] == process[1] == process[2] != process[3]
    assert set(rows["device"]) == {"cuda:0"} and rows["device_id"].str.startswith("GPU-").all()
