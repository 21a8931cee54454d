"""The layout of recsys-examples: bit-exact round trips, the oracles, and files that are refused unread."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from recexp import RankingModel, SequenceBatch
from recexp.cli import app
from recexp.config import ModelConfig
from recexp.peer_checkpoint import FILE, FLAT, load_peer_weights, save_peer

BATCH = SequenceBatch.from_lists([0], [[1, 2]], [[1, 2]], [[3, 4]])
BACKBONES = ["hstu", "transformer"]
ORACLES = Path(__file__).parent / "oracles"
QUICK = Path(__file__).parents[1] / "configs/experiments/export_quick.yaml"


def model(backbone: str = "hstu", dtype: torch.dtype | None = None, **changes: object) -> RankingModel:
    sizes = dict(num_items=20, max_history_pairs=5, hidden_size=16, num_heads=2, head_dim=8, embedding_size=6)
    sizes |= dict(mlp_size=12, head_sizes=[8, 4], context={"user_id": 3})
    return RankingModel(ModelConfig.model_validate({**sizes, "backbone": backbone, **changes}), dtype=dtype)


def load(target: RankingModel, folder: Path, convert: bool = False) -> list[str]:
    return load_peer_weights(target, target.config, folder, convert)


def state_of(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / FILE, weights_only=True)["model_state_dict"]


def write(folder: Path, state: object) -> None:
    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model_state_dict": state}, folder / FILE)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_round_trip_is_bit_exact(backbone: str, tmp_path: Path) -> None:
    saved, target = model(backbone, seed=5), model(backbone)
    assert save_peer(saved, saved.config, tmp_path) == tmp_path / FILE
    assert load(target, tmp_path) == []
    assert all(torch.equal(x, target.state_dict()[name]) for name, x in saved.state_dict().items())
    assert torch.equal(target.predict(BATCH), saved.predict(BATCH))
    assert [p.name for p in (tmp_path / "torch_module").iterdir()] == ["model.0.pth"]


def test_the_file_has_the_names_and_shapes_of_the_layout(tmp_path: Path) -> None:
    for backbone in BACKBONES:
        save_peer(model(backbone), model(backbone).config, tmp_path / backbone)
    hstu, transformer = (state_of(tmp_path / backbone) for backbone in BACKBONES)
    layer = "_hstu_block._attention_layers.1."
    assert hstu[layer + "_linear_uvqk_weight"].shape == (16, 64) and hstu[layer + "_linear_proj_weight"].shape == (
        16,
        16,
    )
    assert transformer[layer + "qkv.weight"].shape == (48, 16) and transformer[layer + "ffn.2.weight"].shape == (16, 64)
    shared = {name for name in hstu if "_attention_layers" not in name}
    assert shared == {name for name in transformer if "_attention_layers" not in name}
    stage = "_hstu_block._preprocessor."
    mlps = [f"{stage}_{kind}_mlp._mlp.{i}" for kind in ("item", "contextual") for i in (0, 2)]
    mlps += [f"_mlp._mlp.{i}" for i in (0, 2, 4)]
    expected = {f"{name}.{kind}" for name in mlps for kind in ("weight", "bias")}
    expected |= {stage + "_positional_encoder._position_embeddings_weight", FLAT + "item/action/user_id_weights"}
    assert shared == expected


@pytest.mark.parametrize("case", ["ragged", "empty", "one", "long"])
def test_a_peer_layer_gives_the_oracle_outputs(case: str, tmp_path: Path) -> None:
    """The arrays go into a file of the peer's form as they are: it multiplies from the right, as the oracles do."""
    arrays = {name: torch.from_numpy(x) for name, x in np.load(ORACLES / f"hstu_layer_{case}.npz").items()}
    sizes = {"num_heads": int(arrays["num_heads"]), "head_dim": int(arrays["head_dim"])}
    sizes |= {"hidden_size": arrays["x"].shape[1], "num_layers": 1}
    target = model(dtype=torch.float64, **sizes, scaling_seqlen=float(arrays["scaling_seqlen"]))
    save_peer(target, target.config, tmp_path)
    state, layer = state_of(tmp_path), "_hstu_block._attention_layers.0."
    for name, source in {
        "_linear_uvqk_weight": "uvqk_w", "_linear_uvqk_bias": "uvqk_b", "_linear_proj_weight": "proj_w",
        "_input_layernorm_weight": "ln_w", "_input_layernorm_bias": "ln_b",
        "_output_layernorm_weight": "out_w", "_output_layernorm_bias": "out_b",
    }.items():  # fmt: skip
        state[layer + name] = arrays[source]
    write(tmp_path, state)
    load(target, tmp_path)
    with torch.no_grad():
        out = target.backbone.layers[0](arrays["x"], arrays["seq_offsets"], arrays["num_candidates"])
    assert (out - arrays["out"]).norm() / arrays["out"].norm() < 1e-12


def test_tables_elsewhere_are_kept_and_named(tmp_path: Path) -> None:
    saved, target = model(seed=5), model()
    save_peer(saved, saved.config, tmp_path)
    state = state_of(tmp_path)
    flat = state.pop(FLAT + "item/action/user_id_weights")
    state[FLAT + "action/user_id_weights"] = flat[20 * 6 :]
    state["_embedding_collection._model_parallel_embedding_collection.embeddings.item.weight"] = torch.ones(3)
    before = target.sequence.item_embedding.weight.clone()
    write(tmp_path, state)
    assert load(target, tmp_path) == ["item"]
    assert torch.equal(target.sequence.item_embedding.weight, before)
    assert torch.equal(target.sequence.action_embedding.weight, saved.sequence.action_embedding.weight)


def test_every_mismatch_is_in_one_error_and_nothing_changes(tmp_path: Path) -> None:
    saved, target = model(seed=5), model()
    save_peer(saved, saved.config, tmp_path)
    state, layer = state_of(tmp_path), "_hstu_block._attention_layers."
    state[layer + "0._linear_uvqk_wieght"] = state.pop(layer + "0._linear_uvqk_weight")
    state["_mlp._mlp.0.bias"] = torch.zeros(7)
    write(tmp_path, state)
    before = {name: x.clone() for name, x in target.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load(target, tmp_path)
    text = str(error.value)
    assert f"missing {layer}0._linear_uvqk_weight [16, 64]" in text and "(3 differences)" in text
    assert f"unknown {layer}0._linear_uvqk_wieght; did you mean '{layer}0._linear_uvqk_weight'" in text
    assert "_mlp._mlp.0.bias is [7], the model's is [8]" in text
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())


@pytest.mark.parametrize(("theirs", "ours"), [BACKBONES, BACKBONES[::-1]])
def test_the_other_backbone_is_named(theirs: str, ours: str, tmp_path: Path) -> None:
    save_peer(model(theirs), model(theirs).config, tmp_path)
    with pytest.raises(ValueError, match=f"holds layers of backbone '{theirs}', the model's are '{ours}'"):
        load(model(ours), tmp_path)


def test_another_dtype_is_converted_only_when_asked(tmp_path: Path) -> None:
    saved, target = model(dtype=torch.bfloat16, seed=5), model()
    save_peer(saved, saved.config, tmp_path)
    with pytest.raises(ValueError, match=r"_mlp._mlp.0.weight is torch.bfloat16, the model's is torch.float32"):
        load(target, tmp_path)
    load(target, tmp_path, convert=True)
    assert torch.equal(target.head.mlp[0].weight, saved.head.mlp[0].weight.float())


class Trap:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("sprung",)


def test_files_that_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = model()
    with pytest.raises(ValueError, match="is missing"):
        load(target, tmp_path)
    whole = save_peer(target, target.config, tmp_path).read_bytes()
    for content, reason in ((b"", "no zip"), (whole[: len(whole) // 2], "no zip"), (b"no checkpoint", "no zip")):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load(target, tmp_path)
    write(tmp_path, {"weight": Trap()})
    with pytest.raises(ValueError, match="is refused: Weights only load failed"):
        load(target, tmp_path)
    assert not (tmp_path / "sprung").exists()
    torch.save([1], tmp_path / FILE)
    with pytest.raises(ValueError, match="no key 'model_state_dict'"):
        load(target, tmp_path)


LAYER, BIAS = "_hstu_block._attention_layers.0", "_mlp._mlp.0.bias"  # a tensor of 8
ODD = {
    "no name": ({1: torch.ones(8)}, "dense tensors by name"),
    "layer without a tensor": ({LAYER: torch.ones(8)}, f"unknown {LAYER}; did you mean"),
    "three dimensions": (
        {f"{LAYER}._linear_uvqk_weight": torch.ones(2, 2, 2)},
        r"uvqk_weight is \[2, 2, 2\], the model's",
    ),
    "turned": ({f"{LAYER}._linear_uvqk_weight": torch.ones(64, 16)}, r"is \[64, 16\], the model's is \[16, 64\]"),
    "sparse": ({BIAS: torch.ones(8).to_sparse()}, "dense tensors by name"),
    "no data": ({BIAS: torch.ones(8, device="meta")}, "dense tensors by name"),
    "integers": ({BIAS: torch.ones(8, dtype=torch.int32)}, "is torch.int32, the model's is torch.float32"),
    "complex": ({BIAS: torch.ones(8, dtype=torch.complex64)}, "is torch.complex64"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_tensors_are_refused_and_nothing_changes(case: str, tmp_path: Path) -> None:
    saved, target = model(seed=5), model()
    save_peer(saved, saved.config, tmp_path)
    changes, message = ODD[case]
    write(tmp_path, state_of(tmp_path) | changes)  # type: ignore[operator]
    before = {name: x.clone() for name, x in target.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load(target, tmp_path, convert=True)
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())


def test_a_layer_without_a_tensor_in_a_transformer(tmp_path: Path) -> None:
    """Which backbone a file holds is asked of every name, in the file's order."""
    saved = model("transformer")
    save_peer(saved, saved.config, tmp_path)
    write(tmp_path, {LAYER: torch.ones(8)} | state_of(tmp_path))
    with pytest.raises(ValueError, match=rf"\(1 differences\):\n  unknown {LAYER};"):
        load(model("transformer"), tmp_path)


def test_an_archive_with_half_a_pickle_is_refused(tmp_path: Path) -> None:
    path = save_peer(model(), model().config, tmp_path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content[: len(content) // 2] if name.endswith("data.pkl") else content)
    with pytest.raises(ValueError, match=r"is refused: EOFError\(\)"):
        load(model(), tmp_path)


def test_a_changed_byte_of_a_weight_is_refused(tmp_path: Path) -> None:
    target = model()
    path = save_peer(target, target.config, tmp_path)
    content, weight = bytearray(path.read_bytes()), target.backbone.layers[0].uvqk.weight.t().contiguous()
    content[content.index(weight.detach().numpy().tobytes()) + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is refused: .*data/\d+ is damaged, or was saved without its checksum"):
        load(target, tmp_path)


@pytest.mark.parametrize("feature", ["item", "action", "age/day"])
def test_features_that_the_layout_cannot_name_are_refused(feature: str, tmp_path: Path) -> None:
    """They would take the place of the item table, or read back as two tables that nobody knows."""
    target = model(context={"user_id": 3, feature: 4})
    with pytest.raises(ValueError, match=rf"context features \['{feature}'\]: the peer layout .*; rename them"):
        save_peer(target, target.config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_new_weights_reach_every_path(tmp_path: Path) -> None:
    """What was cached or captured with the old weights is not used any more."""
    settings = {"attention_backend": "paged", "max_candidates": 4}
    saved, target = model(seed=5, **settings), model(**settings)
    save_peer(saved, saved.config, tmp_path)
    target.make_cache(num_pages=99, page_size=4, num_capture_pages=48)
    target.make_graphs()
    target.predict_cached(BATCH)
    load(target, tmp_path)
    assert torch.allclose(target.predict_cached(BATCH), saved.predict(BATCH), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_convert_and_inspect(backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saved = CliRunner().invoke, model(backbone, seed=5)
    saved.save(tmp_path / "ours")
    assert run(app, ["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "theirs")]).exit_code == 0
    text = run(app, ["checkpoint", "inspect", str(tmp_path / "theirs")]).output
    assert f"layout recsys-examples, backbone {backbone}" in text and "_mlp._mlp.4.bias float32 [2]" in text
    back = ["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "back")]
    assert "name the model's by --config" in str(run(app, back).exception)
    assert run(app, [*back, "--config", str(tmp_path / "ours" / "config.yaml")]).exit_code == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "ours" / "model.safetensors"
    ).read_bytes()
    assert f"layout recexp, backbone {backbone}" in run(app, ["checkpoint", "inspect", str(tmp_path / "back")]).output


def test_convert_overwrites_nothing_and_names_what_it_needs(tmp_path: Path) -> None:
    def convert(*args: object) -> str:
        done = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, args)])
        assert done.exception is None or isinstance(done.exception, ValueError)
        return str(done.exception or done.output)

    ours, theirs, saved = tmp_path / "ours", tmp_path / "theirs", model(seed=5)
    saved.save(ours)
    assert convert(ours, theirs, "--dtype", "bfloat16").startswith("wrote")
    assert state_of(theirs)[BIAS].dtype == torch.bfloat16
    assert "theirs holds a checkpoint already: name a new folder" in convert(ours, theirs)
    assert "ours holds a checkpoint already" in convert(theirs, ours, "--config", ours / "config.yaml")
    assert "dtype 'int8'; known: float32" in convert(ours, tmp_path / "new", "--dtype", "int8")
    assert "describes a experiment, not a model" in convert(theirs, tmp_path / "new", "--config", QUICK)
    mixed = {name: x.float() if "embedding" in name else x for name, x in state_of(theirs).items()}
    write(theirs, {"_embedding_collection.rows": torch.ones(2, dtype=torch.int64)} | mixed)
    assert "name a dtype to convert to" in convert(theirs, tmp_path / "new", "--config", ours / "config.yaml")
    options = ("--config", ours / "config.yaml", "--dtype", "float32")
    assert convert(theirs, tmp_path / "new", *options).startswith("wrote")
    write(theirs, {})
    assert "dense tensors by name" in convert(theirs, tmp_path / "newer", *options)
    save_file({}, ours / "model.safetensors")
    assert "missing head.mlp.0.bias" in convert(ours, tmp_path / "newer")
