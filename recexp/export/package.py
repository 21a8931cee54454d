"""A package, loaded and called. Packages check nothing themselves, so everything is checked here, on the host."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import recexp
from recexp.batch import SequenceBatch, check_offsets, describe, offsets
from recexp.cache import PagedKVCache
from recexp.devices import resolve
from recexp.export.build import KEY, Manifest, capability
from recexp.export.ranker import METADATA, is_action
from recexp.layers.jagged import row_users
from recexp.layers.sequence import history_ids
from recexp.metadata import SCRATCH_PAGE, KVMetadata

VECTORS = ("DEFAULT", "AVX2", "AVX512")  # each runs what was built for those before it


class Package:
    """A ranker behind ``call``, with the arguments of ``ExportedRanker``; ``Package.load`` makes one of a file."""

    def __init__(self, manifest: Manifest, call: Callable[..., Tensor], device: torch.device | str = "cpu") -> None:
        self.manifest, self.call, self.device = manifest, call, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> Package:
        """Load what ``export`` wrote, on its kind of device unless one is named.

        Raises ValueError, before any of its code is loaded: not such a file, or damaged; built by another torch, for
        another kind of device, or for instructions that this one lacks.
        """
        manifest, here = read_manifest(path), torch.__version__
        if manifest.torch != here:
            raise ValueError(f"{path} was built by torch {manifest.torch}, this is torch {here}: export it again")
        where = resolve(device or ("cpu" if manifest.device == "cpu" else "auto"))
        if where.type != manifest.device or not _runs(manifest.capability, capability(where)):
            raise ValueError(
                f"{path} was built for {manifest.device} ({manifest.capability}), not for {where.type} "
                f"({capability(where)}): export the model on such a device"
            )
        index = -1 if where.type == "cpu" else where.index or 0
        try:
            call = torch._inductor.aoti_load_package(str(path), device_index=index)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not whole, export it again: {str(error).splitlines()[0]}") from error
        return cls(manifest, call, "cpu" if where.type == "cpu" else torch.device("cuda", index))

    def run(
        self, token_ids: Tensor, seq_offsets: Tensor, num_candidates: Tensor, tables: Sequence[Tensor] = (),
        metadata: KVMetadata | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [sum(num_candidates), num_tasks].

        On the host: token_ids int64 [T], every user's row [context | item, action, … | candidates] less its cached
        prefix; seq_offsets int32 [B+1]; num_candidates int32 [B]; metadata. With a cache: one table a layer, to which
        the new history is appended, [num_pages, 2, page_size, H, d] on the package's device.
        Raises ValueError, before anything is written, for whatever does not fit the manifest or each other.
        """
        given = {"token_ids": token_ids, "seq_offsets": seq_offsets, "num_candidates": num_candidates}
        for (name, x), dtype in zip(given.items(), (torch.int64, torch.int32, torch.int32), strict=True):
            if not isinstance(x, Tensor) or (x.dtype, x.ndim, x.device.type, x.is_contiguous()) != (
                dtype,
                1,
                "cpu",
                True,
            ):
                raise ValueError(f"{name} is {describe(x)}: needed is {dtype}, 1-D, contiguous, on the CPU")
        self._check_tables(tables, metadata)
        user = self._check_tokens(token_ids, seq_offsets, num_candidates, metadata)
        if not len(user):
            return torch.zeros(0, self.manifest.model.num_tasks, dtype=self.dtype, device=self.device)
        rows = (torch.arange(len(user)) >= (seq_offsets[1:] - num_candidates)[user]).nonzero().flatten()
        sent = [x.to(self.device) for x in (*given.values(), rows)]
        with torch.inference_mode():
            return self.call(*sent, list(tables), self._fields(metadata))

    def predict(self, batch: SequenceBatch) -> Tensor:
        """``RankingModel.predict`` by a package without a cache."""
        return self.run(*_rows(*self._histories(batch)))

    def predict_cached(self, batch: SequenceBatch, cache: PagedKVCache, user_ids: Tensor | None = None) -> Tensor:
        """``RankingModel.predict_cached`` by a package with a cache; the cache is the caller's."""
        batch, histories = self._histories(batch)
        users = (batch.user_ids if user_ids is None else user_ids).tolist()
        self._check_tokens(*_rows(batch, histories), None)  # before others lose their pages to what is refused
        with cache.request(users, histories, weights_version=self.manifest.weights_sha256) as plan:
            for layer in range(len(cache.tables)):  # a package runs all layers at once
                plan.wait(layer)
            rest = [ids[reused:] for ids, reused in zip(histories, plan.reused, strict=True)]
            return self.run(*_rows(batch, rest), cache.tables, plan.metadata(batch.num_candidates.tolist()))

    def _histories(self, batch: SequenceBatch) -> tuple[SequenceBatch, list[Any]]:
        config = self.manifest.model
        if not batch.batch_size:
            raise ValueError(f"a batch of 0 users; the package takes 1 to {self.manifest.max_users}: skip such a call")
        batch = batch.windowed(config.max_history_pairs, config.window_hop or 1)
        return batch, history_ids(batch, list(config.context))

    def _fields(self, metadata: KVMetadata | None) -> list[Tensor]:
        """The fields on the device; where no history is new, a token that pads and goes to the scratch page."""
        if metadata is None:
            return []
        sent = metadata.to(self.device)
        found = {name: getattr(sent, name) for name in METADATA}
        if not len(metadata.position):
            pad = {"batch_indices": len(sent.kv_seqlens), "position": 0, "kv_indices": SCRATCH_PAGE}
            found |= {name: torch.cat([found[name], found[name].new_tensor([x])]) for name, x in pad.items()}
        return list(found.values())

    def _check_tables(self, tables: Sequence[Tensor], metadata: KVMetadata | None) -> None:
        config, size = self.manifest.model, self.manifest.page_size
        if size is None or not isinstance(metadata, KVMetadata):
            if size is not None or metadata is not None or len(tables):
                raise ValueError(f"the package has {'a' if size else 'no'} KV cache: pass tables and metadata with one")
            return
        num_pages = max((table.shape[0] for table in tables if isinstance(table, Tensor) and table.ndim), default=0)
        shape = [num_pages, 2, size, config.num_heads, config.head_dim]
        wanted = f"{config.num_layers} tables {self.dtype} {shape} on {self.device}, contiguous from 16 bytes on"
        for layer, table in enumerate(tables):
            is_tensor = isinstance(table, Tensor)
            fits = is_tensor and (list(table.shape), table.dtype, table.device) == (shape, self.dtype, self.device)
            if not fits or not table.is_contiguous() or table.data_ptr() % 16:
                at = f" on {table.device}, strides {table.stride()}" if is_tensor else ""
                raise ValueError(f"the table of layer {layer} is {describe(table)}{at}: needed are {wanted}")
        starts = sorted(table.data_ptr() for table in tables)
        if len(tables) != config.num_layers or any(b - a < tables[0].nbytes for a, b in pairwise(starts)):
            raise ValueError(f"{len(tables)} tables, or two in the same memory: needed are {wanted}")
        metadata.validate(size, num_pages)

    def _check_tokens(
        self, token_ids: Tensor, seq_offsets: Tensor, num_candidates: Tensor, metadata: KVMetadata | None
    ) -> Tensor:
        """The refusals; returns the user of each token."""
        config, most, num_users = self.manifest.model, self.manifest.max_users, len(num_candidates)
        if not 1 <= num_users <= most:
            raise ValueError(f"{num_users} users; the package takes 1 to {most}: split the batch, or export for more")
        check_offsets(len(token_ids), seq_offsets, num_candidates, None)
        history = new = seq_offsets.diff() - num_candidates
        if metadata is not None:
            if len(history := metadata.total_history_lengths) != num_users:
                raise ValueError(f"metadata of {len(history)} users, num_candidates of {num_users}: they must agree")
            for name, ours in {"new_history_offsets": offsets(new), "kv_seqlens": history + num_candidates}.items():
                if (theirs := getattr(metadata, name).tolist()) != ours.tolist():
                    raise ValueError(f"{name} is {theirs}, and by seq_offsets and num_candidates {ours.tolist()}")
        limits = {"history tokens": (history, config.max_history_tokens)}
        for name, (counts, limit) in (limits | {"candidates": (num_candidates, config.max_candidates)}).items():
            if counts[row := int(counts.argmax())] > limit:
                raise ValueError(f"row {row} has {int(counts[row])} {name}; the package takes {limit}")
        user = row_users(len(token_ids), seq_offsets)
        position = torch.arange(len(user)) + (history - new - seq_offsets[:-1])[user]
        action = is_action(position, history[user], len(config.context))
        sizes = torch.where(action, config.num_actions, config.num_items)
        for i, size in enumerate(config.context.values()):
            sizes[position == i] = size
        if (wrong := ((token_ids < 0) | (token_ids >= sizes)).nonzero()).numel():
            at = int(wrong[0])
            where = f"token_ids[{at}] (row {int(user[at])}, position {int(position[at])})"
            raise ValueError(f"{where} is {int(token_ids[at])}: ids there are 0 to {int(sizes[at]) - 1}")
        return user


def _rows(batch: SequenceBatch, histories: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids, seq_offsets and num_candidates of histories [h] and the batch's candidates."""
    counts, ids = batch.num_candidates, batch.candidate_ids.cpu().numpy().astype(np.int64)
    candidates = np.split(ids, counts.cumsum(0).numpy()[:-1])
    rows = [ids for pair in zip(histories, candidates, strict=True) for ids in pair]
    lengths = torch.tensor([len(ids) for ids in histories]) + counts
    return torch.from_numpy(np.concatenate(rows)), offsets(lengths, torch.int32), counts.int()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest in a package, of which nothing is run. ValueError where there is none, or the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # the loader would run it as it is
                raise ValueError(f"{damaged} is damaged")
            for name in archive.namelist():
                if name.endswith("metadata.json"):
                    found = json.loads(archive.read(name))
                    if isinstance(found, dict) and KEY in found:
                        return Manifest.model_validate_json(found[KEY])
    except Exception as error:  # what a damaged or hostile archive raises is not documented
        raise ValueError(f"{path} cannot be read as a package of recexp {recexp.__version__}: {error}") from error
    raise ValueError(f"{path} has no manifest: `recexp export` did not write it")


def _runs(built: str, here: str) -> bool:
    """Whether code for one capability runs on another."""
    (machine, *vectors), (other, *others) = built.split(), here.split()
    levels = [VECTORS.index(v) for v in (*vectors, *others) if v in VECTORS]
    return built == here or (machine == other and len(levels) == 2 and levels[0] <= levels[1])


def save_calls(package: Package, path: str | Path, calls: Callable[[], object], tables: Sequence[Tensor] = ()) -> None:
    """Run ``calls`` and torch.save for examples/cpp ``tables`` as they were before, and (inputs, logits) of each call,
    inputs in the package's order, less tables."""
    before, seen, call = [table.cpu().clone() for table in tables], [], package.call

    def record(*given: Any) -> Tensor:
        logits = call(*given)
        seen.append(([x.cpu() for x in (*given[:4], *given[5])], logits.cpu()))
        return logits

    package.call = record
    try:
        calls()
    finally:
        package.call = call
    torch.save({"tables": before, "calls": seen}, path)
