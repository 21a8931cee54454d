"""pyproject.toml, environment.yml and the constraints files say the same."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
CONDA_NAMES = {"python-build": "build"}  # conda-forge's name: the package index's
FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}


def comparable(requirements: list[Requirement]) -> set[tuple[str, str, str]]:
    """Name, versions and marker of each."""
    return {(canonicalize_name(r.name), str(r.specifier), str(r.marker or "")) for r in requirements}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    matches = [re.fullmatch(r"([a-z0-9-]+)==([^=\s]+)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names)), "pip refuses two pins of one package"
    return dict(match.groups() for match in matches if match)


CPU = pins("constraints.txt")
GPU = pins("constraints-gpu.txt")


def test_conda_environment_equals_pyproject() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [Requirement(line) for line in listed if isinstance(line, str)]
    (from_pip,) = (entry["pip"] for entry in listed if isinstance(entry, dict))
    for requirement in conda:
        requirement.name = CONDA_NAMES.get(requirement.name, requirement.name)
    assert comparable([r for r in conda if r.name == "python"]) == {("python", PROJECT["requires-python"], "")}
    assert "-e ." in from_pip
    conda = [r for r in conda if r.name not in ("python", "pip")]
    both = comparable(conda + [Requirement(line) for line in from_pip if line != "-e ."])
    assert both == comparable(CORE + EXTRAS["cpu"] + EXTRAS["lab"] + EXTRAS["dev"])


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_every_direct_dependency_is_pinned_in_its_range(accelerator: str) -> None:
    versions = CPU if accelerator == "cpu" else CPU | GPU
    other = "gpu" if accelerator == "cpu" else "cpu"
    direct = CORE + [r for extra, requirements in EXTRAS.items() if extra != other for r in requirements]
    wrong = {r.name: versions.get(canonicalize_name(r.name)) for r in direct}
    wrong = {r.name: wrong[r.name] for r in direct if wrong[r.name] is None or not r.specifier.contains(wrong[r.name])}
    assert wrong == {}


def test_fbgemm_goes_with_torch() -> None:
    for torch, fbgemm in ((CPU["torch"], CPU["fbgemm-gpu-cpu"]), (GPU["torch"], GPU["fbgemm-gpu"])):
        assert FBGEMM_OF_TORCH[torch.rpartition(".")[0]] == fbgemm.rpartition(".")[0]


def test_ranges_hold_exactly_the_known_pairs() -> None:
    (torch,) = (r.specifier for r in CORE if r.name == "torch")
    minors = [f"2.{minor}" for minor in range(8, 20)]
    assert [minor for minor in minors if torch.contains(f"{minor}.0")] == list(FBGEMM_OF_TORCH)
    for fbgemm in (EXTRAS["cpu"][0].specifier, EXTRAS["gpu"][0].specifier):
        held = [f"1.{minor}" for minor in range(12) if fbgemm.contains(f"1.{minor}.0")]
        assert held == list(FBGEMM_OF_TORCH.values())


@pytest.mark.parametrize(
    ("platform", "machine", "fbgemm", "triton"),
    [
        ("linux", "x86_64", True, True),
        ("linux", "aarch64", False, True),
        ("darwin", "arm64", False, False),
        ("win32", "AMD64", False, False),
    ],
)
def test_other_machines_are_not_asked_for_what_they_lack(
    platform: str, machine: str, fbgemm: bool, triton: bool
) -> None:
    here = dict(default_environment()) | {"sys_platform": platform, "platform_machine": machine}
    asked = {r.name for name in ("cpu", "gpu", "dev") for r in EXTRAS[name] if not r.marker or r.marker.evaluate(here)}
    assert ("fbgemm-gpu-cpu" in asked, "fbgemm-gpu" in asked, "triton" in asked) == (fbgemm, fbgemm, triton)
