"""Commands ``recexp checkpoint …`` and ``recexp export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints, in this layout or in that of recsys-examples.")


@checkpoint_app.command()
def convert(
    source: Path,
    target: Path,
    config: Annotated[Path | None, typer.Option(help="The model's YAML; the other layout does not hold it.")] = None,
) -> None:
    """Write a checkpoint folder in the other layout: of this kit (model.safetensors) or of recsys-examples."""
    from recexp import checkpoint
    from recexp.config import load_config
    from recexp.model import RankingModel
    from recexp.peer_checkpoint import load_peer_weights, read, save_peer

    if (source / checkpoint.WEIGHTS).is_file():
        config_of = checkpoint.load_config_of(source)
        model = RankingModel(config_of, dtype=next(iter(checkpoint.read(source).values())).dtype)
        checkpoint.load_weights(model, config_of, source)
        print(f"wrote {save_peer(model, config_of, target)}")
        return
    if config is None:
        raise ValueError(f"{source} holds no configuration: name the model's by --config")
    model = RankingModel(load_config(config), dtype=next(iter(read(source).values())).dtype)
    if missing := load_peer_weights(model, model.config, source):
        print(f"{source} has no tables {', '.join(missing)}: the new checkpoint holds untrained rows for them")
    print(f"wrote {model.save(target)}")


@checkpoint_app.command()
def inspect(folder: Path) -> None:
    """The layout, backbone and tensors of a checkpoint folder; nothing in it is run."""
    from recexp import checkpoint, peer_checkpoint

    if (folder / checkpoint.WEIGHTS).is_file():
        layout, backbone, tensors = "recexp", checkpoint.load_config_of(folder).backbone, checkpoint.read(folder)
    else:
        layout, tensors = "recsys-examples", peer_checkpoint.read(folder)
        backbone = peer_checkpoint.backbone_of(tensors) or "unknown"
    print(f"layout {layout}, backbone {backbone}, {sum(x.numel() for x in tensors.values()):,} numbers")
    for name, tensor in tensors.items():
        print(f"  {name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")


def export(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    out: Annotated[Path, typer.Option(help="The package, model.pt2.")],
    page_size: Annotated[int, typer.Option(min=0, help="With a KV cache of such pages; 0: without one.")] = 0,
    max_users: Annotated[int, typer.Option(min=1, help="The largest batch.")] = 256,
    device: Annotated[str, typer.Option(help="Where the package will run: cpu, cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Compile a checkpoint into an AOTInductor package, which C++ can serve without Python."""
    import torch

    from recexp.export.build import export as write
    from recexp.model import RankingModel

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r}; a package computes in float32, bfloat16 or float16")
    write(RankingModel.load(model, device, getattr(torch, dtype)), out, page_size or None, max_users)
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
