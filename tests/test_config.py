"""Every YAML mistake is an error that names the nearest known key or the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from recexp import load_config
from recexp.config import ExperimentConfig, ModelConfig

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "configs/models/hstu_small.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda p: p.name)
def test_every_committed_configuration_loads_and_its_resolved_form_loads_back(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert load_config(write(tmp_path, config.to_yaml())) == config


def test_experiment_follows_paths_and_takes_overrides() -> None:
    path = ROOT / "configs/experiments/compare_backbones.yaml"
    config = load_config(path, ["models.hstu.hidden_size=128", "training.betas=[0.8, 0.9]", "device=cpu"])
    assert isinstance(config, ExperimentConfig)
    assert config.models["hstu"].hidden_size == 128 and config.models["transformer"].hidden_size == 64
    assert config.training.betas == (0.8, 0.9)
    assert config.notebook == Path("notebooks/01_compare_backbones.ipynb")


def test_derived_values_are_written_out() -> None:
    config = ModelConfig(num_items=5, max_history_pairs=40, context={"user_id": 9})
    assert (config.window_hop, config.num_positions, config.max_history_tokens) == (10, 82, 81)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: model\nnum_items: 5\nhiden_size: 3\n", "unknown key 'hiden_size'; did you mean 'hidden_size'?"),
        (
            "kind: experiment\nname: x\nnotebook: a\nmodels: {a: {num_items: 5, resdual: true}}\n",
            "models.a: unknown key 'resdual'",
        ),
        ("kind: model\nnum_items: 0\n", "num_items: Input should be greater than or equal to 1 (got 0)"),
        ("kind: model\nnum_items: 5\nscaling_seqlen: -1\n", "scaling_seqlen: Input should be greater than 0 (got -1)"),
        ("kind: model\nnum_items: 5\ndropout: 1.0\n", "dropout: Input should be less than 1 (got 1.0)"),
        ("kind: model\nnum_items: 5\nnum_positions: 200\n", "num_positions 200 is below 201"),
        ("kind: model\nnum_items: 5\nwindow_hop: 101\n", "window_hop 101 exceeds max_history_pairs 100"),
        ("kind: model\nnum_items: 5\nembedding_size: 32\n", "embedding_size 32 differs from hidden_size 64"),
        (
            "kind: model\nnum_items: 5\nmax_history_pairs: '10'\n",
            "max_history_pairs: Input should be a valid integer (got '10')",
        ),
        ("kind: model\nnum_items: true\n", "num_items: Input should be a valid integer (got True)"),
        ("kind: model\nnum_items: 5\nembedding_std: .inf\n", "embedding_std: Input should be a finite number"),
        ("kind: model\nnum_items: 5\nseed: 18446744073709551616\n", "seed: Input should be less than 4294967296"),
        ("kind: data\nfolder: x\n", "dataset 'ml-100k' takes no folder"),
        ("kind: data\ntasks: [{name: a, value: 1}, {name: a, value: 2}]\n", "tasks ['a', 'a'] share a name"),
        ("kind: [a]\n", "kind ['a']; known"),
        ("kind: experiment\nname: x\nnotebook: a\nmodels: {}\n", "models is empty; name at least one"),
        ("kind: experiment\nname: x\nnotebook: a\nmodels: {item mean: {num_items: 5}}\n", "should match pattern"),
        ("kind: model\n", "num_items: Field required"),
        ("kind: data\ndataset: movielens\n", "needs folder"),
        ("kind: data\ntasks: []\n", "tasks is empty"),
        ("kind: modle\nnum_items: 5\n", "kind 'modle'; did you mean 'model'?"),
        ("num_items: 5\n", "kind None; known: data, experiment, model, serving, training"),
        ("- 1\n- 2\n", "holds a list, not a mapping"),
        ("", "holds a NoneType, not a mapping"),
        ("a: [1\n", "is not valid YAML"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_config(write(tmp_path, text))
    assert message in str(error.value)


def test_missing_file_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"no configuration file .*hstu_smal.yaml; did you mean 'hstu_small.yaml'"):
        load_config(SMALL.with_name("hstu_smal.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden_size", "not of the form"),
        ("=3", "not of the form"),
        ("hidden_size.x=3", "hidden_size is not a mapping"),
        ("hiddn_size=3", "did you mean 'hidden_size'"),
        ("context={a: [", "is not a YAML value"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(SMALL, [override])


def test_paths_in_a_file_are_relative_to_it_and_those_of_overrides_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "kind: data\ndataset: movielens\nfolder: ratings\n")
    assert load_config(path).folder == tmp_path / "deep/ratings"
    assert load_config(path, ["folder=other"]).folder == tmp_path / "other"
    experiment = load_config(ROOT / "configs/experiments/compare_backbones.yaml", [f"models.hstu={SMALL}"])
    assert experiment.models["hstu"] == load_config(SMALL)
