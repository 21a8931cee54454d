import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

from recexp.experiments.report import NotebookError, execute

SHOW_PYTHON = "import sys\nprint('python', sys.executable)"
DRAW = """import pandas as pd
from recexp.experiments.backbone_figures import plot_sizes
plot_sizes(pd.DataFrame({"model": ["a"], "parameters": [rows]}))"""


def notebook(folder: Path, *cells: str) -> Path:
    """A notebook with the parameters rows and results_dir, and these cells."""
    parameters = nbformat.v4.new_code_cell("rows = 2\nresults_dir = ''", metadata={"tags": ["parameters"]})
    node = nbformat.v4.new_notebook(cells=[parameters, *map(nbformat.v4.new_code_cell, cells)])
    node.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(node, folder / "story.ipynb")
    return folder / "story.ipynb"


@pytest.fixture
def foreign_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel specification python3 in the user's folder that points to another interpreter."""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    kernel = {"argv": ["/nonexistent/python", "-f", "{connection_file}"], "language": "python", "display_name": "x"}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))


@pytest.mark.usefixtures("foreign_kernel")
def test_executes_in_this_python_and_reports_without_the_network(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    story = notebook(tmp_path, SHOW_PYTHON, "print('rows', rows)", "import warnings\nwarnings.warn('w')", DRAW)
    before = story.read_bytes()
    run = tmp_path / "run"
    run.mkdir()
    report = execute(story, {"rows": 7, "results_dir": str(run)}, run, quiet=True)
    assert capfd.readouterr() == ("", "")  # nothing, neither from here nor from the kernel
    html = report.read_text()
    assert report == run / "report.html"
    assert f"python {sys.executable}" in html
    assert str(run) not in html + (run / "notebook.ipynb").read_text()  # where a run lay is nobody's business
    assert "rows 7" in html and "UserWarning" not in html
    assert "In&nbsp;[" not in html
    assert len(re.findall(r'<img [^>]*src="data:image/png;base64,', html)) == 1
    assert "<script" not in html
    assert not re.findall(r"""<(?:link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""", html)
    assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", html)
    assert story.read_bytes() == before
    executed = nbformat.read(run / "notebook.ipynb", as_version=4)
    nbformat.validate(executed)
    assert "papermill" not in executed.metadata
    assert all(set(cell.metadata) <= {"tags"} for cell in executed.cells)
    assert executed.metadata.kernelspec.name == "python3"


def test_unknown_parameters_are_refused_before_anything_runs(tmp_path: Path) -> None:
    story = notebook(tmp_path, "raise SystemExit")
    with pytest.raises(ValueError, match=r"story.ipynb has no parameter 'row'; did you mean 'rows'\?"):
        execute(story, {"row": 7}, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_error_names_its_cell_and_leaves_the_notebook_so_far(tmp_path: Path) -> None:
    story = notebook(
        tmp_path, "print('reached')", "limit = 3\nraise ValueError(f'page size {rows} above {limit}')", "1"
    )
    with pytest.raises(NotebookError, match=r"'limit = 3', failed: ValueError: page size 9 above 3") as caught:
        execute(story, {"rows": 9}, tmp_path, quiet=True)
    assert str(caught.value).startswith(f"cell [4] of {tmp_path}/notebook.ipynb")
    (failed,) = [c for c in nbformat.read(tmp_path / "notebook.ipynb", 4).cells if c.get("execution_count") == 4]
    assert failed.source.startswith("limit = 3")
    assert "reached" in (tmp_path / "notebook.ipynb").read_text()
    assert not (tmp_path / "report.html").exists()


def test_a_kernel_that_dies_is_an_error(tmp_path: Path) -> None:
    story = notebook(tmp_path, "import os\nos._exit(9)")
    with pytest.raises(NotebookError, match=r"the kernel died.*notebook\.ipynb"):
        execute(story, {}, tmp_path, quiet=True)
    assert (tmp_path / "notebook.ipynb").exists()
    assert not (tmp_path / "report.html").exists()


def test_braces_in_a_path_are_no_parameters(tmp_path: Path) -> None:
    (folder := tmp_path / "{rows} {").mkdir()
    assert execute(notebook(folder, "print('rows', rows)"), {"rows": 5}, folder, quiet=True) == folder / "report.html"
    assert "rows 5" in (folder / "report.html").read_text()
