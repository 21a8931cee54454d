"""The attention kernels against float64: on a GPU natively, without one the plain kernel under Triton's interpreter."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import Case, make_case, relative

from recexp.layers.attention import AttentionRequest, attend, refusal
from recexp.layers.backends.reference import attend_reference
from recexp.layers.kernels.tiles import Tiles

plain = pytest.importorskip("recexp.layers.backends.triton", exc_type=ImportError)
gluon = pytest.importorskip("recexp.layers.backends.gluon", exc_type=ImportError)
if not plain.AVAILABLE:
    pytest.skip("Triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SM90 = GPU and torch.cuda.get_device_capability() == (9, 0) and gluon.WHY_NOT is None
SMALL = Tiles(32, 32, 4, 1)
HALF = torch.float16  # the interpreter multiplies no bfloat16
HERE = Path(__file__).parent


def poisoned_launch(monkeypatch: pytest.MonkeyPatch, module, case: Case, weighting: str, **options) -> torch.Tensor:
    """The kernel's result when every buffer it writes to held NaN before."""
    real = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: real(*args, **kwargs).fill_(math.nan))
        return module.launch(case.call(weighting), **options).merged()


def plain_error(case: Case, weighting: str, truth: torch.Tensor) -> float:
    """What the reference backend's error is in the case's own dtype."""
    return relative(attend_reference(case.call(weighting)), truth)


def check(monkeypatch: pytest.MonkeyPatch, module, case: Case, weighting: str, **options) -> None:
    truth = case.truth(weighting)
    limit = 1e-5 if case.q.dtype == torch.float32 else 2 * plain_error(case, weighting, truth)
    assert relative(poisoned_launch(monkeypatch, module, case, weighting, **options), truth) <= limit


def edges(page_size: int | None, **options) -> Case:
    """Lengths at a page's and a tile's edges, users without history, without candidates, without anything."""
    p = page_size or 32
    histories = [p + 1, 0, 1, p - 1, 0, p, 70]
    new = [min(3, p + 1), 0, 1, p - 1, 0, 0, 40]
    return make_case(histories, new, [2, 3, 0, 4, 0, 1, 33], 2, page_size=page_size, device=DEVICE, **options)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
@pytest.mark.parametrize(("page_size", "splits"), [(None, 1), (1, 1), (7, 3), (16, 1), (32, 1), (64, 3)])
def test_edges_of_pages_and_tiles(monkeypatch, page_size, splits, weighting):
    check(monkeypatch, plain, edges(page_size, dim=32), weighting, tiles=SMALL, splits=splits)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
@pytest.mark.parametrize("dim", [1, 24, 50, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_head_dims_and_dtypes(monkeypatch, dtype, dim, weighting):
    check(monkeypatch, plain, make_case([37, 5], [9, 5], [3, 2], 1, dim, 16, dtype, DEVICE), weighting)


def test_more_splits_than_key_blocks(monkeypatch):
    check(
        monkeypatch,
        plain,
        make_case([70, 1], [2, 1], [1, 3], 1, 32, 16, device=DEVICE),
        "softmax",
        tiles=SMALL,
        splits=5,
    )


def test_many_users_of_zipf_lengths(monkeypatch):
    lengths = np.minimum(np.random.default_rng(0).zipf(1.5, 60), 90).tolist()
    case = make_case(lengths, [n // 2 for n in lengths], [n % 3 for n in lengths], 1, 32, 8, device=DEVICE)
    check(monkeypatch, plain, case, "silu", tiles=SMALL)


@pytest.mark.parametrize("name", ["ragged", "empty", "one"])
@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_expected_values(name, weighting):
    with np.load(HERE.parent / f"oracles/attention_{name}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]).to(DEVICE) for key in file.files}
    q, k, v = (arrays[key].float() for key in ("q", "k", "v"))
    lengths = (arrays["seq_offsets"].int(), arrays["num_candidates"].int())
    settings = {"alpha": float(arrays["alpha"]), "scaling_seqlen": float(arrays["scaling_seqlen"])}
    out = attend(q, k, v, *lengths, weighting=weighting, backend="triton", **settings)
    assert relative(out, arrays[weighting]) <= 1e-5


@pytest.mark.parametrize(("splits", "weighting"), [(1, "silu"), (2, "softmax")])
def test_rows_behind_the_last_user_become_zero(monkeypatch, splits, weighting):
    case = make_case([20, 30], [20, 2], [3, 1], 1, 32, 8, device=DEVICE)
    used, pad = len(case.q), 50
    truth = case.truth(weighting)
    case.q, case.k, case.v = (
        torch.cat([x, torch.full_like(x[:1], math.nan).expand(pad, -1, -1)]) for x in (case.q, case.k, case.v)
    )
    out = poisoned_launch(monkeypatch, plain, case, weighting, tiles=SMALL, splits=splits)
    assert relative(out[:used], truth) <= 1e-5
    assert (out[used:] == 0).all()


def test_pages_beyond_two_to_the_31_elements(monkeypatch):
    case = make_case([100], [20], [5], 2, 64, 32, HALF, DEVICE)
    truth = case.truth("silu")
    table, metadata = case.kv
    num_pages = 2**31 // table[0].numel() + 2 * len(table)
    far = torch.empty((num_pages, *table.shape[1:]), dtype=HALF, device=DEVICE)
    far[-len(table) :] = table
    metadata.kv_indices.add_(num_pages - len(table))
    limit = 2 * plain_error(case := Case(**{**vars(case), "kv": (far, metadata)}), "silu", truth)
    assert relative(poisoned_launch(monkeypatch, plain, case, "silu", tiles=SMALL), truth) <= limit


def test_no_tokens():
    case = make_case([0, 0], None, [0, 0], 2, 32, None, device=DEVICE)
    assert attend(*case.args, weighting="softmax", alpha=1.0, backend="triton").shape == (0, 2, 32)


def test_refuses_what_it_cannot_do():
    case = make_case([5], None, [2], 2, 32, None, device=DEVICE)
    swapped = case.q.transpose(0, 1).contiguous().transpose(0, 1)  # a token's heads lie apart
    with pytest.raises(ValueError, match="heads must lie side by side"):
        attend(swapped, *case.args[1:], weighting="softmax", alpha=1.0, backend="triton")
    for change, reason in [({"dtype": torch.float64}, "float64"), ({"head_dim": 512}, "256 or less")]:
        request = {
            "weighting": "silu",
            "device": torch.device(DEVICE),
            "dtype": torch.float32,
            "num_heads": 1,
            "head_dim": 64,
        }
        assert reason in refusal("triton", AttentionRequest(**{**request, **change}))
    assert refusal("gluon", AttentionRequest("silu", torch.device("cpu"), torch.bfloat16, 8, 128)) is not None


def compile_for(sm: int, *options: str, triton_path: Path | None = None) -> list[dict]:
    command = [sys.executable, str(HERE / "aot.py"), str(sm), *options]
    environment = os.environ | ({"PYTHONPATH": str(triton_path)} if triton_path else {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_compiled(rows: list[dict], version: str = plain.triton.__version__) -> None:
    assert all(row["shared"] <= row["shared_limit"] for row in rows)
    for row in rows:
        must_not_spill = row["kernel"] == "attention_sm90" or (row["kernel"] == "attention" and row["head_dim"] <= 128)
        if row["sm"] == 90 and row["dtype"] != "float32" and must_not_spill:
            few = 16 if version >= "3.8" or row["page_size"] == 8 else 0  # later ones spill a little, so do tiny pages
            assert row["stack"] <= few, row


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_compiles_without_a_gpu(sm):
    rows = compile_for(sm)
    check_compiled(rows)
    compiled = Counter(row["kernel"] for row in rows)
    assert compiled["attention"] >= 1 and compiled["merge_splits"] >= 1
    assert compiled["look_at_keys"] == 2 and compiled["copy_rows"] == 1
    assert (compiled["attention_sm90"] >= 2) == (sm == 90 and gluon.WHY_NOT is None)


@pytest.mark.parametrize(("version", "others"), [("3.7.1", [80]), ("3.8.0", [100]), ("3.9.0", [120])])
def test_compiles_on_every_triton_of_the_range(version, others, tmp_path):
    """Those beside the installed one, each installed for this test alone; SM90 on all, the other SMs in turn."""
    options = ["--quiet", "--no-deps", "--target", str(tmp_path), f"triton=={version}"]
    for _ in range(3):  # the one download of a test that is large enough to break off
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True)
        if not done.returncode:
            break
    assert not done.returncode, done.stderr
    with ThreadPoolExecutor() as pool:  # each waits for a process
        compiled = pool.map(partial(compile_for, triton_path=tmp_path), (90, *others))
    for rows in compiled:
        check_compiled(rows, version)
        kernels = {row["kernel"] for row in rows}
        assert {"attention", "merge_splits", "projection", "look_at_keys", "copy_rows"} <= kernels
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_every_variant_compiles_without_a_gpu(sm):
    rows = compile_for(sm, "full")
    check_compiled(rows)
    for row in rows:
        if row["stack"]:
            print(f"spills {row['stack']} bytes: {row}")


# What follows needs the device.


@pytest.mark.gpu
@pytest.mark.parametrize("weighting", ["silu", "softmax"])
@pytest.mark.parametrize("page_size", [None, 1, 8, 16, 24, 32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_native(monkeypatch, backend, dtype, dim, page_size, weighting):
    module = gluon if backend == "gluon" else plain
    p = page_size or 64
    histories = [p + 1, 0, 1, p - 1, 0, p, 70, 1000, 650]
    new = [min(3, p + 1), 0, 1, p - 1, 0, 0, 40, 300, 0]
    case = make_case(histories, new, [2, 3, 0, 4, 0, 1, 33, 70, 257], 2, dim, page_size, dtype, DEVICE)
    request = AttentionRequest(weighting, torch.device(DEVICE), dtype, 2, dim, page_size)
    if reason := refusal(backend, request):
        pytest.skip(reason)
    for splits in (1, 3):
        check(monkeypatch, module, case, weighting, splits=splits)
        first = poisoned_launch(monkeypatch, module, case, weighting, splits=splits)
        assert torch.equal(first, poisoned_launch(monkeypatch, module, case, weighting, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("users", [64, 512, 4096])
def test_native_many_users(monkeypatch, backend, users):
    module = gluon if backend == "gluon" else plain
    lengths = np.minimum(np.random.default_rng(0).zipf(1.3, users), 3000).tolist()
    case = make_case(lengths, [n // 2 for n in lengths], [n % 7 for n in lengths], 2, 64, 16, torch.bfloat16, DEVICE)
    check(monkeypatch, module, case, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_native_hundred_thousand_pages(monkeypatch, backend):
    module = gluon if backend == "gluon" else plain
    case = make_case([100, 900], [20, 100], [5, 60], 4, 128, 64, torch.bfloat16, DEVICE, spare_pages=100_000)
    check(monkeypatch, module, case, "softmax")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("page_size", [None, 64])
def test_native_graph_serves_other_lengths(backend, page_size):
    """One capture; then other users, histories and candidates of the same number of rows, and fewer, through it."""
    options = {"weighting": "silu", "alpha": 0.1, "scaling_seqlen": 500.0, "backend": backend}
    cases = [
        make_case(h, n, c, 2, 128, page_size, torch.bfloat16, DEVICE, spare_pages=s)
        for h, n, c, s in [
            ([150, 150, 100], [150, 150, 100], [50, 20, 30], 6 + 1),
            ([400, 0, 0], [400, 0, 0], [50, 50, 0], 6),
            ([7, 90, 3], [7, 90, 3], [0, 41, 1], 9),
        ]
    ]
    static = cases[0]
    capacity = max(len(case.q) for case in cases)
    assert len(static.q) == capacity
    if page_size:
        assert all(len(case.kv[1].kv_indices) <= 8 for case in cases)
        room = torch.zeros(16, dtype=torch.int32, device=DEVICE)
        room[: len(static.kv[1].kv_indices)] = static.kv[1].kv_indices
        object.__setattr__(static.kv[1], "kv_indices", room)
    table = torch.full((16, 2, 64, 2, 128), math.nan, dtype=torch.bfloat16, device=DEVICE)
    if page_size:
        table[: len(static.kv[0])] = static.kv[0]
        static.kv = table, static.kv[1]
    attend(*static.args, kv=static.kv, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*static.args, kv=static.kv, **options)
    for case in cases:
        truth = Case(**{**vars(case), "alpha": 0.1, "scaling_seqlen": 500.0}).truth("silu")
        rows = len(case.q)
        copies = [(x.clone(), y.clone()) for x, y in zip(static.args, case.args, strict=True)]
        for target, (_, source) in zip(static.args[:3], copies[:3], strict=True):
            target.fill_(math.nan)
            target[:rows] = source
        static.seq_offsets.copy_(copies[3][1])
        static.num_candidates.copy_(copies[4][1])
        if page_size:
            if case is not static:
                table.fill_(math.nan)
                table[: len(case.kv[0])] = case.kv[0]
            for name in ("total_history_lengths", "kv_indptr"):
                getattr(static.kv[1], name).copy_(getattr(case.kv[1], name).clone())
            room[: len(case.kv[1].kv_indices)] = case.kv[1].kv_indices.clone()
        out.fill_(math.nan)
        graph.replay()
        assert relative(out[:rows], truth) < 1e-2
        assert (out[rows:] == 0).all()
