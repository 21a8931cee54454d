"""Ray as the engine of a sweep, on two pretended devices."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.experiments import cluster
from recexp.experiments.record import row
from recexp.experiments.sweep import points, register_point, run_sweep

pytest.importorskip("ray", reason="needs Ray: the extra cluster")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Task(Strict):
    page_size: int
    fate: str = "good"


@register_point("task", config=Task)
def work(point: Task, device: torch.device) -> dict[str, Any]:
    if point.fate == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if point.fate == "hang" else 0.3)
    return row("ok", device=str(device), page_size=point.page_size)


def test_crash_and_hang_cost_only_themselves_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path / "cache"))
    fates = ["good", "crash", "hang", *["good"] * 7]
    sweep = SweepConfig(
        point="task",
        zipped=[{"page_size": list(range(1, 11)), "fate": fates}],
        engine="ray",
        devices=["cpu:0", "cpu:1"],
        seconds_per_point=15,  # of which a good point needs one, and more beside other work
    )
    rows = run_sweep(sweep, tmp_path, quiet=True)
    assert list(rows["page_size"]) == list(range(1, 11))
    assert list(rows["status"]) == ["ok", "failed", "timed out", *["ok"] * 7]
    assert list(rows["reason"].dropna()) == ["its process died: SIGKILL(-9)", "no answer within 15 s"]
    assert set(rows["device_id"]) == {"cpu:0", "cpu:1"}


def test_a_cluster_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not waited for without end, as an actor without a free GPU is."""
    import ray

    sweep = SweepConfig(point="task", base={"page_size": 1}, engine="ray", devices=["cpu"], address="nowhere")
    with pytest.raises(RuntimeError, match=r"sweep.address nowhere: Invalid address.*host:port.*RAY_AUTH_MODE=token"):
        run_sweep(sweep, tmp_path, quiet=True)
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    for known, told in ((2.0, "has 2 GPUs and none free; wait for others"), (0.0, "0 GPUs .* with --num-gpus")):
        monkeypatch.setattr(ray, "cluster_resources", lambda known=known: {"GPU": known})
        with pytest.raises(RuntimeError, match=told):
            run_sweep(sweep, tmp_path, quiet=True)


def test_a_device_that_somebody_else_takes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "START_SECONDS", 0.25)
    arguments = (cloudpickle.dumps(points["task"]), 0.5, 1)
    missing = pytest.raises(RuntimeError, match="a device of the cluster is not to be had within 1 s")
    with cluster.ray_workers(SweepConfig(point="task", engine="ray"), ["cpu:0"], *arguments), missing:
        cluster.RemoteWorker(True, *arguments).run({"page_size": 1})


def test_ray_gives_devices_out_itself() -> None:
    with pytest.raises(ValueError, match=r"\['cuda:1'\]: Ray gives GPUs out; use auto and CUDA_VISIBLE_DEVICES"):
        SweepConfig(point="task", base={"page_size": 1}, engine="ray", devices=["cuda:1"])
