"""The checkpoint layout of NVIDIA/recsys-examples: ``<folder>/torch_module/model.0.pth``, key ``model_state_dict``.

HSTU's two matrices lie there transposed against nn.Linear, the Transformer's do not. Embedding keys are the sparse part
(large tables are files of their own): the small tables that lie in one flat row here are taken where their names and
size are the model's, the others keep what the model has.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from recexp.checkpoint import check_fit
from recexp.config import ModelConfig

FILE = Path("torch_module") / "model.0.pth"
LAYER = "_hstu_block._attention_layers."
PREPROCESSOR = "_hstu_block._preprocessor."
SPARSE = "_embedding_collection"
FLAT = f"{SPARSE}._data_parallel_embedding_collection.embeddings."
HSTU = {
    "_linear_uvqk_weight": "uvqk.weight",
    "_linear_uvqk_bias": "uvqk.bias",
    "_linear_proj_weight": "proj.weight",
    "_input_layernorm_weight": "input_norm.weight",
    "_input_layernorm_bias": "input_norm.bias",
    "_output_layernorm_weight": "output_norm.weight",
    "_output_layernorm_bias": "output_norm.bias",
}
TRANSPOSED = ("_linear_uvqk_weight", "_linear_proj_weight")
TRANSFORMER = {
    f"{module}.{kind}": f"{module}.{kind}"
    for module in ("input_norm", "qkv", "proj", "ffn_norm", "ffn.0", "ffn.2")
    for kind in ("weight", "bias")
}
LAYERS = {"hstu": HSTU, "transformer": TRANSFORMER}


def names(config: ModelConfig) -> dict[str, str]:
    """Peer's name -> ours, of every dense tensor. ValueError for what this layout has no name for."""
    if config.backbone not in LAYERS:
        raise ValueError(f"the peer layout knows {', '.join(LAYERS)}, not backbone {config.backbone!r}")
    if taken := [name for name in config.context if name in ("item", "action") or "/" in name]:
        raise ValueError(f"context features {taken}: the peer layout names tables so, joined by '/'; rename them")
    layer = LAYERS[config.backbone].items()
    out = {f"{LAYER}{i}.{a}": f"backbone.layers.{i}.{b}" for i in range(config.num_layers) for a, b in layer}
    out[f"{PREPROCESSOR}_positional_encoder._position_embeddings_weight"] = "sequence.position_embedding.weight"
    mlps = [("_mlp._mlp.", "head.mlp.", i, 3 * i // 2) for i in range(0, 2 * len(config.head_sizes) + 1, 2)]
    if config.mlp_size:
        kinds = (("item", "item"), ("contextual", "context"))
        mlps += [(f"{PREPROCESSOR}_{a}_mlp._mlp.", f"sequence.{b}_mlp.", i, i) for a, b in kinds for i in (0, 2)]
    return out | {f"{a}{i}.{kind}": f"{b}{j}.{kind}" for a, b, i, j in mlps for kind in ("weight", "bias")}


def read(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a file in the peer layout, under the peer's names, on the CPU.

    Raises ValueError for what is not there or not whole, and for a file that holds more than dense tensors, which is
    never unpickled.
    """
    path = Path(folder) / FILE
    if not zipfile.is_zipfile(path):
        why = "is no zip archive: truncated, or not written by torch.save" if path.is_file() else "is missing"
        raise ValueError(f"no checkpoint in the peer layout in {folder}: {path} {why}")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load compares no checksums
                raise ValueError(f"{damaged} is damaged, or was saved without its checksum")
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile archive raises is not documented
        raise ValueError(f"{path} is refused: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    state = found.get("model_state_dict") if isinstance(found, dict) else None
    if not isinstance(state, dict) or not state or not all(_plain(*item) for item in state.items()):
        raise ValueError(f"{path} has no key 'model_state_dict' with dense tensors by name")
    return state


def _plain(name: object, x: object) -> bool:
    """Whether it is a name and a tensor that copies into a model's: not sparse, nested, quantized or without data."""
    strided = isinstance(x, Tensor) and (x.layout, x.device.type) == (torch.strided, "cpu")
    return isinstance(name, str) and strided and not (x.is_nested or x.is_quantized)  # type: ignore[attr-defined]


def backbone_of(state: dict[str, Tensor]) -> str | None:
    """Whose layers these are; None of neither."""
    for backbone, layer in LAYERS.items():
        if any(name.startswith(LAYER) and name.split(".", 3)[-1] in layer for name in state):
            return backbone
    return None


def load_peer_weights(model: nn.Module, config: ModelConfig, folder: str | Path, convert: bool = False) -> list[str]:
    """``load_weights`` from the peer layout; returns the tables that the file has not, whose rows the model keeps.

    Raises ValueError: as ``read``; the other backbone; all that does not fit. The model then keeps its old weights.
    """
    state, known, path = read(folder), names(config), Path(folder) / FILE
    if (theirs := backbone_of(state)) not in (None, config.backbone):
        raise ValueError(f"{path} holds layers of backbone {theirs!r}, the model's are {config.backbone!r}")
    ours, tables = model.state_dict(), _tables(config)
    found = {name: x for name, x in state.items() if not name.startswith(SPARSE)}
    found |= (sparse := _split(state, {name: ours[table] for name, table in tables.items()}))
    known |= {name: tables[name] for name in sparse}
    check_fit(path, found, {name: _turned(name, ours[mine]) for name, mine in known.items()}, convert)
    model.load_state_dict({known[name]: _turned(name, x) for name, x in found.items()}, strict=False)
    return [name for name in tables if name not in sparse]


def _turned(name: str, x: Tensor) -> Tensor:
    """From one layout to the other."""
    return x.t() if name.endswith(TRANSPOSED) else x


def save_peer(model: nn.Module, config: ModelConfig, folder: str | Path) -> Path:
    """Write the peer layout, all tables in one flat row behind the dense part; returns the file's path."""
    known, ours = names(config), {name: x.detach().cpu() for name, x in model.state_dict().items()}
    state = {a: _turned(a, ours[b]).contiguous() for a, b in known.items()}
    tables = _tables(config)
    state[f"{FLAT}{'/'.join(tables)}_weights"] = torch.cat([ours[name].flatten() for name in tables.values()])
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        torch.save({"model_state_dict": state}, part)
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _tables(config: ModelConfig) -> dict[str, str]:
    """Table -> our name of its weight."""
    context = {name: f"sequence.context_embedding.{i}.weight" for i, name in enumerate(config.context)}
    return {"item": "sequence.item_embedding.weight", "action": "sequence.action_embedding.weight"} | context


def _split(state: dict[str, Tensor], tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tables out of flat rows whose names are all known and whose sizes add up."""
    out: dict[str, Tensor] = {}
    for key in (name for name in state if name.startswith(FLAT)):
        inside = key.removeprefix(FLAT).removesuffix("_weights").split("/")
        sizes = [tables[name].numel() for name in inside if name in tables]
        if len(sizes) == len(inside) and sum(sizes) == state[key].numel():
            parts = state[key].flatten().split(sizes)
            out |= {name: part.view_as(tables[name]) for name, part in zip(inside, parts, strict=True)}
    return out
