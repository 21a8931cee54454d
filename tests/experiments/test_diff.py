"""Two saved runs compared: every verdict from numbers chosen for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recexp import cli
from recexp.experiments.diff import compare_runs, plot_diff
from recexp.experiments.measure import Latency
from recexp.experiments.record import SavedRun, load_run, row, start_run, to_frame

PLACE = {"device": "H200", "backbone": "hstu", "backend": "triton", "mode": "eager", "tier": "none"}


def timed(batch_size: int, p10: float, p50: float, p90: float, **columns: Any) -> dict[str, Any]:
    latency = Latency(p10, p50, p90, 20, p50, None)
    return row("ok", latency=latency, batch_size=batch_size, **PLACE | columns)


def saved(folder: Path, *rows: dict[str, Any], name: str = "speed") -> SavedRun:
    run = start_run(name, {}, folder, quiet=True)
    run.save(to_frame(rows))
    return load_run(run.finish())


def verdicts(a: SavedRun, b: SavedRun) -> dict[int, str]:
    return compare_runs(a, b).set_index("batch_size")["verdict"].to_dict()


def test_change_and_noise_by_hand(tmp_path: Path) -> None:
    a = saved(tmp_path, timed(1, 1.9, 2.0, 2.2))
    found = compare_runs(a, saved(tmp_path, timed(1, 2.4, 3.0, 3.3))).iloc[0]
    assert (found["change"], found["change_low"], found["change_high"]) == pytest.approx((1.5, 2.4 / 2.2, 3.3 / 1.9))
    assert found["verdict"] == "slower" and (found["p50_ms_a"], found["p50_ms_b"]) == (2.0, 3.0)


def test_every_verdict_on_one_device(tmp_path: Path) -> None:
    failed = row("failed", reason="crash", batch_size=6, **PLACE)
    refused = row("refused", reason="no", batch_size=7, **PLACE)
    a = saved(
        tmp_path,
        *(timed(n, 0.99, 1.0, 1.01) for n in (1, 2, 3, 4, 6, 7, 8)),
        row("refused", reason="no", batch_size=9, **PLACE),
    )
    b = saved(
        tmp_path,
        timed(1, 1.19, 1.2, 1.21),
        timed(2, 0.79, 0.8, 0.81),
        timed(3, 1.0, 1.2, 1.4),  # the spreads overlap
        timed(4, 1.015, 1.02, 1.03),  # they do not, and 2% is still nothing
        timed(5, 1, 1, 1),
        failed,
        refused,
        row("refused", reason="no", batch_size=9, **PLACE),
    )
    assert verdicts(a, b) == {
        1: "slower", 2: "faster", 3: "within noise", 4: "within noise", 5: "only in b", 6: "lost", 7: "lost",
        8: "only in a", 9: "",
    }  # fmt: skip


def test_other_devices_are_judged_by_their_ceilings(tmp_path: Path) -> None:
    """Half the time is slower where the ceiling is four times as high; a refusal of another device is no fault."""
    a = saved(
        tmp_path, *(timed(n, 9.9, 10, 10.1, tflops_share=0.6, gbps_share=0.1) for n in (1, 2, 3)), timed(4, 9, 10, 11)
    )
    other: dict[str, Any] = {"device": "B200", "backend": "fbgemm"}
    b = saved(
        tmp_path,
        timed(1, 4.95, 5, 5.05, tflops_share=0.3, gbps_share=0.05, **other),
        timed(2, 19.8, 20, 20.2, tflops_share=0.6, gbps_share=0.1, **other),
        row("refused", reason="pages of 128 only", batch_size=3, **PLACE | other),
        timed(4, 19, 20, 21, **other),
    )
    found = compare_runs(a, b).set_index("batch_size")
    assert found["verdict"].to_dict() == {1: "slower", 2: "within noise", 3: "", 4: ""}
    assert found.loc[1, "change"] == pytest.approx(2) and found.loc[1, "change_low"] == pytest.approx(2 * 9.9 / 10.1)


def test_what_bounds_a_point_is_compared_with_its_like(tmp_path: Path) -> None:
    """Bound by copies in a: judged by its share of them, whatever became of the other share."""
    a = saved(tmp_path, timed(1, 1, 1, 1, tflops_share=0.1, gbps_share=0.8))
    b = saved(tmp_path, timed(1, 1, 1, 1, tflops_share=0.5, gbps_share=0.4, device="B200"))
    assert compare_runs(a, b)["change"].tolist() == [pytest.approx(2)]


def test_backends_and_repeats_tell_points_apart_only_where_they_must(tmp_path: Path) -> None:
    a = saved(tmp_path, timed(1, 1, 1, 1), timed(1, 3, 3, 3, backend="padded"), timed(2, 1, 1, 1), timed(2, 5, 5, 5))
    b = saved(tmp_path, timed(1, 3, 3, 3, backend="padded"), timed(1, 1, 1, 1), timed(2, 1, 1, 1), timed(2, 5, 5, 5))
    assert compare_runs(a, b)["change"].tolist() == [1] * 4
    assert compare_runs(saved(tmp_path, timed(1, 1, 1, 1)), saved(tmp_path, timed(1, 2, 2, 2, backend="x")))[
        "change"
    ].tolist() == [2]


def test_an_experiments_own_columns_tell_points_apart(tmp_path: Path) -> None:
    """Rates of load that only one run has are no other rate's repeat."""
    runs = []
    for rates in ((25, 50), (50, 100)):
        run = start_run("serving", {}, tmp_path, quiet=True)
        run.save(to_frame([timed(1, rate, rate, rate) for rate in rates]).assign(rate=rates))
        runs.append(load_run(run.finish()))
    found = compare_runs(*runs).set_index("rate")
    assert found["verdict"].to_dict() == {25: "only in a", 50: "within noise", 100: "only in b"}


def test_a_run_of_version_1_is_compared_by_what_it_has(tmp_path: Path) -> None:
    new = saved(tmp_path, timed(1, 1, 1, 1, cached_tokens=5), timed(2, 1, 1, 1, cached_tokens=5))
    old = SavedRun(new.path, new.manifest, {}, new.measurements.drop(columns=["cached_tokens", "gbps_share"]), ())
    assert verdicts(old, new) == {1: "within noise", 2: "within noise"}
    version_1 = saved(tmp_path, timed(1, 1, 1, 1, device="B200", tflops_share=0.5))
    version_1.manifest["schema_version"] = 1  # its FLOPs mean something else
    version_2 = saved(tmp_path, timed(1, 9, 9, 9, tflops_share=0.1))
    assert verdicts(version_1, version_2) == verdicts(version_2, version_1) == {1: ""}


def test_a_run_of_version_1_without_a_column_of_shares_is_compared(tmp_path: Path) -> None:
    """On one device, by time; a column of nothing at all divides by nothing."""
    a, b = saved(tmp_path, timed(1, 1, 1, 1)), saved(tmp_path, timed(1, 1, 1, 1))
    a.manifest["schema_version"] = 1
    assert verdicts(a, b) == verdicts(b, a) == {1: "within noise"}


def test_runs_without_a_point_in_common_are_no_success(tmp_path: Path) -> None:
    a, b = saved(tmp_path, timed(1, 1, 1, 1)), saved(tmp_path, timed(2, 1, 1, 1))
    for other in (b, saved(tmp_path)):
        with pytest.raises(ValueError, match="no point in common"):
            compare_runs(a, other)
    with pytest.raises(ValueError, match="no point in common"):
        compare_runs(saved(tmp_path), saved(tmp_path))
    assert set(verdicts(a, a).values()) == {"within noise"}


def test_runs_of_other_experiments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a run of speed, .* of size: compare runs of one experiment"):
        compare_runs(saved(tmp_path, timed(1, 1, 1, 1)), saved(tmp_path, timed(1, 1, 1, 1), name="size"))


def test_the_figure_names_the_farthest_points(tmp_path: Path) -> None:
    a = saved(tmp_path, *(timed(n, 1, 1, 1) for n in range(1, 5)))
    figure = plot_diff(compare_runs(a, saved(tmp_path, *(timed(n, n, n, n) for n in range(1, 5)))), "title")
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "1: 4, batch size 4\n2: 3, batch size 3\n3: 2, batch size 2"
    assert [text.get_position()[0] for text in figure.axes[0].texts] == [6.0] * 3  # numbers beside their points
    assert [t.get_text() for t in legend.get_texts()] == ["slower: 3 points", "within noise: 1 points"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["recexp", "diff", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_exit_codes_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved(tmp_path, timed(1, 1, 1, 1)), saved(tmp_path, timed(1, 2, 2, 2))
    assert call(monkeypatch, a.path, b.path) == 1
    out = capsys.readouterr().out
    assert "slower" in out and "1 slower; see" in out and "speed, by times" in out
    beside = b.path.parent / f"diff_{a.path.name}_{b.path.name}"
    assert {p.name for p in beside.iterdir()} == {"diff.csv", "diff.png", "diff.svg"}
    assert pd.read_csv(beside / "diff.csv")["change"].tolist() == [2.0]
    assert call(monkeypatch, b.path, a.path, "--out", tmp_path / "there") == 0  # faster is no regression
    assert (tmp_path / "there/diff.png").exists()
    assert call(monkeypatch, a.path, tmp_path) == 2 and "is not a whole run" in capsys.readouterr().err
    manifest = json.loads((b.path / "manifest.json").read_text())
    (b.path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    assert call(monkeypatch, a.path, b.path) == 2
