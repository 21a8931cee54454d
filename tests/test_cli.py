"""The command line: versions, lists, exit codes 2 for bad input and 1 for a failed run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
import torch
import yaml

from recexp import __version__, cli, load_config
from recexp.experiments.record import start_run, to_frame
from recexp.experiments.workers import hold

ROOT = Path(__file__).parents[1]
QUICK = ROOT / "configs/experiments/compare_backbones_quick.yaml"
PAGES = ROOT / "configs/experiments/page_sizes_quick.yaml"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["recexp", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "recexp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"recexp {__version__}\n"


def test_list_and_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert call(monkeypatch, "list") == 0
    out = capsys.readouterr().out
    assert (
        "configs/experiments/compare_backbones.yaml" in out
        and all(name in out for name in ("hstu", "transformer"))
        and "reference" in out
    )
    assert call(monkeypatch, "devices") == 0
    out = capsys.readouterr().out
    assert "CPU (" in out and "padded" in out and "yes" in out
    assert call(monkeypatch, "devices", "--assume", "sm100") == 0
    out = capsys.readouterr().out
    assert "B200" in out and "pages of 128" in out and "unverified on hardware" in out
    assert call(monkeypatch, "devices", "--assume", "hopper") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no_such.yaml"], "no configuration file no_such.yaml"),
        (["run", str(ROOT / "configs/models/hstu_small.yaml")], "describes a model; an experiment is needed"),
        (["run", str(QUICK), "--set", "models.hstu.backbone=hsut"], "unknown backbone 'hsut'; did you mean 'hstu'"),
        (["run", str(QUICK), "--set", "models.hstu.attention_backend=x"], "unknown attention backend 'x'"),
        (["run", str(QUICK), "--set", "measure.min_run=3"], "did you mean 'min_runs'"),
        (["run", str(QUICK), "--set", "device=cuda:9"], "device 'cuda:9' asked for, and this machine has"),
        (["run", str(QUICK), "--set", "device=gpu"], "is not a device; use auto, cpu, cuda or cuda:N"),
        (["run", str(QUICK), "--set", "notebook=notebooks/none.ipynb"], "no notebooks/none.ipynb in"),
        (["run", str(QUICK), "--set", "device=mps"], "device 'mps' is not supported"),
        (["run", str(QUICK), "--set", "models.hstu.num_items=10"], "--set models.hstu.num_items=60"),
        (["run", str(QUICK), "--set", "models.hstu.num_tasks=3"], "num_tasks is 3 for 2 data.tasks"),
        (["run", str(QUICK), "--set", "models.hstu.max_candidates=2"], "max_candidates 2 is below the 10"),
        (["run", str(QUICK), "--set", "measure.history_pairs=[30]"], "measure.history_pairs has 30"),
        (["run", str(QUICK), "--set", "data={dataset: movielens, folder: none}"], "none"),
        (["run", str(QUICK), "--set", "data.synthetic.length_quantiles=[3]"], "users need 4 interactions"),
        (["run", str(QUICK), "--set", "models={random: {num_items: 60}}"], "models.random"),
        (["run", str(QUICK), "--results", str(QUICK)], "is a file; name a folder"),
        (["data", "fetch", "ml-1m"], "data set 'ml-1m' cannot be fetched"),
        (["run", str(QUICK), "--dry-run"], "has no sweep"),
        (["run", str(QUICK), "--engine", "ray"], "sweep.point"),
        (["run", str(QUICK), "--resume", "none.partial"], "no configuration file none.partial/config.yaml"),
        (["rerun", "none"], "none is not a whole run"),
        (["run", str(PAGES), "--set", "sweep.grid.page_size=[9223372036854775808]"], "less than 9223372036854775808"),
        (["run", str(PAGES), "--dry-run", "--set", "sweep.devices=[gpu]"], "'gpu' is not a device"),
        (["run", str(PAGES), "--dry-run", "--set", "sweep.devices=['cpu:-1']"], "'cpu:-1' is not a device"),
        (["seeds", str(QUICK), "--set", "data.dataset=movielens"], "needs folder"),
    ],
)
def test_bad_input_is_exit_code_2_and_writes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_option_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "run", "--sett") == 2


PARAMETERS = 'config = ""\nrun_dir = ""\nquiet = True'


def write_story(folder: Path, cell: str, parameters: str = PARAMETERS) -> Path:
    """An experiment whose notebook is one cell; returns its configuration."""
    cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells.append(nbformat.v4.new_code_cell(cell))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "story.ipynb")
    values = {"kind": "experiment", "name": "story", "notebook": "story.ipynb", "models": {"m": {"num_items": 5}}}
    (folder / "story.yaml").write_text(yaml.safe_dump(values))
    return folder / "story.yaml"


def test_a_failed_run_is_exit_code_1_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_story(tmp_path, "1 / 0")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", str(config), "--quiet") == 1
    err = capsys.readouterr().err
    assert "cell [3]" in err and "ZeroDivisionError" in err
    assert [p.suffix for p in (tmp_path / "results/story").iterdir()] == [".partial"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x = 1\ndeff y", "SyntaxError: invalid syntax (story.ipynb, cell 2 (tagged backbone), line 2)"),
        ("\nnothing", "NameError: name 'nothing' is not defined (story.ipynb, cell 2 (tagged backbone), line 2)"),
        ("import json\njson.loads('')", "(story.ipynb, cell 2 (tagged backbone), line 2)"),
        ("raise SystemExit(0)", "SystemExit: 0 (story.ipynb, cell 2 (tagged backbone), line 1)"),
        ("x = 1", "unknown backbone 'mine'; known: "),
    ],
)
def test_a_backbone_of_ones_own_that_fails_is_told_with_its_line(
    cell: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_story(tmp_path, cell)
    story = nbformat.read(tmp_path / "story.ipynb", as_version=4)
    story.cells[1].metadata["tags"] = ["backbone"]
    nbformat.write(story, tmp_path / "story.ipynb")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", str(config), "--set", "models.m.backbone=mine") == 2
    assert message in capsys.readouterr().err
    assert not Path("results").exists()


def test_a_notebook_that_cannot_be_told_its_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_story(tmp_path, "1", parameters='config = ""\nrundir = ""')
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", str(config)) == 2
    assert "no parameter 'run_dir'; did you mean 'rundir'" in capsys.readouterr().err
    assert not Path("results").exists()


def test_a_run_holds_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_story(tmp_path, "1 / 0")
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RECEXP_WAIT", "0.1")
    with hold("cpu"):
        assert call(monkeypatch, "run", str(config), "--set", "device=cpu", "--results", str(tmp_path / "runs")) == 1
    assert f"cpu is held by process {os.getpid()} after 0.1 s" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_rerun_repeats_a_run_and_says_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write_story(tmp_path, "print(7 * 191)"), ["device=cpu"])
    monkeypatch.chdir(tmp_path)
    run = start_run("story", config, "old", quiet=True)
    run.save(to_frame([]))
    saved = run.finish()
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["environment"]["versions"]["torch"] = "1.0"
    (saved / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert call(monkeypatch, "rerun", str(saved), "--quiet") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["before", "now"]
    assert table[1].split() == ["versions.torch", "1.0", version("torch")]
    (again,) = (tmp_path / "results/story").iterdir()
    assert (again / "config.yaml").read_text() == (saved / "config.yaml").read_text()
    assert "1337" in (again / "report.html").read_text()


def test_rerun_of_an_older_schema_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a value is not known any more."""
    saved = tmp_path / "older"
    shutil.copytree(ROOT / "results/gallery/embedding_cache/cpu", saved)
    config, manifest = saved / "config.yaml", json.loads((saved / "manifest.json").read_text())
    config.write_text(config.read_text() + "dtypes: [float32]\n")
    stamp = {"bytes": config.stat().st_size, "sha256": hashlib.sha256(config.read_bytes()).hexdigest()}
    manifest |= {"schema_version": 1, "files": {**manifest["files"], "config.yaml": stamp}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert call(monkeypatch, "rerun", str(saved)) == 2
    err = capsys.readouterr().err
    assert "unknown key 'dtypes'" in err and f"git revision {manifest['environment']['git_revision']}" in err


def test_dry_run_counts_a_device_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "run", str(PAGES), "--dry-run", "--set", "sweep.devices=[cpu, cpu]") == 0
    assert "40 points, 16 refused by cpu; 1 at a time\n" in capsys.readouterr().out


def test_dry_run_for_an_assumed_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CUDA configuration, on any machine: FBGEMM's pages on a B200 are of 128 tokens."""
    monkeypatch.chdir(tmp_path)
    grid = "sweep.grid={backend: [fbgemm, triton], page_size: [64, 128]}"
    sweep = ["--set", "sweep.point=page_size", "--set", grid, "--set", "sweep.base.cached_tokens=100"]
    sweep += ["--set", "sweep.devices=[cuda:0, cuda:1]", "--set", "sweep.seconds_per_point=50"]
    arguments = ["run", str(write_story(tmp_path, "")), "--set", "device=cuda:0", *sweep, "--dry-run"]
    (tmp_path / "results/story/1").mkdir(parents=True)
    entry = {"point": {}, "seconds": 20.0, "row": {}}
    (tmp_path / "results/story/1/points.jsonl").write_text(json.dumps(entry) + "\n")
    assert call(monkeypatch, *arguments, "--assume", "sm100") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=3)[1:] == ["fbgemm", "64", "page_size 64 is not (128,)"]
    assert [line.split()[1:] for line in lines[2:5]] == [["fbgemm", "128"], ["triton", "64"], ["triton", "128"]]
    assert lines[5] == "4 points, 1 refused by sm100; 2 at a time"
    assert lines[6] == "time: about 0:00:30 as in results/story/1/points.jsonl, at most 0:01:15"
    assert call(monkeypatch, *arguments) == 0
    assert "4 points, 0 refused" in capsys.readouterr().out or torch.cuda.is_available()
