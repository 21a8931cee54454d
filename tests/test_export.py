"""Packages against the model they were made of: any shape, with and without a cache; what a loader must refuse."""

from __future__ import annotations

import copy
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from recexp import RankingModel, SequenceBatch
from recexp.batch import offsets
from recexp.cli import app
from recexp.config import ModelConfig
from recexp.export.build import DTYPES, KEY, export, trace, weights_hash
from recexp.export.package import Package, _runs, read_manifest
from recexp.export.ranker import ExportedRanker
from recexp.metadata import KVMetadata

BACKBONES = ["hstu", "transformer"]
LIMIT = 1e-5  # of float32
SHAPES = {  # pairs and candidates of each user; traced were 22 tokens of history and 2, 3 and 0 candidates
    "one user": ([3], [2]),
    "one token": ([0], [1]),
    "ragged": ([0, 3, 25, 10, 1], [2, 0, 12, 1, 0]),
    "no candidates": ([3, 4], [0, 0]),
    "no pairs": ([0, 0], [0, 3]),
    "most users": ([2] * 31 + [10], [1] * 32),
    "all full": ([10] * 32, [12] * 32),
}
Exported = Callable[[str, int], Path]


def batch_of(pairs: list[int], candidates: list[int], seed: int = 0) -> SequenceBatch:
    draw = np.random.default_rng(seed)

    def ids(counts: list[int], most: int) -> list[list[int]]:
        return [draw.integers(0, most, n).tolist() for n in counts]

    rows = ids(pairs, 50), ids(pairs, 6), ids(candidates, 50)
    return SequenceBatch.from_lists(list(range(len(pairs))), *rows, {"age": [i % 7 for i in range(len(pairs))]})


def relative(a: Tensor, r: Tensor) -> float:
    assert a.shape == r.shape
    return float((a.double() - r.double()).norm() / r.double().norm()) if r.numel() else 0.0


def small(**changes: object) -> RankingModel:
    sizes = dict(num_items=50, max_history_pairs=10, hidden_size=32, num_heads=2, head_dim=16, num_layers=1)
    return RankingModel(ModelConfig.model_validate({**sizes, "context": {"user_id": 40, "age": 7}, **changes}))


@pytest.fixture(params=BACKBONES)
def plain(request: pytest.FixtureRequest, exported: Exported) -> tuple[RankingModel, Package]:
    folder = exported(request.param, 0)
    return RankingModel.load(folder / "model"), Package.load(folder / "model.pt2")


@pytest.fixture(params=BACKBONES)
def cached(request: pytest.FixtureRequest, exported: Exported) -> tuple[RankingModel, Package]:
    folder = exported(request.param, 4)
    return RankingModel.load(folder / "model"), Package.load(folder / "model.pt2")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_package_equals_its_model(plain: tuple[RankingModel, Package], shape: str) -> None:
    model, package = plain
    batch = batch_of(*SHAPES[shape])
    assert relative(package.predict(batch), model.predict(batch)) <= LIMIT


@pytest.mark.parametrize("shape", SHAPES)
def test_a_package_with_cache_equals_its_model(cached: tuple[RankingModel, Package], shape: str) -> None:
    model, package = cached
    batch, expected = batch_of(*SHAPES[shape]), None
    cache = model.make_cache(num_pages=1 + 32 * 6, page_size=4)
    for _ in range(2):  # the second time all history is cached
        assert relative(package.predict_cached(batch, cache), expected := model.predict(batch)) <= LIMIT
    assert expected is not None and (len(expected) == 0 or cache.statistics()["tier"].iloc[-1] == "device")


def test_visits_continue_the_history_that_the_tables_hold(cached: tuple[RankingModel, Package]) -> None:
    """Three visits, two caches: what is in a package's cache is the caller's, and the same as the model's own."""
    model, package = cached
    ours, others = (model.make_cache(num_pages=40, page_size=4) for _ in range(2))
    reused = []
    for num_pairs in ([1, 0, 4], [3, 2, 4], [10, 2, 9]):
        whole = batch_of([10, 10, 10], [2, 0, 3])
        ends = [(10 * row, 10 * row + n) for row, n in enumerate(num_pairs)]
        items, actions = ([x[a:b].tolist() for a, b in ends] for x in (whole.item_ids, whole.action_ids))
        candidates = [x.tolist() for x in whole.candidate_ids.split([2, 0, 3])]
        batch = SequenceBatch.from_lists([0, 1, 2], items, actions, candidates, {"age": [0, 1, 2]})
        expected = model.predict(batch)
        assert relative(package.predict_cached(batch, ours), expected) <= LIMIT
        model.cache = others
        assert relative(model.predict_cached(batch), expected) <= LIMIT
        reused += ours.statistics()["tokens_reused"].tail(3).tolist()
    assert reused == [0, 0, 0, 4, 2, 10, 8, 6, 10]
    for mine, theirs in zip(ours.tables, others.tables, strict=True):
        assert torch.allclose(mine[1:], theirs[1:], rtol=0, atol=1e-5) and mine[1:].any()


def test_a_batch_of_nobody(cached: tuple[RankingModel, Package]) -> None:
    model, package = cached
    with pytest.raises(ValueError, match="0 users; the package takes 1 to 32"):
        package.predict_cached(batch_of([], []), model.make_cache(num_pages=9, page_size=4))


def prefix_run(package: Package, row: list[int], cut: int, candidates: int, tables: list[Tensor]) -> Tensor:
    """The last ``candidates`` ids of a row ranked behind a prefix of any length, itself appended by a call before."""
    history, pages = len(row) - candidates, np.arange(1, 8)

    def metadata(total: int, new: int, num: int) -> KVMetadata:
        return KVMetadata.build([pages[: -(-total // 4)]], np.array([total]), np.array([new]), np.array([num]), 4)

    def call(ids: list[int], total: int, num: int) -> Tensor:
        counts = torch.tensor([num], dtype=torch.int32)
        seq_offsets = offsets(torch.tensor([len(ids)]), torch.int32)
        return package.run(
            torch.tensor(ids, dtype=torch.int64), seq_offsets, counts, tables, metadata(total, len(ids) - num, num)
        )

    call(row[:cut], cut, 0)
    return call(row[cut:], history, candidates)


def test_a_prefix_may_end_anywhere(cached: tuple[RankingModel, Package]) -> None:
    """Inside the context, after an item, after an action. Slots that nobody wrote hold NaN, and reach nothing."""
    model, package = cached
    batch = batch_of([10], [3])
    pairs = torch.stack([batch.item_ids, batch.action_ids], 1).flatten().tolist()
    row, expected = [0, 0, *pairs, *batch.candidate_ids.tolist()], model.predict(batch)
    for cut in range(23):
        tables = [torch.full((9, 2, 4, 2, 16), torch.nan) for _ in range(2)]
        assert relative(prefix_run(package, row, cut, 3, tables), expected) <= LIMIT, cut
        written = tables[0][1:].isfinite().all(-1).all(-1).transpose(0, 1).flatten(1)  # [2, slots]
        assert written.sum() == 2 * 22 and written[:, :22].all()  # the history, and no candidate


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_graph_fixes_no_size_and_no_float64(backbone: str, page_size: int | None) -> None:
    """A float64 tensor for alpha is what made others' packages slow, and a fixed length wrong."""
    model = small(backbone=backbone)
    program, _ = trace(model, page_size, max_users=32)
    nodes = list(program.graph.nodes)
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor)]
    assert {x.dtype for x in values if x.dtype.is_floating_point} == {torch.float32}
    assert not program.constants and not program.graph_signature.buffers
    constants = {x for node in nodes for x in node.args if isinstance(x, (int, float))}
    assert model.config.head_dim**-0.5 in constants  # alpha, a number
    traced = {3 * 22 + 5, 3 * 22, 3 * 6, 3 * 6 + 7}  # tokens, history, pages, pages of a table
    assert constants.isdisjoint(traced)
    inputs = {node.name: node.meta["val"] for node in nodes if node.op == "placeholder"}
    given = [x for name, x in inputs.items() if not name.startswith("p_")]
    assert len(given) == 4 + (1 + 10 if page_size else 0)
    assert all(isinstance(x.shape[0], torch.SymInt) for x in given)
    written = [node.args[0].name for node in nodes if node.target is torch.ops.aten.index_put_.default]
    assert written == [name for name in inputs if name.startswith("tables")]  # in place, and by one operator


def test_the_manifest_says_what_is_inside(exported: Exported) -> None:
    manifest, model = (
        read_manifest(exported("hstu", 4) / "model.pt2"),
        RankingModel.load(exported("hstu", 4) / "model"),
    )
    assert manifest.model == model.config and manifest.page_size == 4 and manifest.max_users == 32
    assert (manifest.torch, manifest.device, manifest.dtype) == (torch.__version__, "cpu", "float32")
    assert manifest.attention_backend == "gather" and torch.backends.cpu.get_cpu_capability() in manifest.capability
    assert (
        manifest.weights_sha256 == weights_hash(model) != weights_hash(RankingModel(model.config, dtype=torch.bfloat16))
    )
    with torch.no_grad():
        model.head.mlp[0].bias[0] += 1e-6
    assert manifest.weights_sha256 != weights_hash(model)
    assert read_manifest(exported("transformer", 0) / "model.pt2").model.backbone == "transformer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.0.1"}, f"built by torch 2.0.1, this is torch {re.escape(torch.__version__)}"),
        ({"device": "cuda", "capability": "SM90"}, r"built for cuda \(SM90\), not for cpu \(.*\): export the model on"),
        ({"capability": "aarch64 DEFAULT"}, r"built for cpu \(aarch64 DEFAULT\), not for cpu"),
        ({"device": "xpu"}, r"built for xpu \(.*\), not for c"),
    ],
)
def test_a_package_for_another_machine_is_refused(
    changes: dict, message: str, exported: Exported, tmp_path: Path
) -> None:
    manifest = read_manifest(exported("hstu", 0) / "model.pt2").model_copy(update=changes)
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:  # the code itself would not get as far as this
        archive.writestr("other/data/x.wrapper_metadata.json", json.dumps({KEY: manifest.model_dump_json()}))
    for device in ("cpu", None):
        if device or not torch.cuda.is_available():
            with pytest.raises(ValueError, match=message):
                Package.load(tmp_path / "other.pt2", device)


def test_newer_processors_run_what_older_ones_do() -> None:
    assert _runs("x86_64 AVX2", "x86_64 AVX512") and _runs("SM90", "SM90") and _runs("aarch64 SVE256", "aarch64 SVE256")
    assert not _runs("x86_64 AVX512", "x86_64 AVX2") and not _runs("SM90", "SM100")
    assert not _runs("x86_64 DEFAULT", "aarch64 DEFAULT") and not _runs("aarch64 SVE256", "aarch64 DEFAULT")


def test_files_that_are_no_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as a package"):
        Package.load(tmp_path / "absent.pt2")
    (tmp_path / "text.pt2").write_text("no archive")
    with pytest.raises(ValueError, match="cannot be read as a package"):
        Package.load(tmp_path / "text.pt2")
    for text in ("{}", "5", '["recexp"]', '"recexp"'):
        with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
            archive.writestr("other/data/x.wrapper_metadata.json", text)
        with pytest.raises(ValueError, match="has no manifest"):
            Package.load(tmp_path / "other.pt2")


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"capability": " "}, {"page_size": 0}, {"max_users": 0}])
def test_a_manifest_that_lies(changes: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    text = json.dumps(json.loads(trace(small())[1].model_dump_json()) | changes)
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("other/data/x.wrapper_metadata.json", json.dumps({KEY: text}))
    with pytest.raises(ValueError, match=f"cannot be read as a package of recexp .*\n{next(iter(changes))}"):
        Package.load(tmp_path / "other.pt2")


def test_an_archive_that_cannot_be_unpacked(exported: Exported, tmp_path: Path) -> None:
    """Encrypted, packed in an unknown way, or a manifest beyond Python's stack: zipfile and json have errors of many
    kinds."""
    whole = (exported("hstu", 0) / "model.pt2").read_bytes()
    entry = whole.find(b"PK\x01\x02")
    for place, value in ((8, 1), (10, 99), (10, 14)):  # of the directory's flags and method, and 26 less in the entry
        content = bytearray(whole)
        content[entry + place] = content[place - 2] = value
        (tmp_path / "odd.pt2").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a package"):
            Package.load(tmp_path / "odd.pt2")
    with zipfile.ZipFile(tmp_path / "deep.pt2", "w") as archive:
        archive.writestr("deep/metadata.json", "[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read as a package"):
        Package.load(tmp_path / "deep.pt2")


def test_a_package_without_its_code(exported: Exported, tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(exported("hstu", 0) / "model.pt2") as whole,
        zipfile.ZipFile(tmp_path / "less.pt2", "w") as less,
    ):
        for name in whole.namelist():
            if not name.endswith(".so"):
                less.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"less.pt2 is not whole, export it again: "):
        Package.load(tmp_path / "less.pt2")


def test_limits_that_no_package_can_have() -> None:
    for limits, message in (
        ({"page_size": 0}, "page_size\n.*greater than or equal to 1"),
        ({"max_users": 0}, "max_users\n.*greater than or equal to 1"),
        ({"max_users": 2**24}, "16777216 users may have 4664066048 tokens, offsets reach to 2147483647"),
    ):
        with pytest.raises(ValueError, match=message):
            trace(small(), **limits)


def test_another_dtype_is_converted_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[torch.dtype] = []

    def write(model: RankingModel, out: Path, *_: object) -> None:
        written.append(model.head.mlp[0].weight.dtype)
        out.touch()

    monkeypatch.setattr("recexp.export.build.export", write)
    small().double().save(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "a.pt2")]
    message = str(CliRunner().invoke(app, command).exception)
    assert "is torch.float64, the model's is torch.float32; name a dtype" in message
    assert CliRunner().invoke(app, [*command, "--dtype", "bfloat16"]).exit_code == 0 and written == [torch.bfloat16]


def test_a_damaged_package_is_not_run(exported: Exported, tmp_path: Path) -> None:
    content = bytearray((exported("hstu", 0) / "model.pt2").read_bytes())
    with zipfile.ZipFile(exported("hstu", 0) / "model.pt2") as archive:
        code = next(part for part in archive.infolist() if part.filename.endswith(".so"))
    content[code.header_offset + code.file_size // 2] ^= 1
    (tmp_path / "damaged.pt2").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as a package .*\.so is damaged"):
        Package.load(tmp_path / "damaged.pt2")
    (tmp_path / "another name.pt2").write_bytes((exported("hstu", 0) / "model.pt2").read_bytes())
    batch = batch_of([3], [2])
    expected = RankingModel.load(exported("hstu", 0) / "model").predict(batch)
    assert relative(Package.load(tmp_path / "another name.pt2").predict(batch), expected) <= LIMIT


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("max_users", [1, 2])
def test_a_package_may_be_for_one_user(max_users: int, page_size: int | None) -> None:
    """Fewer than are traced; the smallest model too."""
    program, manifest = trace(small(max_history_pairs=1, max_candidates=1, context={}), page_size, max_users)
    assert manifest.max_users == max_users
    if page_size is None:
        package = Package(manifest, program.module(check_guards=False))
        batch = replace(batch_of([1] * max_users, [1] * max_users), context_ids={})
        model = small(max_history_pairs=1, max_candidates=1, context={})
        assert relative(package.predict(batch), model.predict(batch)) <= LIMIT


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs_of(**changes: object) -> dict:
    """A good request of two users, one of them cached but for two tokens, with some of it changed."""
    metadata = KVMetadata.build([np.array([1, 2]), np.array([3])], *map(np.array, ([6, 2], [2, 2], [1, 2])), 4)
    given = dict(
        token_ids=torch.tensor([1, 2, 3, 0, 0, 4, 5]),
        seq_offsets=int32(0, 3, 7),
        num_candidates=int32(1, 2),
        tables=[torch.zeros(9, 2, 4, 2, 16)],
        metadata=metadata,
    )
    return given | changes


TABLE = torch.zeros(9, 2, 4, 2, 16)
GOOD = inputs_of()["metadata"]
THREE = KVMetadata.build(list(np.arange(1, 4)[:, None]), *map(np.array, ([2] * 3, [2] * 3, [0] * 3)), 4)
BAD = {
    "dtype": (dict(token_ids=torch.ones(7)), "token_ids is torch.float32"),
    "list": (dict(num_candidates=[1, 2]), r"num_candidates is list \[1, 2\]: needed is torch.int32"),
    "strided": (dict(token_ids=torch.zeros(14, dtype=torch.int64)[::2]), "needed is torch.int64, 1-D, contiguous"),
    "shape": (dict(seq_offsets=int32(0, 3)), "seq_offsets has 2 entries and num_candidates 2"),
    "falling": (dict(seq_offsets=int32(0, 8, 7)), "never fall"),
    "too short": (dict(seq_offsets=int32(0, 3, 6)), "7 tokens need 0 to 7"),
    "item": (dict(token_ids=torch.tensor([50, 2, 3, 0, 0, 4, 5])), r"row 0, position 4\) is 50: ids there are 0 to 49"),
    "action": (dict(token_ids=torch.tensor([1, 6, 3, 0, 0, 4, 5])), r"position 5\) is 6: ids there are 0 to 5"),
    "context": (dict(token_ids=torch.tensor([1, 2, 3, 0, 7, 4, 5])), r"row 1, position 1\) is 7: ids there are 0 to 6"),
    "negative": (dict(token_ids=torch.tensor([1, 2, 3, 0, 0, 4, -1])), r"token_ids\[6\] .* is -1"),
    "candidates": (dict(num_candidates=int32(2, 2)), "new_history_offsets is .0, 2, 4., and by seq_offsets"),
    "no metadata": (dict(metadata=None), "a KV cache: pass tables and metadata"),
    "no tables": (dict(tables=[]), "0 tables"),
    "table of nothing": (dict(tables=[None]), "the table of layer 0 is NoneType None: needed are"),
    "table without a size": (dict(tables=[torch.tensor(0.0)]), r"of layer 0 is torch.float32 \[\] on cpu"),
    "metadata of another kind": (dict(metadata={}), "a KV cache: pass tables and metadata"),
    "not in the buffer": (dict(metadata=replace(GOOD, kv_indices=int32(4, 5, 6))), "kv_indices is no view of"),
    "layers": (dict(tables=[TABLE, TABLE]), "needed are 1 tables"),
    "page size": (dict(tables=[torch.zeros(9, 2, 8, 2, 16)]), r"of layer 0 is .* 8, 2, 16\]"),
    "table dtype": (dict(tables=[TABLE.double()]), "of layer 0 is torch.float64"),
    "table strides": (dict(tables=[TABLE.transpose(0, 2).contiguous().transpose(0, 2)]), "strides"),
    "more users": (dict(metadata=THREE), "metadata of 3 users, num_candidates of 2"),
    "few pages": (dict(tables=[torch.zeros(3, 2, 4, 2, 16)]), r"kv_indices\[2\] is 3"),
    "page twice": (dict(metadata=replace(GOOD, kv_indices=int32(1, 2, 1))), "was given before"),
    "page -1": (dict(metadata=replace(GOOD, kv_indices=int32(1, -1, 3))), r"kv_indices\[1\] is -1"),
    "position": (dict(metadata=replace(GOOD, position=int32(4, 6, 0, 1))), r"position\[1\] is 6"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_the_package_runs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = BAD[case]
    model = small()
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    package = Package(trace(model, 4, max_users=2)[1], ExportedRanker(model, "gather"))
    assert package.run(**inputs_of()).shape == (3, 2)
    package.call = lambda *_: pytest.fail("it ran")
    given = inputs_of(**changes)
    with pytest.raises(ValueError, match=message):
        package.run(**given)
    assert not any(table.any() for table in given["tables"] if table is not None)


def test_a_refused_request_takes_nobodys_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(context={})
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    package = Package(trace(model, 4, max_users=2)[1], ExportedRanker(model, "gather"))
    cache = model.make_cache(num_pages=6, page_size=4)  # of one user
    mine, others = (SequenceBatch.from_lists([user], [[1] * 10], [[2] * 10], [[3]]) for user in (0, 1))
    package.predict_cached(mine, cache)
    with pytest.raises(ValueError, match="is 50: ids there are 0 to 49"):
        package.predict_cached(replace(others, candidate_ids=torch.tensor([50])), cache)
    package.predict_cached(mine, cache)
    assert cache.statistics()["tokens_reused"].iloc[-1] == 20


def test_tables_may_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = small(num_layers=2), torch.zeros(3 * TABLE.numel())
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    package = Package(trace(model, 4, max_users=2)[1], ExportedRanker(model, "gather"))
    first, size = pool[: TABLE.numel()].view_as(TABLE), TABLE.numel()
    assert package.run(**inputs_of(tables=[first, pool[size : 2 * size].view_as(TABLE)])).shape == (3, 2)
    for start in (0, 4, size - 4):
        with pytest.raises(ValueError, match="2 tables, or two in the same memory"):
            package.run(**inputs_of(tables=[pool[start : start + size].view_as(TABLE), first]))


def test_limits_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(max_candidates=2, context={})
    monkeypatch.setattr("torch.export.export", lambda *_, **__: None)
    package = Package(trace(model, max_users=2)[1], ExportedRanker(model, "gather"))
    with pytest.raises(ValueError, match="3 users; the package takes 1 to 2"):
        package.predict(batch_of([1, 1, 1], [1, 1, 1]))
    cache = model.make_cache(num_pages=9, page_size=4)
    for call in (package.predict, lambda batch: package.predict_cached(batch, cache)):
        with pytest.raises(ValueError, match="a batch of 0 users; the package takes 1 to 2"):
            call(batch_of([], []))
    with pytest.raises(ValueError, match="row 1 has 3 candidates; the package takes 2"):
        package.predict(batch_of([1, 1], [1, 3]))
    with pytest.raises(ValueError, match="row 0 has 22 history tokens; the package takes 20"):
        package.run(torch.zeros(22, dtype=torch.int64), int32(0, 22), int32(0))
    with pytest.raises(ValueError, match="the package has no KV cache"):
        package.run(torch.zeros(2, dtype=torch.int64), int32(0, 2), int32(0), [TABLE])


def test_export_says_beforehand_what_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise RuntimeError(capsys.readouterr().out)

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", stop)
    with pytest.raises(RuntimeError, match=r"by backend 'gather': 'reference' reads lengths on the host"):
        export(small(attention_backend="reference"), tmp_path / "a.pt2")
    with pytest.raises(RuntimeError, match=r"^The package's HSTU layers are not fused"):
        export(small(attention_backend="triton", fused_layers=True), tmp_path / "a.pt2")
    with pytest.raises(RuntimeError, match=r"^$"):
        export(small(attention_backend="paged"), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"not torch.float64: convert the model"):
        export(small().double(), tmp_path / "a.pt2")
    (tmp_path / "folder.pt2").mkdir()
    for name in ("a.so", "folder.pt2"):
        with pytest.raises(ValueError, match=r"ends in \.pt2"):
            export(small(), tmp_path / name)
    model = small()
    model.stores = {"item": object()}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="tables item are in stores"):
        export(model, tmp_path / "a.pt2")
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--out", "a.pt2", "--dtype", "float64"])
    assert "dtype 'float64'; known: float32, bfloat16, float16" in str(done.exception)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_kernel_is_an_operator_of_the_graph(backbone: str) -> None:
    """Under Triton's interpreter: the operator is one opaque node a layer, and gives what the model's kernel gives."""
    model = small(backbone=backbone, attention_backend="triton")
    program, manifest = trace(model, 4, max_users=32)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("recexp.attention.default") == 1 and manifest.attention_backend == "triton"
    package, cache = Package(manifest, program.module()), model.make_cache(num_pages=40, page_size=4)
    for pairs in ([2, 3], [5, 3]):
        batch = batch_of(pairs, [2, 1])
        assert relative(package.predict_cached(batch, cache), model.predict(batch)) <= LIMIT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.gpu
def test_on_a_gpu(backbone: str, page_size: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """The kernels stay in the package; equal to the model within the dtype's rounding on shapes never traced."""
    reference = small(backbone=backbone, num_layers=2).cuda().double()
    model = copy.deepcopy(reference).to(dtype)
    manifest = export(model, tmp_path / "model.pt2", page_size, max_users=32)
    assert manifest.attention_backend == "triton" and manifest.capability.startswith("SM")
    package = Package.load(tmp_path / "model.pt2")
    cache = model.make_cache(num_pages=200, page_size=page_size or 16)
    rows = []
    for shape in SHAPES.values():
        batch = batch_of(*shape)
        for _ in range(2 if page_size else 1):  # the second time all history is cached
            logits = package.predict_cached(batch, cache) if page_size else package.predict(batch)
            rows.append((logits, model.predict(batch), reference.predict(batch)))
    logits, eager, exact = (torch.cat(parts) for parts in zip(*rows, strict=True))
    assert relative(logits, exact) <= (LIMIT if dtype == torch.float32 else 2 * relative(eager, exact))
