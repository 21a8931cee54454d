"""From a model to a package: traced with dynamic sizes, compiled by AOTInductor, a manifest inside."""

from __future__ import annotations

import hashlib
import platform
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.export import Dim, ExportedProgram

import recexp
from recexp.config import ModelConfig
from recexp.config.base import Count
from recexp.export.ranker import METADATA, ExportedRanker, exportable_backend
from recexp.metadata import KVMetadata
from recexp.model import RankingModel

KEY = "recexp"  # of the manifest in the package's metadata
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # as in Manifest


class Manifest(BaseModel):
    """What a package is, and the machine that it runs on. page_size: None of a package without a cache."""

    model: ModelConfig
    page_size: Count | None
    max_users: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    attention_backend: str
    weights_sha256: str
    recexp: str
    torch: str
    device: str  # "cpu" or "cuda"
    capability: str = Field(pattern=r"\S")  # "x86_64 AVX512" or "SM90"

    @property
    def max_tokens(self) -> int:
        """Of one call."""
        return self.max_users * (self.model.max_history_tokens + self.model.max_candidates)


def capability(device: torch.device | str) -> str:
    """What compiled code asks of a device: the SM, or the processor and its vector instructions."""
    device = torch.device(device)
    if device.type == "cuda":
        return "SM{}{}".format(*torch.cuda.get_device_capability(device))
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def weights_hash(model: torch.nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def trace(model: RankingModel, page_size: int | None = None, max_users: int = 256) -> tuple[ExportedProgram, Manifest]:
    """The model as an exported program, every size dynamic, and its manifest. page_size: with a KV cache.

    Says beforehand what the package replaces, and why. ValueError: a dtype; rows in stores; a backend that refuses.
    """
    config, weight = model.config, model.sequence.item_embedding.weight
    if weight.dtype not in DTYPES:
        raise ValueError(f"a package computes in {', '.join(map(str, DTYPES))}, not {weight.dtype}: convert the model")
    if model.stores:
        raise ValueError(f"tables {', '.join(model.stores)} are in stores, not in the model: use_stores({{}}) first")
    backend, why = exportable_backend(model, page_size)
    if why:
        print(f"The package attends by backend {backend!r}: {why}.")
    if config.fused_layers:
        print("The package's HSTU layers are not fused: their kernels are not registered as operators.")
    manifest = Manifest(
        model=config, page_size=page_size, max_users=max_users, dtype=str(weight.dtype).removeprefix("torch."),
        attention_backend=backend, weights_sha256=weights_hash(model), recexp=recexp.__version__,
        torch=torch.__version__, device=weight.device.type, capability=capability(weight.device),
    )  # fmt: skip
    if (most := manifest.max_tokens) >= 2**31:
        raise ValueError(f"{max_users} users may have {most} tokens, offsets reach to 2147483647: export for fewer")
    inputs, sizes = _example(manifest, weight)
    with torch.no_grad():
        program = torch.export.export(ExportedRanker(model, backend), inputs, dynamic_shapes=sizes, strict=False)
    return program, manifest


def export(model: RankingModel, path: str | Path, page_size: int | None = None, max_users: int = 256) -> Manifest:
    """Write an AOTInductor package, whole or not at all; arguments as in ``trace``."""
    path = Path(path)
    if path.suffix != ".pt2" or path.is_dir():
        raise ValueError(f"a package is a file whose name ends in .pt2, got {path}")
    program, manifest = trace(model, page_size, max_users)
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"aot_inductor.metadata": {KEY: manifest.model_dump_json()}}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name  # which the archive holds
        torch._inductor.aoti_compile_and_package(program, package_path=str(part), inductor_configs=options)
        part.replace(path)
    return manifest


def _example(manifest: Manifest, weight: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs to trace with, every size 2 or more, and which of their sizes are dynamic."""
    config, size, most = manifest.model, manifest.page_size, 2**31 - 1
    manifest = manifest.model_copy(update={"max_users": max(manifest.max_users, 8)})  # more than are traced
    new, candidates = np.full(3, config.max_history_tokens), np.array([2, 3, 0])
    ends = np.cumsum(new + candidates)
    inputs: list[Any] = [torch.zeros(int(ends[-1]), dtype=torch.int64), torch.tensor([0, *ends], dtype=torch.int32)]
    inputs += [torch.from_numpy(candidates).int(), torch.arange(5), [], []]
    users, tokens = Dim("users", min=1, max=manifest.max_users), Dim("tokens", min=1, max=manifest.max_tokens)
    sizes: list[Any] = [{0: tokens}, {0: users + 1}, {0: users}, {0: Dim("rows", max=manifest.max_tokens)}, [], []]
    if size:
        counts = -(-new // size)
        pages = np.split(np.arange(1, counts.sum() + 1), np.cumsum(counts)[:-1])
        metadata = KVMetadata.build(pages, new, new, candidates, size)
        shape = (int(counts.sum()) + 7, 2, size, config.num_heads, config.head_dim)
        inputs[4] = [torch.zeros(shape, dtype=weight.dtype) for _ in range(config.num_layers)]
        inputs[5] = [getattr(metadata, name).clone() for name in METADATA]
        named = dict.fromkeys(("batch_indices", "position"), Dim("new", min=1, max=most))
        named["kv_indices"] = Dim("pages", min=1, max=most)
        by_length = {3: users, 4: users + 1}
        sizes[4] = [{0: Dim("num_pages", min=2, max=most)}] * config.num_layers
        sizes[5] = [{0: named.get(name) or by_length[len(x)]} for name, x in zip(METADATA, inputs[5], strict=True)]
    on_device = [[x.to(weight.device) for x in i] if isinstance(i, list) else i.to(weight.device) for i in inputs]
    return tuple(on_device), tuple(sizes)
