"""examples/cpp: built by CMake against the installed torch, it serves packages and notices wrong logits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recexp import RankingModel, SequenceBatch
from recexp.export.package import Package, save_calls

SOURCE = Path(__file__).parents[1] / "examples" / "cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("cmake", "c++"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("cpp")
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE=Debug"]  # compiles faster
    for command in (["cmake", "-S", str(SOURCE), "-B", str(folder), *options], ["cmake", "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "serve_package"


def batch_of(num_pairs: list[int]) -> SequenceBatch:
    items = [[(7 * row + 3 * i) % 50 for i in range(n)] for row, n in enumerate(num_pairs)]
    actions = [[(row + i) % 6 for i in range(n)] for row, n in enumerate(num_pairs)]
    context = {"age": list(range(len(num_pairs)))}
    return SequenceBatch.from_lists([5, 6, 7], items, actions, [[1, 2], [], [3, 4, 5]], context)


def serve(program: Path, package: Path, calls: Path, *limit: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), str(package), str(calls), *limit], capture_output=True, text=True)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("backbone", ["hstu", "transformer"])
def test_it_gives_the_saved_logits(
    backbone: str, page_size: int, program: Path, exported: Callable[[str, int], Path], tmp_path: Path
) -> None:
    folder, calls = exported(backbone, page_size), tmp_path / "calls.pt"
    package, batches = (
        Package.load(folder / "model.pt2"),
        [batch_of([2, 0, 4]), batch_of([5, 1, 4]), batch_of([9, 1, 7])],
    )
    if page_size:  # three visits, each of which continues what is cached
        cache = RankingModel.load(folder / "model").make_cache(num_pages=40, page_size=page_size)
        save_calls(package, calls, lambda: [package.predict_cached(b, cache) for b in batches], cache.tables)
    else:
        save_calls(package, calls, lambda: [package.predict(b) for b in batches])
    done = serve(program, folder / "model.pt2", calls)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 candidates, relative difference") == 3 and "WRONG" not in done.stdout

    saved = torch.load(calls)
    saved["calls"][-1][1][0, 0] += 1e-3
    torch.save(saved, calls)
    done = serve(program, folder / "model.pt2", calls)
    assert done.returncode == 1 and [" WRONG" in line for line in done.stdout.splitlines()] == [False, False, True]


def test_no_candidates_and_no_calls(program: Path, exported: Callable[[str, int], Path], tmp_path: Path) -> None:
    folder, calls = exported("hstu", 0), tmp_path / "calls.pt"
    package = Package.load(folder / "model.pt2")
    nobody = SequenceBatch.from_lists([5], [[1]], [[2]], [[]], {"age": [0]})
    save_calls(package, calls, lambda: package.predict(nobody))
    done = serve(program, folder / "model.pt2", calls)
    assert (done.returncode, done.stdout) == (0, "call 1: 0 candidates, relative difference 0\n")
    for limit in ("none", "1e-5x", "-1", "nan"):
        done = serve(program, folder / "model.pt2", calls, limit)
        assert done.returncode == 2 and done.stderr.startswith("usage: ") and not done.stdout
    torch.save({"tables": [], "calls": []}, calls)  # nothing compared is not all equal
    done = serve(program, folder / "model.pt2", calls)
    assert (done.returncode, done.stderr) == (2, f"serve_package: no calls in {calls}\n")


def test_what_it_cannot_run_is_an_error(program: Path, exported: Callable[[str, int], Path], tmp_path: Path) -> None:
    package = exported("hstu", 0) / "model.pt2"
    assert (
        serve(program, package, tmp_path / "absent.pt").stderr == f"serve_package: cannot read {tmp_path}/absent.pt\n"
    )
    torch.save({"tables": [], "calls": [([torch.zeros(1)], torch.zeros(1))]}, tmp_path / "few.pt")
    assert serve(program, package, tmp_path / "few.pt").returncode == 2
    for calls in ([([], torch.zeros(1))], [()], [torch.zeros(1)], 5):  # damaged, with a table to put among the inputs
        torch.save({"tables": [torch.zeros(1)], "calls": calls}, tmp_path / "odd.pt")
        done = serve(program, package, tmp_path / "odd.pt")
        assert done.returncode == 2 and done.stderr.startswith("serve_package: ")
    (tmp_path / "text.pt2").write_text("no package")
    done = serve(program, tmp_path / "text.pt2", tmp_path / "few.pt")
    assert done.returncode == 2 and done.stderr.startswith("serve_package: ")
