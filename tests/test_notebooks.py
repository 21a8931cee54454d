"""Every notebook and its paired script say the same, and every one takes the parameters that `recexp run` passes."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import papermill
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[tuple[str, str, list[str]]]:
    node = jupytext.read(path)
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in node.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_pair_agrees(path: Path) -> None:
    assert cells(path) == cells(path.with_suffix(".py"))
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_of_run_are_known(path: Path) -> None:
    assert {"config", "run_dir", "quiet"} <= set(papermill.inspect_notebook(str(path)))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS and {p.stem for p in NOTEBOOKS} == {p.stem for p in (ROOT / "notebooks").glob("*.py")}
