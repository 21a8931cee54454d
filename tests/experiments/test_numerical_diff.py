"""numerical_diff end to end on made-up data: the rows of a run, their rule, and what its functions compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recexp import RankingModel
from recexp.data import load_interactions, make_splits
from recexp.experiments.compare import difference, equal, trace
from recexp.experiments.difference_figures import (
    plot_rankings,
    plot_verdicts,
    say_growth,
    say_rankings,
    say_saved,
    say_ways,
)
from recexp.experiments.numerical_diff import (
    LOGITS,
    Way,
    answer,
    compare_saved,
    compare_ways,
    growth,
    isolate,
    judged,
    make_probe,
    on_way,
    rankings,
    save_traces,
    ways,
)
from recexp.experiments.record import load_run, to_frame
from recexp.experiments.run import load_experiment, run_experiment
from recexp.layers import attend, register_attention_backend
from recexp.layers.attention import AttentionCall

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "configs/experiments/numerical_diff_quick.yaml"
LOW = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def small() -> tuple:
    """Untrained models: the experiment, its interactions and test requests, models and probes by name."""
    experiment = load_experiment(QUICK)
    interactions = load_interactions(experiment.data)
    test = make_splits(experiment.data, interactions).test
    models = {name: RankingModel(config) for name, config in experiment.models.items()}
    probes = {name: make_probe(interactions, test, config, 3) for name, config in experiment.models.items()}
    return experiment, interactions, test, models, probes


@pytest.fixture(scope="module")
def run_folder(small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is compared with a saved one, of which bfloat16 is off by a tenth of what it is."""
    saved, (*_, models, probes) = tmp_path_factory.mktemp("saved"), small
    grown = {name: growth(name, model, probes[name], ["float64", "bfloat16"], 4) for name, model in models.items()}
    traces = {key: found for _, traces, _ in grown.values() for key, found in traces.items()}
    off = {key: {op: x * (1.1 if key[1] in LOW else 1) for op, x in found.items()} for key, found in traces.items()}
    save_traces(saved, off, {name: digest for name, (_, _, digest) in grown.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        overrides = ["training.num_steps=3", f"difference.saved=[{saved}]"]
        return run_experiment(QUICK, overrides, tmp_path_factory.mktemp("results"), quiet=True)


def test_every_way_of_the_run_is_right_or_refused_with_a_reason(run_folder: Path) -> None:
    rows = load_run(run_folder).measurements
    assert set(rows["status"]) == {"ok", "refused"} and not rows["reason"][rows["status"] == "refused"].isna().any()
    ok = rows[rows["status"] == "ok"]
    assert not rows.duplicated(["backbone", "dtype", "backend", "mode", "page_size"]).any()
    assert set(ok["dtype"]) == {"float64", "float32", *LOW} and set(rows["dtype"]) - set(ok["dtype"]) == {"tf32"}
    assert set(ok["mode"]) == {"eager", "static"} and set(ok["page_size"].dropna()) == {4, 8}
    assert ((ok["tier"] == "device") == ok["page_size"].notna()).all()
    error = ok.groupby("dtype")["error"].max()
    assert error["float64"] < 1e-12 < error["float32"] < 1e-5 < error["float16"] < error["bfloat16"] < 0.1
    reasons = rows.set_index("backend")["reason"]
    assert "softmax" in reasons["flex"].dropna().iloc[0] and "triton or gluon" in reasons["padded, fused layer"].iloc[0]


def test_operations_of_every_kind_of_pair_are_compared(run_folder: Path) -> None:
    frame = pd.read_parquet(run_folder / "differences.parquet")
    assert set(frame["kind"]) == {"dtype", "backend", "cache", "page size", "graph"}
    assert {"uvqk", "attention", "output_norm", "proj"} <= set(frame.query("model == 'hstu'")["operation"])
    assert (frame["reason"] == "").all() and frame["equal"].all()
    assert (frame["fraction_outside"][frame["kind"] == "dtype"] < 1).all()
    pages = frame[(frame["kind"] == "page size") & (frame["dtype"] == "float64")]
    assert len(pages) and (pages["relative"] == 0).all()  # gathered from other pages, the same numbers are computed
    static = frame[frame["kind"] == "graph"]
    assert (static["reference"] == static["dtype"] + ", paged, pages of 4").all()


def test_report_has_every_section(run_folder: Path) -> None:
    names = {path.stem for path in (run_folder / "figures").glob("*.png")}
    each = {f"{what}_{model}" for what in ("operations", "depth") for model in ("hstu", "transformer")}
    assert names == {"verdicts", "growth", "rankings", "saved_1_hstu", "saved_1_transformer", *each}
    text = (run_folder / "report.html").read_text()
    assert "keep the rule" in text and "came in with its inputs" in text and "0.0e+00 in float64" in text
    saved = pd.read_parquet(run_folder / "saved_1.parquet").groupby("dtype")["relative"]
    assert saved.max()["float64"] == 0 and saved.min()["bfloat16"] == pytest.approx(0.1 / 1.1, rel=0.01)
    lines = pd.read_parquet(run_folder / "growth.parquet").query("operation == 'output' and dtype == 'bfloat16'")
    hstu = lines[(lines["model"] == "hstu") & lines["layer"].str.isdigit()]["error"]
    assert len(hstu) == 4 and hstu.is_monotonic_increasing
    orders = pd.read_parquet(run_folder / "rankings.parquet").set_index(["model", "dtype"])
    assert (orders["pairs"] > 100).all() and (orders["pairs moved, %"].xs("float32", level=1) == 0).all()


def register_off(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A backend "off": spoilt results of another."""

    @register_attention_backend("off")
    def off(call: AttentionCall) -> torch.Tensor:
        settings = {"weighting": call.weighting, "alpha": call.alpha, "scaling_seqlen": call.scaling_seqlen}
        return spoil(attend(call.q, call.k, call.v, call.seq_offsets, call.num_candidates, **settings))


def test_a_way_that_is_off_is_wrong_in_every_dtype(small) -> None:
    register_off(lambda out: torch.cat([out[..., :-4], 0.5 * out[..., -4:]], dim=-1))
    experiment, *_, models, probes = small
    rows, frame = compare_ways("hstu", models["hstu"], probes["hstu"], experiment.difference, quiet=True)
    table = to_frame(rows)
    wrong = table[table["status"] == "wrong"]
    assert set(wrong["backend"]) == {"off"} and set(wrong["dtype"]) == {"float64", "float32", *LOW}
    assert wrong["reason"].str.contains("backend: logits off by .*, limit .*, against b?float").all()
    said = say_ways(table, frame)
    assert said.startswith("**4 of") and "hstu float32 off: backend: logits off" in said
    assert plot_verdicts(frame, "x").axes[0].get_xlim()[1] > 10  # the broken ones are in the picture
    broken = frame.assign(looked_at=frame["looked_at"].where(frame["tested"] != "off", np.inf))
    assert "inf" in [text.get_text() for text in plot_verdicts(broken, "x").axes[0].child_axes[0].get_yticklabels()]


def test_operations_show_what_logits_hide(small) -> None:
    """The norm behind HSTU's attention takes out a factor: the logits keep the rule, attention does not."""
    register_off(lambda out: 1.05 * out)
    experiment, *_, models, probes = small
    config = experiment.difference.model_copy(update={"dtypes": ["bfloat16"]})
    rows, frame = compare_ways("hstu", models["hstu"], probes["hstu"], config, quiet=True)
    assert not any(row["status"] == "wrong" for row in rows)
    beyond = frame[~frame["equal"]]
    assert {"attention"} <= set(beyond["operation"]) <= {"attention", "output_norm"} and set(beyond["tested"]) == {
        "off"
    }
    assert f"{len(beyond)} of {len(frame)} single operations exceed" in say_ways(to_frame(rows), frame)
    assert "off: attention" in say_ways(to_frame(rows), frame)


def test_a_way_that_raises_is_a_row(small, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, *_, models, probes = small
    right = RankingModel.make_cache

    def fails(self: RankingModel, *, page_size: int, **options: object) -> object:
        if page_size == 8:
            raise torch.OutOfMemoryError("no room")
        return right(self, page_size=page_size, **options)

    monkeypatch.setattr(RankingModel, "make_cache", fails)
    rows = to_frame(compare_ways("hstu", models["hstu"], probes["hstu"], experiment.difference, quiet=True)[0])
    failed = rows[rows["status"] == "failed"]
    assert set(failed["page_size"]) == {8} and set(failed["reason"]) == {"OutOfMemoryError: no room"}
    assert "ok" in set(rows["status"][rows["page_size"] == 4])
    rows.loc[failed.index, "reason"] = "CompilationError: " + "x" * 300 + "\n  at 145:20"
    said = say_ways(rows, pd.DataFrame({"equal": [True], "looked_at": [0.0]}))
    assert "wrong" not in said and f"{len(failed)} failed; hstu float64 reference: CompilationError: xxx" in said
    assert "at 145" not in said and len(said) < 200 + 250 * len(failed)


def test_a_layer_without_attention_has_dtypes_to_compare_and_no_more(small) -> None:
    quick = load_experiment(QUICK.with_name("compare_backbones_quick.yaml"))
    experiment, interactions, test, *_ = small
    model = RankingModel(quick.models["attention_free"])
    probe = make_probe(interactions, test, model.config, 3)
    rows, frame = compare_ways("own", model, probe, experiment.difference, quiet=True)
    assert [(row["dtype"], row["status"]) for row in rows] == [
        ("float32", "ok"), ("tf32", "refused"), ("bfloat16", "ok"), ("float16", "ok"),
    ]  # fmt: skip
    assert set(frame["kind"]) == {"dtype"} and "proj" in set(frame["operation"])
    with pytest.raises(ValueError, match="no pair of ways could be compared"):
        compare_ways("own", model, probe, experiment.difference.model_copy(update={"dtypes": ["tf32"]}), quiet=True)


@pytest.mark.parametrize("dtypes", ["[float32]", "[float64]", "[float64, tf32]"])
def test_dtypes_are_compared_with_the_truth(dtypes: str) -> None:
    with pytest.raises(ValueError, match="needs float64, the truth, and another"):
        load_experiment(QUICK, [f"difference.dtypes={dtypes}"])


def test_logits_that_overflow_have_no_order(small, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, interactions, test, models, _ = small
    model = RankingModel(models["hstu"].config)
    with torch.no_grad():
        for weight in model.head.parameters():
            weight.mul_(1e6)
    asked = interactions, test, experiment.data.tasks[0], 3
    frame = rankings(model, ["float64", "float16"], *asked).assign(model="m")
    assert np.isinf(frame["relative error of logits"].iloc[1]) and np.isnan(frame["Kendall tau"].iloc[1])
    assert "float16 all of m, whose logits are not finite" in say_rankings(frame)
    plot_rankings(frame, "x").savefig("/dev/null", format="png")


def test_judged_is_the_rule_of_equal() -> None:
    truth = {LOGITS: torch.linspace(1, 2, 100, dtype=torch.float64), ("0", "proj"): torch.ones(3, dtype=torch.float64)}
    for dtype in ("float64", "float32", *LOW):
        plain = {key: x.to(getattr(torch, dtype)) for key, x in truth.items()}
        for size in (0.0, 1e-13, 1e-11, 1e-7, 1e-4, 1e-3, 1.0):
            a = {LOGITS: truth[LOGITS] * (1 + size), ("1", "proj"): torch.ones(3)}
            frame = judged(dtype, a, truth, truth, plain).set_index(["layer", "operation"])
            assert frame.loc[LOGITS, "equal"] == equal(a[LOGITS], truth[LOGITS], getattr(torch, dtype), plain[LOGITS])
            assert not frame.loc[("1", "proj"), "equal"] and "only in the tested" in frame.loc[("1", "proj"), "reason"]


def test_probe_keeps_what_a_cache_leaves(small) -> None:
    *_, models, probes = small
    probe, config = probes["hstu"], models["hstu"].config
    assert int(probe.batch.num_pairs.max()) <= config.max_history_pairs
    assert (probe.prefix.num_pairs == probe.batch.num_pairs // 2).all()
    lengths = 2 * probe.batch.num_pairs + probe.batch.num_candidates
    kept = [int(part.sum()) for part in probe.is_new.split(lengths.tolist())]
    assert kept == (lengths - 2 * probe.prefix.num_pairs).tolist()
    starts = np.cumsum([0, *probe.batch.num_pairs[:-1]])
    assert probe.prefix.item_ids.split(probe.prefix.num_pairs.tolist())[1].tolist() == (
        probe.batch.item_ids[starts[1] : starts[1] + int(probe.prefix.num_pairs[1])].tolist()
    )


def test_static_buffers_are_traced_without_their_padding(small) -> None:
    *_, models, probes = small
    eager = Way("float64", "paged", 4)
    found, expected = (answer(models["hstu"], way, probes["hstu"]) for way in (replace(eager, mode="static"), eager))
    assert found.keys() == expected.keys() and ("0", "attention") in found
    assert all(difference(found[key], expected[key]).relative < 1e-12 for key in found)
    assert len(found["0", "attention"]) == int(probes["hstu"].is_new.sum())


def test_float32_is_ieee_inside_a_way_and_the_setting_comes_back(small) -> None:
    *_, models, _ = small
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with on_way(models["hstu"], Way("float32")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(ValueError, match="TF32"), on_way(models["hstu"], Way("tf32")):
        pass


@pytest.mark.parametrize(("name", "operation"), [("hstu", "uvqk"), ("hstu", "attention"), ("transformer", "ffn.1")])
def test_an_isolated_element_is_that_of_the_run(small, name: str, operation: str) -> None:
    """In float64, where rows do not depend on their place, bit for bit; of the last user, so that offsets matter."""
    *_, models, probes = small
    expected = answer(models[name], Way(), probes[name])["0", operation]
    index = (len(probes[name].is_new) - 2, *(size - 1 for size in expected.shape[1:]))
    low, exact, inputs, at = isolate(models[name], "float64", probes[name], "0", operation, index)
    assert len(inputs[0]) < len(probes[name].is_new)
    with torch.inference_mode():
        assert difference(low(*inputs)[at], expected[index]).relative < 1e-13
        assert torch.equal(low(*inputs), exact(*inputs))


def test_saved_traces_compare_like_the_runs_they_are_of(small, tmp_path: Path) -> None:
    *_, models, probes = small
    dtypes = ["float64", "float32", "bfloat16"]
    _, traces, digest = growth("hstu", models["hstu"], probes["hstu"], dtypes, 3)
    off = {key: {op: x * (1.001 if key[1] == "float32" else 1) for op, x in t.items()} for key, t in traces.items()}
    for folder, found, identity in (("a", traces, digest), ("b", off, digest), ("c", traces, "other")):
        (tmp_path / folder).mkdir()
        save_traces(tmp_path / folder, found, {"hstu": identity})
    same = compare_saved(tmp_path / "a", tmp_path / "a")
    assert same["equal"].all() and (same["relative"] == 0).all() and set(same["dtype"]) == set(dtypes)
    moved = compare_saved(tmp_path / "b", tmp_path / "a")
    zeros = "0.0e+00 in bfloat16, 0.0e+00 in float32, 0.0e+00 in float64"
    assert say_saved(same, "a") == f"Logits differ from those of a by at most {zeros}, which the rule allows."
    said = say_saved(moved, "b")
    assert "of b by" in said and "1.0e-03 in float32" in said and said.endswith(", **more than the rule allows**.")
    moved = moved.set_index("dtype")
    assert moved.loc[["float64", "bfloat16"], "equal"].all() and not moved.loc["float32", "equal"].any()
    assert moved.loc["float32", "relative"].to_numpy() == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match="their weights or requests differ"):
        compare_saved(tmp_path / "c", tmp_path / "a")


def test_identity_follows_weights_and_requests(small) -> None:
    _, interactions, test, models, probes = small
    config = models["hstu"].config
    seeded = RankingModel(config.model_copy(update={"seed": 1}))
    other = make_probe(interactions, test, config, 2)
    cases = [(models["hstu"], probes["hstu"]), (seeded, probes["hstu"]), (models["hstu"], other)]
    assert len({growth("x", model, probe, ["float64"], 1)[2] for model, probe in cases}) == 3


def test_rankings_see_a_model_that_orders_backwards(small, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, interactions, test, models, _ = small
    right = RankingModel.predict
    low = torch.bfloat16

    def backwards(self: RankingModel, batch: object) -> torch.Tensor:
        logits = right(self, batch)
        return -logits if self.sequence.item_embedding.weight.dtype == low else logits

    monkeypatch.setattr(RankingModel, "predict", backwards)
    asked = interactions, test, experiment.data.tasks[0], 3
    frame = rankings(models["hstu"], ["float64", "float32", "bfloat16"], *asked).set_index("dtype")
    assert frame.loc["float64", "relative error of logits"] == 0 and frame.loc["float32", "pairs moved, %"] == 0
    assert frame.loc["bfloat16", "pairs moved, %"] > 95 and frame.loc["bfloat16", "Kendall tau"] < -0.9
    assert frame.loc["bfloat16", "AUC change"] != 0


def test_sentences_say_what_the_frames_say() -> None:
    frame = pd.DataFrame({"model": "m", "dtype": ["float32", "bfloat16"], "pairs moved, %": [0.0, 0.5]})
    said = say_rankings(frame.assign(**{"AUC change": [0.0, -2e-4]}))
    assert "float32 none of m" in said and "bfloat16 1 in 200 of m (AUC by at most 2e-04)" in said
    stream = pd.DataFrame({"model": "m", "dtype": ["a", "a", "b", "b"], "error": [1.0, 3.0, 1.0, 2.0]})
    assert say_growth(stream) == "From the first to the last of 2 layers the error grows: m 2.0 to 3.0 times."


@pytest.mark.gpu
def test_on_a_gpu_tf32_kernels_and_graphs_are_ways_too(small) -> None:
    experiment, *_, probes = small
    config = experiment.models["hstu"].model_copy(update={"num_heads": 4, "head_dim": 64})
    model = RankingModel(config, "cuda")
    rows = to_frame(compare_ways("hstu", model, probes["hstu"], experiment.difference, quiet=True)[0])
    assert set(rows["status"]) <= {"ok", "refused"}, rows[["dtype", "backend", "mode", "reason"]].to_string()
    ok = rows[rows["status"] == "ok"]
    assert {"graph", "segmented", "static"} <= set(ok["mode"]) and "triton" in set(ok["backend"])
    error = ok.groupby("dtype")["error"].max()
    assert 1e-5 < error["tf32"] < error["bfloat16"]
    assert {"triton, fused layer", "gluon, fused layer"} & set(ok["backend"])


def test_tf32_is_only_compared_as_a_dtype(small) -> None:
    experiment, *_, models, _ = small
    found = [
        (kind, tested) for kind, tested, _ in ways(models["hstu"], experiment.difference) if tested.dtype == "tf32"
    ]
    assert [kind for kind, _ in found] == ["dtype"] and found[0][1].torch_dtype == torch.float32


def test_a_trace_of_lookups_is_cut_alike(small) -> None:
    """The uncached trace, cut to what a cache leaves, has the shapes of the cached one."""
    *_, models, probes = small
    model = models["transformer"]
    plain = trace(model, lambda: model.predict(probes["transformer"].batch))
    cached = answer(model, Way("float32", "padded", 8), probes["transformer"])
    assert cached.keys() < plain.keys() and ("sequence", "item_embedding") not in cached
