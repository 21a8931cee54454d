"""Commands ``recexp checkpoint …`` and ``recexp export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints, in this layout or in that of recsys-examples.")


@checkpoint_app.command()
def convert(
    source: Path,
    target: Path,
    config: Annotated[Path | None, typer.Option(help="The model's YAML; the other layout does not hold it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the source's own.")] = None,
) -> None:
    """Write a checkpoint folder in the other layout: of this kit (model.safetensors) or of recsys-examples."""
    from recexp import checkpoint, peer_checkpoint
    from recexp.model import RankingModel

    if (target / checkpoint.WEIGHTS).exists() or (target / peer_checkpoint.FILE).exists():
        raise ValueError(f"{target} holds a checkpoint already: name a new folder")
    ours = (source / checkpoint.WEIGHTS).is_file()
    tensors = (checkpoint if ours else peer_checkpoint).read(source)
    if ours:
        of = checkpoint.load_config_of(source)
    elif config:
        of = checkpoint.load_model_config(config)
    else:
        raise ValueError(f"{source} holds no configuration: name the model's by --config")
    own = next((x.dtype for x in tensors.values() if x.dtype.is_floating_point), None)
    model = RankingModel(of, dtype=_dtype(dtype) if dtype else own)
    if ours:
        checkpoint.load_weights(model, of, source, convert=bool(dtype))
        print(f"wrote {peer_checkpoint.save_peer(model, of, target)}")
        return
    if missing := peer_checkpoint.load_peer_weights(model, of, source, convert=bool(dtype)):
        print(f"{source} has no tables {', '.join(missing)} of this size: untrained rows are written for them")
    print(f"wrote {model.save(target)}")


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {name!r}; known: float32, bfloat16, float16")
    return getattr(torch, name)


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
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16: converts the checkpoint.")] = None,
) -> None:
    """Compile a checkpoint into an AOTInductor package, which C++ can serve without Python."""
    from recexp.export.build import export as write
    from recexp.model import RankingModel

    write(RankingModel.load(model, device, _dtype(dtype) if dtype else None), out, page_size or None, max_users)
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
