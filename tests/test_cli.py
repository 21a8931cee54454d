"""The command line: versions, lists, exit codes 2 for bad input and 1 for a failed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from recexp import __version__, cli

ROOT = Path(__file__).parents[1]
QUICK = ROOT / "configs/experiments/compare_backbones_quick.yaml"


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


def test_a_failed_run_is_exit_code_1_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [nbformat.v4.new_code_cell('config = ""\nrun_dir = ""\nquiet = True', metadata={"tags": ["parameters"]})]
    cells.append(nbformat.v4.new_code_cell("1 / 0"))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "broken.ipynb")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", str(QUICK), "--set", "notebook=broken.ipynb", "--quiet") == 1
    err = capsys.readouterr().err
    assert "cell [3]" in err and "ZeroDivisionError" in err
    assert [p.suffix for p in (tmp_path / "results/compare_backbones").iterdir()] == [".partial"]
