"""The wheel: built, installed away from the checkout and run there."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import recexp

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def run(command: list[str], **kwargs: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was installed; neither step needs a network or writes to the checkout."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    shutil.copytree(ROOT / "recexp", source / "recexp", ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "recexp" / "serving" / "templates").mkdir(parents=True, exist_ok=True)
    (source / "recexp" / "serving" / "templates" / "probe.pbtxt").write_text("a file that is not Python\n")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)])
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--target", str(folder / "target"), str(wheel)])
    return folder / "target"


def test_the_wheel_holds_every_file_of_the_package(installed: Path) -> None:
    expected = {p.relative_to(ROOT) for p in (ROOT / "recexp").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    found = {p.relative_to(installed) for p in (installed / "recexp").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert found == expected | {Path("recexp/serving/templates/probe.pbtxt")}


def test_the_wheel_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    """-I and an own sys.path: neither the checkout nor its editable installation can step in."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import recexp; print(recexp.__file__, recexp.__version__)"
    )
    file, version = run([sys.executable, "-I", "-c", code], cwd=tmp_path).rsplit(maxsplit=1)
    assert Path(file).is_relative_to(installed)
    code = f"import sys, runpy; sys.path.insert(0, {str(installed)!r}); sys.argv[1:] = ['--version'];"
    printed = run([sys.executable, "-I", "-c", code + "runpy.run_module('recexp', run_name='__main__')"], cwd=tmp_path)
    assert version in printed.split()


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert recexp.__version__ == project["version"] == citation["version"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
    assert project["license"] == citation["license"] == "Apache-2.0"
