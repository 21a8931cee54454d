"""Own checkpoints: bit-exact round trips; every mismatch listed in one error; the model keeps its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from recexp import RankingModel, SequenceBatch
from recexp.checkpoint import load_weights
from recexp.config import ModelConfig

BATCH = SequenceBatch.from_lists([0], [[1, 2]], [[1, 2]], [[3, 4]])


def load(target: RankingModel, folder: Path) -> None:
    load_weights(target, target.config, folder)


def model(**changes: object) -> RankingModel:
    return RankingModel(ModelConfig.model_validate({"num_items": 20, "max_history_pairs": 5} | changes))


@pytest.mark.parametrize("backbone", ["hstu", "transformer"])
def test_round_trip_is_bit_exact(backbone: str, tmp_path: Path) -> None:
    saved = model(backbone=backbone, seed=5)
    saved.save(tmp_path)
    loaded = RankingModel.load(tmp_path)
    assert loaded.config == saved.config
    assert torch.equal(loaded.predict(BATCH), saved.predict(BATCH))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "model.safetensors"]


def test_every_mismatch_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    model(num_heads=4, num_layers=1).save(tmp_path)
    target = model()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load(target, tmp_path)
    text = str(error.value)
    assert "backbone.layers.0.uvqk.weight is [512, 64], the model's is [256, 64]" in text
    assert "missing backbone.layers.1.uvqk.weight" in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_the_other_backbone_is_refused_with_near_names(tmp_path: Path) -> None:
    model(backbone="transformer").save(tmp_path)
    with pytest.raises(
        ValueError, match=r"unknown backbone.layers.0.qkv.weight; did you mean 'backbone.layers.0.uvqk.weight'"
    ):
        load(model(), tmp_path)


def test_the_same_shapes_with_another_meaning_are_refused(tmp_path: Path) -> None:
    model(num_heads=2, head_dim=32, scaling_seqlen=20.0).save(tmp_path)
    with pytest.raises(ValueError) as error:
        load(model(num_heads=4, head_dim=16, scaling_seqlen=30.0), tmp_path)
    assert "num_heads is 2, the model's is 4" in str(error.value) and "scaling_seqlen is 20.0" in str(error.value)


def test_context_tables_in_another_order_are_refused(tmp_path: Path) -> None:
    """Equal as mappings, and of equal shapes; but the tables are numbered."""
    model(context={"age": 7, "day": 7}).save(tmp_path)
    with pytest.raises(ValueError, match=r"context is \[\('age', 7\), \('day', 7\)\], the model's is \[\('day', 7\)"):
        load(model(context={"day": 7, "age": 7}), tmp_path)


def test_absent_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint in"):
        RankingModel.load(tmp_path)
    path = model().save(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        RankingModel.load(tmp_path)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model().save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("recexp.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"model.safetensors could not be written: .*No space left"):
        model(hidden_size=32).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(Path, "write_text", full)  # the configuration: never old weights beside half of a new one
    with pytest.raises(OSError, match="No space left"):
        model(hidden_size=32).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_another_dtype_is_converted_only_when_asked(tmp_path: Path) -> None:
    saved = model().to(torch.bfloat16)
    saved.save(tmp_path)
    with pytest.raises(ValueError, match=r"head.mlp.0.weight is torch.bfloat16, the model's is torch.float32"):
        RankingModel.load(tmp_path)
    assert torch.equal(
        RankingModel.load(tmp_path, dtype=torch.float32).head.mlp[0].weight, saved.head.mlp[0].weight.float()
    )
