"""Who may import whom: data flows one way, and what is optional stays optional."""

import ast
import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).parents[1] / "recexp"
# Rooms of the package, lowest first: one may import those of lower tiers and those before it in its own tier.
TIERS = [
    ["registry", "config", "batch", "metadata", "devices", "parallel"],
    ["layers", "cache"],
    ["graphs", "checkpoint", "peer_checkpoint"],
    ["model"],
    ["train", "export"],
    ["experiments", "serving"],
    ["cli"],
]
APART = {("cache", "layers")}  # both know KVMetadata and a table, and not each other
ONLY = {"data": {"registry", "config", "batch"}}  # beside the tiers: what it may import
ABOVE_DATA = {"train", "export", "experiments", "serving", "cli"}  # and who may import it
OPTIONAL = ["fbgemm_gpu", "pynve", "ray", "triton", "tritonclient", "triton_python_backend_utils"]

ORDER = [room for tier in TIERS for room in tier]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> list[list[str]]:
    """Dotted names that a file imports, split: at its top, in a function, for type checkers only, anywhere."""
    inside = ["recexp", *path.relative_to(PACKAGE).parts[:-1]]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*inside[: len(inside) - node.level + 1], node.module or ""] if node.level else [node.module]
            )
            names += [f"{base.strip('.')}.{alias.name}" for alias in node.names]
    return [name.split(".") for name in names]


def imported_rooms(path: Path) -> set[str]:
    names = [name for name in imported_names(path) if name[0] == "recexp" and len(name) > 1]
    return {name[1] for name in names if name[1] != "__version__"}


def refusal(room: str, other: str) -> str | None:
    """Why a file of ``room`` may not import ``other``, or None."""
    if other == room:
        return None
    if room in ONLY:
        return None if other in ONLY[room] else f"{room} imports {', '.join(sorted(ONLY[room]))} only"
    if other == "data":
        return None if room in ABOVE_DATA else f"{room} lies below data"
    if other not in ORDER:
        return f"{other} has no place in the order"
    if (room, other) in APART:
        return "these do not know each other"
    return None if ORDER.index(other) < ORDER.index(room) else f"{other} does not lie below {room}"


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or not path.stem.startswith("__")]


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(PACKAGE).as_posix() for path in FILES])
def test_import_order(path: Path) -> None:
    room = room_of(path)
    assert room in ORDER or room in ONLY, f"{room} is new: give it its place in the order"
    refused = {other: refusal(room, other) for other in imported_rooms(path)}
    assert {other: why for other, why in refused.items() if why} == {}


def test_the_order_refuses() -> None:
    assert refusal("layers", "model") and refusal("cache", "layers") and refusal("layers", "cache")
    assert refusal("model", "data") and refusal("data", "layers") and refusal("config", "batch")
    assert refusal("train", "nowhere")
    assert not refusal("model", "layers") and not refusal("train", "data") and not refusal("batch", "config")


def test_the_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "layers" / "a.py"
    file.parent.mkdir()
    file.write_text("""
import recexp.cache.pages as pages, os
from recexp import model, __version__
def f():
    from ..config import load_config
    from .. import batch
    from . import b
""")
    assert imported_rooms(file) == {"cache", "model", "config", "batch", "layers"}


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    installs = packages_distributions()
    outside = {name[0] for path in PACKAGE.rglob("*.py") for name in imported_names(path)}
    outside -= {"recexp", *sys.stdlib_module_names, *OPTIONAL}
    undeclared = {n for n in outside if declared.isdisjoint(map(canonicalize_name, installs.get(n, [])))}
    assert undeclared == set()


def test_imports_without_optional_packages() -> None:
    """A Mac has no fbgemm and no Triton: the package and its command line load all the same."""
    code = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it raises ImportError
import recexp, recexp.layers, recexp.experiments, recexp.cli
recexp.RankingModel, recexp.SequenceBatch, recexp.load_config
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PACKAGES = [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))]


@pytest.mark.parametrize("folder", PACKAGES, ids=[path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGES])
def test_no_package_hides_a_module_of_its_own(folder: Path) -> None:
    """A name in its __init__ that is a module's too would be what ``import package.module as m`` gives."""
    package = importlib.import_module(".".join(folder.relative_to(PACKAGE.parent).parts))
    names = {path.stem for path in folder.iterdir()} & set(vars(package))
    assert [name for name in names if not isinstance(getattr(package, name), ModuleType)] == []
