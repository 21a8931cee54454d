"""Sweeps: points from a grid, and rows whatever happens to a point."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import cloudpickle
import nbformat
import pandas as pd
import pytest
import torch
import yaml
from pydantic import ValidationError

from recexp.config import SweepConfig, load_config
from recexp.config.base import Strict
from recexp.devices import DeviceProfile, profile_of
from recexp.experiments.record import load_run, row, start_run
from recexp.experiments.run import run_experiment
from recexp.experiments.sweep import expand, plan, register_point, run_sweep

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a cell of a notebook is: workers cannot import it


class Fate(Strict):
    """What shall happen to a point; page_size is a column of the record."""

    fate: str = "good"
    page_size: int = 1


def refuses(point: Fate, where: torch.device | DeviceProfile) -> str | None:
    if isinstance(where, DeviceProfile) and point.page_size != where.page_size:
        return f"SM{where.sm} wants pages of {where.page_size}"
    return "it wants to" if point.fate == "refused" else None


@register_point("fate", config=Fate, refuses=refuses)
def meet(point: Fate, device: torch.device) -> dict[str, Any]:
    if point.fate == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if point.fate == "hang":
        time.sleep(60)
    if point.fate == "no memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
    if point.fate == "no host memory":
        torch.empty(1 << 50)
    if point.fate == "error":
        raise KeyError("user_id")
    if point.fate == "interrupt":
        raise KeyboardInterrupt
    if point.fate == "no row":
        return None  # type: ignore[return-value]
    if point.fate == "no number":
        return row("ok", device="cpu", error=1.0) | {"page_size": object()}
    return row("ok", device=str(device), page_size=point.page_size, error=float(os.getpid()))


def sweep_of(**fields: Any) -> SweepConfig:
    return SweepConfig(**{"point": "fate", "devices": ["cpu"], "seconds_per_point": 30, **fields})


def test_expand_is_base_times_grid_times_groups() -> None:
    sweep = sweep_of(
        base={"model": {"layers": 2, "heads": 1}, "fate": "good"},
        grid={"page_size": [16, 32], "model.heads": [1, 4]},
        zipped=[{"batch": [1, 8], "model.width": [64, 256]}],
        where=["page_size * batch > 16", "`model.heads` == 4"],
    )
    both = {"layers": 2, "heads": 4}
    assert expand(sweep) == [
        {"model": {**both, "width": 256}, "fate": "good", "page_size": 16, "batch": 8},
        {"model": {**both, "width": 64}, "fate": "good", "page_size": 32, "batch": 1},
        {"model": {**both, "width": 256}, "fate": "good", "page_size": 32, "batch": 8},
    ]
    assert expand(sweep_of(base={"page_size": 3})) == [{"page_size": 3}]
    assert expand(sweep_of(grid={"page_size": [3, 3]})) == [{"page_size": 3}]


def test_impossible_sweeps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"equally long, got \{'a': 1, 'b': 2\}"):
        sweep_of(zipped=[{"a": [1], "b": [1, 2]}])
    with pytest.raises(ValidationError, match=r"devices\n.*at least 1 item"):
        sweep_of(devices=[])
    with pytest.raises(ValidationError, match="not a valid JSON value"):
        sweep_of(grid={"day": [datetime.date(2026, 1, 1)]})  # as YAML reads it
    with pytest.raises(ValueError, match=r"model.heads varies, but model is 3; make it a mapping"):
        expand(sweep_of(base={"model": 3}, grid={"model.heads": [1]}))
    with pytest.raises(ValueError, match=r"sweep.modules 'no_such_module' .*PYTHONPATH\?\): .*No module named"):
        run_sweep(sweep_of(modules=["no_such_module"]), tmp_path)
    with pytest.raises(ValidationError, match="a varies twice"):
        sweep_of(grid={"a": [1]}, zipped=[{"a": [1]}])
    with pytest.raises(ValueError, match="'size > 1': name 'size' is not defined; known: page_size"):
        expand(sweep_of(grid={"page_size": [1]}, where=["size > 1"]))
    for condition in ("page_size", "page_size + 1", "1", "True"):  # labels of points they are not
        with pytest.raises(ValueError, match="it is neither true nor false of a point; known: page_size"):
            expand(sweep_of(grid={"page_size": [0, 1]}, where=[condition]))
    with pytest.raises(ValueError, match="no point of the sweep is left"):
        expand(sweep_of(grid={"page_size": []}, where=["page_size > 1"]))
    with pytest.raises(ValueError, match="no point of the sweep is left"):
        expand(sweep_of(grid={"page_size": [1]}, where=["page_size > 1"]))
    with pytest.raises(ValueError, match="unknown kind of point 'fat'; did you mean 'fate'"):
        run_sweep(sweep_of(point="fat"), tmp_path)
    with pytest.raises(ValueError, match=r"page_sizes=2:\n.*did you mean 'page_size'"):
        run_sweep(sweep_of(grid={"page_sizes": [2]}), tmp_path)
    with pytest.raises(ValueError, match="device 'cuda:77' asked for"):
        run_sweep(sweep_of(devices=["cuda:77"]), tmp_path, quiet=True)
    for size in (-1, 2**63):  # no row could say what became of it
        with pytest.raises(ValueError, match="page_size must be a whole number from 0 on, got"):
            run_sweep(sweep_of(grid={"page_size": [1, size]}), tmp_path, quiet=True)
    with pytest.raises(ValidationError, match="less than or equal to 10000000"):
        sweep_of(seconds_per_point=1e300)  # no clock waits so long
    assert not list(tmp_path.iterdir())


def test_a_module_that_fails_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_here.py").write_text("\n1 / 0\n")
    (tmp_path / "cannot_be_read.py").write_text("\ndeff x\n")
    for module, told in (
        ("fails_here", r"ZeroDivisionError: .* \(fails_here.py, line 2\)"),
        ("cannot_be_read", r"SyntaxError: .*\(cannot_be_read.py, line 2\)"),
        ("../elsewhere", "TypeError: "),
    ):
        with pytest.raises(ValueError, match=f"sweep.modules '{module}' .*{told}"):
            plan(sweep_of(modules=[module]), None)


FATES = ["good", "crash", "hang", "no memory", "error", "refused", "interrupt", "no row", "no number"]
FATES += ["no host memory", "good"]


def test_whatever_happens_to_a_point_is_its_row(tmp_path: Path) -> None:
    sweep = sweep_of(zipped=[{"fate": FATES, "page_size": list(range(11))}], seconds_per_point=12)
    rows = run_sweep(sweep, tmp_path, quiet=True)
    assert list(rows["page_size"]) == list(range(11))
    died = ["failed", "timed out", "out of memory", "failed", "refused"]
    assert list(rows["status"]) == ["ok", *died, *["failed"] * 3, "out of memory", "ok"]
    *reasons, number, memory = rows["reason"].dropna()
    assert (
        "object object" in number
        and "can't allocate memory" in memory
        and reasons
        == [
            "its process died: SIGSEGV(-11)",
            "no answer within 12 s",
            "CUDA out of memory. Tried to allocate 1 TiB",
            "KeyError: 'user_id'",
            "it wants to",
            "KeyboardInterrupt: ",
            "TypeError: recexp.experiments.record.row() argument after ** must be a mapping, not NoneType",
        ]
    )
    assert set(rows["device_id"]) == {"cpu"} and rows["device"].str.contains("cpu|CPU").all()
    entries = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert [entry["point"]["fate"] for entry in entries] == FATES
    assert 4 <= entries[2]["seconds"] < 40


def test_a_worker_serves_point_after_point_on_each_device(tmp_path: Path) -> None:
    sweep = sweep_of(grid={"page_size": list(range(12))}, devices=["cpu:0", "cpu:1"])
    rows = run_sweep(sweep, tmp_path, quiet=True)
    assert set(rows["status"]) == {"ok"}
    assert set(rows["device_id"]) == {"cpu:0", "cpu:1"}
    assert rows["error"].nunique() == 2  # a point's error is the process that ran it
    assert (rows.groupby("device_id")["error"].nunique() == 1).all()


def test_finished_points_are_not_run_again(tmp_path: Path) -> None:
    done = {"point": {"page_size": 8}, "seconds": 1.0, "row": {"status": "ok", "page_size": 8, "error": 0.5}}
    (tmp_path / "points.jsonl").write_text(json.dumps(done) + '\n{"point": {"page_size": 16}, "sec')
    sweep = sweep_of(grid={"page_size": [16, 8]})
    rows = run_sweep(sweep, tmp_path, quiet=True)
    assert list(rows["page_size"]) == [16, 8]
    assert rows["error"][1] == 0.5 and rows["error"][0] > 1
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 2
    pd.testing.assert_frame_equal(run_sweep(sweep, tmp_path, quiet=True), rows)


def test_a_damaged_journal_is_told(tmp_path: Path) -> None:
    for line in ("{nonsense", "7", '{"point": {}}', "\0" * 9):
        (tmp_path / "points.jsonl").write_text(f'{{"point": {{"page_size": 8}}, "seconds": 1, "row": {{}}}}\n{line}\n')
        with pytest.raises(ValueError, match=r"points\.jsonl, line 2, is damaged: .*delete it, and it runs again"):
            run_sweep(sweep_of(grid={"page_size": [8]}), tmp_path, quiet=True)


def test_plan_says_what_an_assumed_device_refuses() -> None:
    sweep = sweep_of(grid={"page_size": [32, 128]}, base={"fate": "refused"})
    planned = plan(sweep, profile_of("sm100"))
    assert list(planned["page_size"]) == [32, 128]
    assert list(planned["refused"]) == ["SM100 wants pages of 128", "it wants to"]
    assert list(plan(sweep, None)["refused"]) == ["", ""]


MODULE = """
import os, time
from pathlib import Path
from recexp.config.base import Strict
from recexp.experiments.record import row
from recexp.experiments.sweep import register_point

class Patient(Strict):
    page_size: int

@register_point("patient", config=Patient)
def wait(point, device):
    Path(f"pid{point.page_size}").write_text(str(os.getpid()))
    while point.page_size == 2 and not Path("go").exists():
        time.sleep(0.05)
    return row("ok", device="cpu", page_size=point.page_size, error=float(os.getpid()))
"""
STORY = """
from pathlib import Path
from recexp.experiments.run import load_experiment
from recexp.experiments.sweep import run_sweep
from recexp.experiments.record import start_run
experiment = load_experiment(config)
run = start_run(experiment.name, experiment, run_dir=run_dir, quiet=True)
run.save(run_sweep(experiment.sweep, run.path, quiet=True))
"""
CONFIG = {
    "kind": "experiment", "name": "patience", "notebook": "story.ipynb", "device": "cpu",
    "models": {"hstu": {"num_items": 5}},
    "sweep": {"point": "patient", "modules": ["patient"], "grid": {"page_size": [1, 2, 3]}, "devices": ["cpu"]},
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment of one's own: configuration, notebook, and the module with its kind of points."""
    (tmp_path / "patient.py").write_text(MODULE)
    (tmp_path / "patience.yaml").write_text(yaml.safe_dump(CONFIG))
    parameters = nbformat.v4.new_code_cell('config = ""\nrun_dir = ""\nquiet = True', metadata={"tags": ["parameters"]})
    story = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(STORY)])
    story.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(story, tmp_path / "story.ipynb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RECEXP_WAIT", "20")
    return tmp_path


def recexp(*arguments: str) -> subprocess.Popen[str]:
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore Ctrl-C
    command = [sys.executable, "-m", "recexp", *arguments]
    return subprocess.Popen(command, text=True, stdout=PIPE, stderr=PIPE, preexec_fn=heeds)


def next_text(path: Path, process: subprocess.Popen[str]) -> str:
    """What a process writes there, once it has."""
    while process.poll() is None:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise RuntimeError(process.communicate()[1])


def test_what_is_stopped_or_killed_goes_on(checkout: Path) -> None:
    stopped = recexp("run", "patience.yaml")
    next_text(Path("pid2"), stopped)
    (folder,) = Path("results/patience").glob("*.partial")
    first = json.loads((folder / "points.jsonl").read_text())
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    Path("pid2").unlink()
    assert f"recexp run {folder}/config.yaml --resume {folder}" in err
    assert "patient:  33%" in err and "page_size=2" in err  # the progress bar, with the point it was at

    killed = recexp("run", "patience.yaml", "--resume", str(folder))
    worker = int(next_text(Path("pid2"), killed))
    second = recexp("run", "patience.yaml", "--resume", str(folder))
    assert f"another process runs into {folder}; let it end first" in second.communicate(timeout=60)[1]
    killed.kill()
    killed.communicate()
    ended = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < ended:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()  # it does not outlive the sweep, and so does not disturb the next one

    changed = ["sweep.grid={page_size: [1, 2]}"]
    with pytest.raises(ValueError, match=r"begun with other values.*\n.*\nsweep\.grid\.page_size\.2 +3 +None"):
        run_experiment(Path("patience.yaml"), changed, resume=folder)

    (checkout / "go").touch()
    finished = recexp("run", f"{folder}/config.yaml", "--resume", str(folder))
    out, err = finished.communicate(timeout=120)
    assert finished.returncode == 0, err
    run = load_run(folder.with_suffix(""))
    assert f"report: {run.path}/report.html" in out
    assert list(run.measurements["page_size"]) == [1, 2, 3]
    assert run.measurements["error"][0] == first["row"]["error"]


def test_a_swept_run_is_rendered_without_its_device(checkout: Path) -> None:
    """And one with points left, or none that could be, leaves nothing behind."""
    absent = ["device=cuda:77", "sweep.devices=[cuda:77]"]
    with pytest.raises(ValueError, match="device 'cuda:77' asked for"):
        run_experiment(Path("patience.yaml"), absent)
    with pytest.raises(ValueError, match="page_size=many:\n"):
        run_experiment(Path("patience.yaml"), ["sweep.grid={page_size: [many]}"])
    assert not Path("results").exists()
    run = start_run("patience", load_config("patience.yaml", absent), quiet=True)
    rows = [row("ok", device="an H200", page_size=size, error=0.5) for size in (1, 2, 3)]
    entries = [{"point": {"page_size": each["page_size"]}, "seconds": 1.0, "row": each} for each in rows]
    (run.path / "points.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    finished = run_experiment(run.path / "config.yaml", quiet=True, resume=run.path)
    assert set(load_run(finished).measurements["device"]) == {"an H200"}
    with pytest.raises(ValueError, match=r"it has no start.json"):
        run_experiment(finished / "config.yaml", quiet=True, resume=finished)
