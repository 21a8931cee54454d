"""export end to end on a CPU: the rows of a run, its tables and figures."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from recexp.experiments.export import plot_ways, sentences
from recexp.experiments.record import load_run
from recexp.experiments.run import run_experiment

QUICK = Path(__file__).parents[2] / "configs/experiments/export_quick.yaml"
WAYS = [("eager", "none"), ("compiled", "none"), ("package", "none"), ("eager", "device"), ("package", "device")]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(QUICK, [], tmp_path_factory.mktemp("results"), quiet=True)


def test_every_way_gives_the_same_numbers(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    assert list(zip(rows["mode"], rows["tier"], strict=True)) == WAYS * 2 and set(rows["status"]) == {"ok"}
    assert rows["error"].between(0, 1e-5, inclusive="neither").all() and (rows["p50_ms"] > 0).all()
    assert rows["backend"].tolist() == ["padded", "gather", "gather", "padded", "gather"] * 2
    assert (
        rows["cached_tokens"].tolist() == [0, 0, 0, 18, 18] * 2
        and (rows["num_tokens"] == 28 * rows["batch_size"]).all()
    )


def test_the_run_says_what_compiling_cost(run_folder: Path) -> None:
    artefacts = pd.read_parquet(run_folder / "artefacts.parquet")
    assert artefacts["mode"].tolist() == ["package", "package", "compiled"]
    assert (
        artefacts["cache"].tolist() == ["no cache", "pages of 8", "no cache"] and (artefacts["compile_s"] > 0.5).all()
    )
    packages = artefacts.iloc[:2]
    assert (packages["megabytes"] > 0.1).all() and (packages["load_ms"] > 0).all()
    assert (run_folder / "figures" / "latency_12.png").is_file()
    text = (run_folder / "report.html").read_text()
    assert "10 of 10 points have the float64 reference" in text and "reads lengths on the host" in text


def test_a_wrong_way_has_no_bar(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    rows.loc[2, ["p10_ms", "p50_ms", "p90_ms"]], rows.loc[2, "status"] = pd.NA, "wrong"
    labels = [text.get_text().strip() for axes in plot_ways(rows, "t").axes for text in axes.texts]
    assert labels.count("wrong") == 1 and len([text for text in labels if text]) == 10
    artefacts = pd.read_parquet(run_folder / "artefacts.parquet")
    first, _, one, _ = sentences(rows, artefacts)
    assert first.startswith("9 of 10 points") and "package" not in one.split("eager")[1]
