"""Embedding tables from files, read chunk by chunk into a new store.

The store is handed over when it is whole: whatever stops a load leaves the tables in use as they were. It needs memory
for the new table and one chunk; files are read, not mapped, so that their pages do not count as the process's.
"""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from recexp.cache.embeddings.store import EmbeddingStore, engines

CHUNK_BYTES = 32 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Part = tuple[Path | None, Path, int, int]  # file of keys (None: 0, 1, …), of rows, the rows' first byte, their number


def load_safetensors(
    engine: str, path: str | Path, tensor: str, *, num_rows: int | None = None, quiet: bool = False, **options: Any
) -> EmbeddingStore:
    """A store with the rows of a tensor [N, dim] of a safetensors file, key = row, and room for num_rows ≥ N.

    "sequence.item_embedding.weight" is the item table in ``model.safetensors`` of a checkpoint. options: the engine's;
    dtype is the file's unless given. ValueError for a file without such a tensor, whole.
    """
    header: dict[str, Any] = {}
    try:
        with safe_open(path, "pt"), open(path, "rb") as file:  # the former proves the header true of the whole file
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        (count, dim), dtype = header[tensor]["shape"], DTYPES[header[tensor]["dtype"]]
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        what = f"{path} does not hold {tensor!r} as a whole 2-D tensor of floats"
        raise ValueError(f"{what}: {error}; it has {', '.join(header) or 'nothing'}") from error
    part = (None, Path(path), 8 + length + header[tensor]["data_offsets"][0], count)
    return _fill(engine, [part], count if num_rows is None else num_rows, dim, dtype, quiet, {"dtype": dtype} | options)


def load_key_values(
    engine: str, folder: str | Path, table: str, *, num_rows: int, dim: int, quiet: bool = False, **options: Any
) -> EmbeddingStore:
    """A store with the rows of all ``<table>_emb_keys*`` (int64) and ``<table>_emb_values*`` (float32 [N, dim]) files.

    Plain binary, a pair a rank (``…rank_0.world_size_2``), as dynamicemb of NVIDIA/recsys-examples writes them. Of a
    key that occurs twice the last row counts. options: the engine's. ValueError that names all that is missing.
    """
    paths = sorted(p for p in Path(folder).glob(f"{glob.escape(table)}_emb_keys*") if p.is_file())
    ranks = {int(found[1]) for path in paths if (found := re.search(r"world_size_(\d+)", path.name))}
    problems = [] if paths and ranks <= {len(paths)} else [f"{len(paths)} files of keys, of {ranks or 'any'} ranks"]
    parts: list[Part] = []
    for path in paths:
        values = path.with_name(path.name.replace("_emb_keys", "_emb_values"))
        count, rest = divmod(path.stat().st_size, 8)
        size = values.stat().st_size if values.is_file() else "no"
        if rest or size != 4 * dim * count:
            problems.append(f"{values.name} has {size} bytes for {count + rest / 8:g} keys, not {4 * dim} each")
        parts.append((path, values, 0, count))
    if problems:
        raise ValueError(f"{folder} does not hold table {table!r} whole: {'; '.join(problems)}")
    return _fill(engine, parts, num_rows, dim, torch.float32, quiet, options)


def _fill(
    engine: str, parts: list[Part], num_rows: int, dim: int, dtype: torch.dtype, quiet: bool, options: dict[str, Any]
) -> EmbeddingStore:
    store, row_bytes = engines[engine](num_rows, dim, **options), dim * dtype.itemsize
    step = max(CHUNK_BYTES // row_bytes, 1)
    with tqdm(total=sum(part[3] for part in parts), desc="load", unit="row", unit_scale=True, disable=quiet) as bar:
        for path, values, start, count in parts:
            for first in range(0, count, step):
                num = min(step, count - first)
                rows = np.fromfile(values, np.uint8, num * row_bytes, offset=start + first * row_bytes)
                keys = np.fromfile(path, np.int64, num, offset=8 * first) if path else np.arange(first, first + num)
                sent = torch.from_numpy(rows).view(dtype).view(num, dim).to(store.device, store.dtype)
                store.update(torch.from_numpy(keys).to(store.device), sent)
                bar.update(num)
    return store
