import errno
import json
import math
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure
from pydantic import BaseModel

from recexp.experiments import record
from recexp.experiments.measure import Latency
from recexp.experiments.record import COLUMNS, Run, environment, load_run, row, start_run, to_frame

LATENCY = Latency(0.9, 1.0, 1.2, 50, 1.1, 1000)
ROOT = Path(__file__).parents[2]
VERSION_2 = ["device_id", "cached_tokens", "new_tokens", "wasted_share", "allocate_us", "host_copy_us"]
PLACE = {"device": "cpu", "mode": "eager", "tier": "none"}


class Config(BaseModel):
    name: str
    pages: tuple[int, ...] = (16, 32)
    folder: Path = Path("data")


def write_run(folder: Path) -> Path:
    run = start_run("page_sizes", Config(name="a"), folder, quiet=True)
    run.save(to_frame([row("ok", latency=LATENCY, batch_size=4, **PLACE)]))
    run.figure(Figure(), "latency")
    return run.finish()


def test_a_row_has_every_column_and_its_latency() -> None:
    values = row("ok", latency=LATENCY, backbone="hstu", error=1e-7, **PLACE)
    assert tuple(values) == COLUMNS
    assert (values["p50_ms"], values["count"], values["peak_memory_bytes"]) == (1.0, 50, 1000)
    assert values["page_size"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"status": "wrong", "reason": "0.1 off", "latency": LATENCY, **PLACE}, "'wrong' has no times, got p10_ms"),
        ({"status": "refused", "reason": "no GPU", "host_p50_ms": 1.0, **PLACE}, "got host_p50_ms"),
        ({"status": "failed", "reason": "x", "gbps_share": 0.1, **PLACE}, "got gbps_share"),
        ({"status": "out of memory"}, "needs a reason"),
        ({"status": "fine"}, "unknown status 'fine'"),
        ({"status": "ok", "tier": "gpu"}, "unknown tier 'gpu'"),
        ({"status": "ok", "mode": "graphs"}, "did you mean 'graph'"),
        ({"status": "ok", "batchsize": 3}, "did you mean 'batch_size'"),
        ({"status": "ok", "latency": LATENCY, "device": "cpu"}, "mode, tier missing"),
        ({"status": "ok", "latency": LATENCY, **PLACE, "tflops": math.nan}, "tflops must be a positive number"),
        ({"status": "ok", "p50_ms": 0.0, **PLACE}, "p50_ms must be a positive number, got 0.0"),
        ({"status": "ok", "error": math.nan}, "'wrong', not 'ok'"),
        ({"status": None}, "unknown status None"),
        ({"status": "ok", "batch_size": 1.5}, "batch_size must be a whole number from 0 on, got 1.5"),
        ({"status": "ok", "num_pages": 2**63}, "num_pages must be a whole number"),  # no Int64
        ({"status": "ok", "num_pages": math.nan}, "num_pages must be a whole number"),
        ({"status": "ok", "p50_ms": "1", **PLACE}, "p50_ms must be a number from 0 on, got '1'"),
        ({"status": "ok", "latency": replace(LATENCY, p10_ms=1.1), **PLACE}, "must be in order, got [1.1, 1.0, 1.2]"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        row(**arguments)


def test_frames_keep_their_types_through_both_files(tmp_path: Path) -> None:
    frame = to_frame([row("refused", reason="head_dim 48"), row("ok", latency=LATENCY, page_size=32, **PLACE)])
    run = start_run("page_sizes", {}, tmp_path, quiet=True)
    run.save(frame)
    saved = load_run(run.finish())
    pd.testing.assert_frame_equal(saved.measurements, frame)
    assert str(saved.measurements["page_size"].dtype) == "Int64"
    table = pd.read_csv(saved.path / "measurements.csv")
    assert table["status"].tolist() == ["refused", "ok"]
    assert table["p50_ms"].isna().tolist() == [True, False]


def test_a_whole_run_reads_back(tmp_path: Path) -> None:
    saved = load_run(write_run(tmp_path))
    assert saved.path.parent == tmp_path / "page_sizes"
    assert [p.name for p in saved.path.parent.iterdir()] == [saved.path.name]  # nothing partial is left
    assert saved.config == {"name": "a", "pages": [16, 32], "folder": "data"}  # defaults written out
    assert saved.missing_columns == ()
    assert saved.manifest["experiment"] == "page_sizes"
    assert saved.manifest["started"] <= saved.manifest["finished"]
    on_disk = {p.relative_to(saved.path).as_posix() for p in saved.path.rglob("*") if p.is_file()}
    assert set(saved.manifest["files"]) == on_disk - {"manifest.json"}
    assert {"figures/latency.png", "figures/latency.svg", "measurements.csv"} < on_disk


def test_output_names_every_file_unless_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    assert capsys.readouterr().out == ""
    run = start_run("page_sizes", {}, tmp_path)
    run.figure(Figure(), "latency")
    final = run.finish()
    printed = capsys.readouterr().out
    assert f"wrote {run.path}/figures/latency.svg" in printed
    assert printed.endswith(f"finished {final}\n")
    assert final != path


@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("write", range(7))  # start, configuration, two tables, two pictures, manifest
def test_stopped_at_any_write_it_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, write: int
) -> None:
    written = []

    def fsync(fd: int) -> None:
        if len(written) == write:
            raise stop
        written.append(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(type(stop)):
        write_run(tmp_path)
    (folder,) = (tmp_path / "page_sizes").iterdir()
    assert folder.suffix == ".partial"
    assert not [p for p in folder.rglob("*") if p.suffix == ".part"]
    with pytest.raises(ValueError, match="never finished"):
        load_run(folder)
    assert not (folder / "manifest.json").exists()


def test_a_full_disk_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    run = start_run("page_sizes", {}, tmp_path, quiet=True)
    run.save(pd.DataFrame({"x": [1]}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a real write that stops half way
    try:
        with pytest.raises(OSError, match="File too large"):
            run.save(pd.DataFrame({"x": range(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pd.read_parquet(run.path / "measurements.parquet")["x"].tolist() == [1]
    assert {p.suffix for p in run.path.iterdir()} == {".json", ".yaml", ".parquet", ".csv"}


def test_a_manifest_in_a_partial_folder_is_not_enough(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with pytest.raises(ValueError, match="never finished"):
        load_run(path.rename(path.with_suffix(".partial")))
    with pytest.raises(ValueError, match="no such folder"):
        load_run(path)


def test_all_that_is_wrong_with_a_run_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / "config.yaml").unlink()
    (path / "measurements.csv").write_text("edited")
    with pytest.raises(ValueError, match=r"config.yaml is missing, measurements.csv has changed"):
        load_run(path)
    manifest = json.loads((path / "manifest.json").read_text())
    for name, wrong in (("schema_version", "2"), ("files", []), ("experiment", None), ("environment", {})):
        rest = {key: value for key, value in manifest.items() if key != name}
        (path / "manifest.json").write_text(json.dumps(rest if wrong is None else rest | {name: wrong}))
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            load_run(path)
    for damaged in (b'{"schema_version": 1', b"\xff\xfe"):
        (path / "manifest.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            load_run(path)


def test_a_newer_schema_is_refused_an_older_one_says_what_it_lacks(tmp_path: Path) -> None:
    run = start_run("page_sizes", {}, tmp_path, quiet=True)
    run.save(to_frame([row("ok")]).drop(columns=VERSION_2))
    path = run.finish()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 1}))
    assert set(load_run(path).missing_columns) == set(VERSION_2)
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 3}))
    with pytest.raises(ValueError, match="schema version 3, this recexp reads up to 2"):
        load_run(path)


def test_the_runs_of_the_gallery_can_be_read() -> None:
    folders = [path.parent for path in (ROOT / "results/gallery").glob("*/*/manifest.json")]
    assert folders
    for folder in folders:
        saved = load_run(folder)
        assert bool(saved.missing_columns) == (saved.manifest["schema_version"] < record.SCHEMA_VERSION)


def test_a_notebook_writes_into_the_run_of_its_command(tmp_path: Path) -> None:
    owner = start_run("page_sizes", {"seed": 0}, tmp_path, quiet=True)
    guest = start_run("page_sizes", {"seed": 1}, tmp_path / "elsewhere", run_dir=owner.path, quiet=True)
    guest.save(to_frame([row("ok")]))
    assert guest.finish() == owner.path
    assert owner.path.is_dir()
    assert yaml.safe_load((load_run(owner.finish()).path / "config.yaml").read_text()) == {"seed": 1}
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ValueError, match=r"no start\.json"):
        start_run("page_sizes", {}, run_dir=tmp_path)


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    runs = [start_run("page_sizes", {}, tmp_path, quiet=True) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    with pytest.raises(ValueError, match=r"\.\./x"):
        start_run("../x", {}, tmp_path)
    assert isinstance(runs[0], Run)


def test_environment_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment()
    assert here["versions"]["torch"].startswith("2.")
    assert here["cpu"]
    assert len(here["git_revision"]) == 40
    assert isinstance(here["git_clean"], bool)
    answers = {"nvidia-smi": "NVIDIA H200, 570.1, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W"}
    monkeypatch.setattr(record, "_output", lambda command, *rest: answers.get(command))
    there = environment()
    assert there["gpus"][0]["driver_version"] == "570.1"
    assert there["gpus"][0]["clocks.max.sm"] == "1980 MHz"
    assert there["git_revision"] is None
    assert there["git_clean"] is None


def test_every_column_is_explained() -> None:
    text = (ROOT / "results" / "README.md").read_text()
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(first_cells))) == set(COLUMNS)
