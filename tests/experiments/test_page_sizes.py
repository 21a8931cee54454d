"""page_sizes end to end on a CPU: the rows of a run, and what its functions compute and say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recexp.cache.pages import PageAllocator
from recexp.devices import profile_of
from recexp.experiments import page_sizes
from recexp.experiments.measure import Ceilings
from recexp.experiments.page_figures import best_pages, plot_costs, plot_pages, sentence
from recexp.experiments.page_sizes import PageSizePoint, allocate_us, host_copy_us, refuses, run_point
from recexp.experiments.record import load_run
from recexp.experiments.run import dry_run, load_experiment, run_experiment
from recexp.experiments.sweep import expand

CONFIGS = Path(__file__).parents[2] / "configs/experiments"
CPU = torch.device("cpu")
SMALL = PageSizePoint(
    backend="padded", page_size=8, cached_tokens=60, new_tokens=10, candidates=6, num_heads=2, head_dim=16,
    batch_size=3, min_runs=2, max_runs=2, max_seconds=0.01,
)  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))  # where the device's lock lies, too
        return run_experiment(CONFIGS / "page_sizes_quick.yaml", [], tmp_path_factory.mktemp("results"), quiet=True)


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of this process are not compared with the machine's: that takes seconds a dtype."""
    monkeypatch.setattr(page_sizes, "ceilings", lambda device, dtype: Ceilings(1.0, 1.0))


def test_every_point_is_a_row(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    timed, refused = rows[rows["status"] == "ok"], rows[rows["status"] == "refused"]
    assert len(timed) == 24 and len(refused) == 16 and len(rows) == 40
    assert set(refused["backend"]) == {"gluon"} and (refused["reason"] != "").all() and refused["p50_ms"].isna().all()
    assert set(rows["page_size"]) == {8, 32} and set(rows["tier"]) == {"device"} and set(timed["mode"]) == {"eager"}
    assert (timed["error"] < 1e-5).all() and (timed["num_candidates"] == 8 * timed["batch_size"]).all()
    assert (timed["num_tokens"] == 18 * timed["batch_size"]).all()
    for name in ("p50_ms", "tflops_share", "gbps_share", "allocate_us", "host_copy_us"):
        assert (timed[name] > 0).all(), name
    one = timed[(timed["batch_size"] == 1) & (timed["cached_tokens"] == 60)]  # 70 tokens: 9 pages of 8, 3 of 32
    assert np.allclose(one.groupby("page_size")["wasted_share"].first().astype(float), [1 - 70 / 72, 1 - 70 / 96])


def test_the_run_shows_and_says_it(run_folder: Path) -> None:
    figures = {path.stem for path in (run_folder / "figures").glob("*.png")}
    assert figures == {f"{kind}_{name}" for kind in ("map", "latency") for name in ("hstu", "transformer")} | {"costs"}
    assert sentence(load_run(run_folder).measurements) in (run_folder / "report.html").read_text()
    assert len(pd.read_parquet(run_folder / "best.parquet")) == 12


def test_users_end_anywhere_around_the_mean() -> None:
    lengths = SMALL.model_copy(update={"batch_size": 9, "cached_tokens": 1000}).cached
    assert lengths.mean() == 1000 and lengths.min() > 875 and lengths.max() < 1125 and len({*lengths % 8}) > 2
    assert SMALL.model_copy(update={"batch_size": 1}).cached.tolist() == [60]


@pytest.mark.parametrize("backbone", ["hstu", "transformer"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_point_is_checked_in_its_dtype(backbone: str, dtype: str) -> None:
    row = run_point(SMALL.model_copy(update={"backbone": backbone, "dtype": dtype}), CPU)
    assert row["status"] == "ok" and row["dtype"] == dtype
    assert row["error"] < {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}[dtype]


@pytest.mark.parametrize("fault", ["append", "page", "last user"])
def test_wrong_work_gets_no_time(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys that are not appended, a page that is another's, and an error of the longest user alone are found."""
    work = page_sizes.work

    def wrong(point, backend, qkv, lengths, kv):  # type: ignore[no-untyped-def]
        if backend == "reference":
            return work(point, backend, qkv, lengths, kv)
        if fault == "page":
            kv[1].kv_indices[-2] = kv[1].kv_indices[0]
        if fault == "append":
            work(point, backend, qkv, lengths, kv)
            kv[0][kv[1].kv_indices.long(), :, -1] *= 2
            return page_sizes.attend(
                *qkv.unbind(1), *lengths, weighting="silu", alpha=0.25, scaling_seqlen=76, backend=backend, kv=kv
            )
        out = work(point, backend, qkv, lengths, kv)
        if fault == "last user":
            out[-1] *= 1.01
        return out

    monkeypatch.setattr(page_sizes, "work", wrong)
    row = run_point(SMALL.model_copy(update={"page_size": 10}), CPU)
    assert row["status"] == "wrong" and row["p50_ms"] is None and row["allocate_us"] is None and row["error"] > 1e-4


def test_auto_says_which_backend_it_was() -> None:
    row = run_point(SMALL.model_copy(update={"backend": "auto"}), CPU)
    assert row["backend"] == "padded" and row["dtype"] == "float32" and refuses(SMALL, CPU) is None


def test_allocation_times_the_growth_and_leaves_it_in_place() -> None:
    allocator = PageAllocator(40, 8)
    allocator.allocate(range(3), [20, 24, 30])
    before = [allocator.pages(user).tolist() for user in range(3)]
    assert allocate_us(allocator, [10, 16, 30], [20, 24, 30]) > 0
    assert [allocator.pages(user).tolist() for user in range(3)] == before


def test_pages_come_back_from_the_host_as_they_were() -> None:
    table = torch.randn(9, 2, 8, 2, 16)
    before = table.clone()
    assert host_copy_us(table, np.array([3, 7, 1, 2, 8], np.int32)) > 0 and torch.equal(table, before)


def test_a_b200_runs_fbgemm_on_pages_of_128_and_triton_on_any() -> None:
    sweep = load_experiment(CONFIGS / "page_sizes_b200.yaml", here=False).sweep
    points = [PageSizePoint.model_validate(values) for values in expand(sweep)]
    answers = {(p.backend, p.backbone, p.page_size): refuses(p, profile_of("sm100")) for p in points}
    runs = {key for key, reason in answers.items() if reason is None}
    sizes = (16, 32, 64, 128, 256, 512)
    triton = {("triton", name, size) for name in ("hstu", "transformer") for size in sizes}
    assert runs == triton | {("fbgemm", "hstu", 128)}
    assert "128" in answers["fbgemm", "hstu", 64] and "silu" in answers["fbgemm", "transformer", 128].lower()


def test_a_b200_can_be_planned_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(CONFIGS / "page_sizes_b200.yaml", assume="sm100")
    assert "192 points, 88 refused by sm100" in capsys.readouterr().out


def frame(**medians: list[float | None]) -> pd.DataFrame:
    """A run of one row a backend, of page sizes 8, 16, …; spread 10% to either side; None is refused."""
    rows = []
    for backend, times in medians.items():
        for i, ms in enumerate(times):
            row = {
                "backbone": "hstu",
                "backend": backend,
                "batch_size": 2,
                "cached_tokens": 1000,
                "page_size": 8 * 2**i,
            }
            row |= {"status": "ok" if ms else "refused", "reason": None if ms else f"page_size {8 * 2**i} is not even"}
            row |= {"p10_ms": ms and 0.9 * ms, "p50_ms": ms, "p90_ms": ms and 1.1 * ms, "wasted_share": 0.01 * 2**i}
            rows.append(row | {"allocate_us": 5.0, "host_copy_us": 1.0 * 2**i})
    return pd.DataFrame(rows).astype({"reason": "string", "p10_ms": float, "p50_ms": float, "p90_ms": float})


def test_the_best_size_knows_its_noise() -> None:
    best = best_pages(frame(a=[2.0, 1.0, 1.1, 1.3], b=[None, 3.0, 3.1, 3.2])).set_index("backend")
    assert best["best"].tolist() == [16, 16] and best["within noise"].tolist() == [[16, 32], [16, 32, 64]]
    assert best["times as slow"].tolist() == pytest.approx([2.0, 3.2 / 3]) and best["all tie"].tolist() == [False, True]


def test_the_sentence_comes_from_the_data() -> None:
    said = sentence(frame(a=[2.0, 1.0, 1.1, 1.3], b=[None, 3.0, 3.1, 3.2]))
    assert said.startswith("Pages of 16 tokens are within noise of the best in 2 of 2 rows") and "waste 2.0%" in said
    assert "the slowest, 8, takes 2.00 times as long as 16 (hstu, a, batch size 2, 1,000 cached tokens)" in said
    said = sentence(frame(a=[1.1, 1.0, 1.1]))
    assert (
        said.startswith("No page size is better than the noise in any of 1 rows") and "1.0% of the slots at 8" in said
    )
    assert sentence(frame(a=[None, None])) == "Nothing was timed."


def test_the_map_hatches_what_was_refused_and_frames_the_best() -> None:
    figure = plot_pages(frame(a=[2.0, 1.0, 1.1, 1.3], b=[None, 3.0, 3.1, 3.2]), "A map")
    left, right = figure.axes[:2]
    framed = [patch.get_x() for patch in left.patches if patch.get_linewidth() == 2]
    assert framed == [pytest.approx(1 - 0.46)] and not any(patch.get_hatch() for patch in left.patches)
    assert [patch.get_x() for patch in right.patches if patch.get_hatch()] == [-0.5]
    assert [text.get_text() for text in left.texts] == ["2.00", "1.00", "1.10", "1.30"]
    assert right.texts[0].get_text() == "a" and figure.get_supxlabel() == "a: page_size is not even"
    assert plot_pages(frame(a=[None, None]), "Nothing").axes[0].texts[0].get_text() == "a"


def test_costs_are_per_token_on_the_way_to_the_host() -> None:
    lines = [axes.lines[0].get_ydata().tolist() for axes in plot_costs(frame(a=[2.0, 1.0]), "Costs").axes]
    assert lines == [[1.0, 2.0], [5.0, 5.0], pytest.approx([125.0, 125.0])]
