"""Where the history keys and values of a batch lie in a paged table: the one thing that layers and cache both know.

FlashInfer's paged-KV layout: page ids of all users in one row, offsets per user, used slots of the last page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.integer]
SCRATCH_PAGE = 0  # page of every table that no user is ever given: whatever has no real target is written there
_ALIGN = 4  # every field starts on 16 bytes: Triton compiles other variants for pointers aligned worse


class KVCapacity(NamedTuple):
    """Room of a metadata buffer: users, and pages and new history tokens of all users together."""

    batch_size: int
    num_pages: int
    num_tokens: int


@dataclass(frozen=True)
class KVMetadata:
    """Pages, lengths and append targets of B users. All fields int32, views of the one `buffer`, on its device.

    Position p of user b lies in page `kv_indices[kv_indptr[b] + p // page_size]`, slot `p % page_size`.

    With a capacity the fields are longer than their used part, and the tail is set as well: users behind the last have
    no pages and no tokens (offsets repeat their last value), page ids are SCRATCH_PAGE, and tokens to append have
    `batch_indices = B` with B the capacity and `position` 0 to page_size - 1 in turn: writes to one slot would wait for
    each other. `kv_indices[kv_indptr[B]]` is the first id behind the used
    ones, the scratch page: a kernel that follows the rule above needs no mask for the tail.
    """

    kv_indices: Tensor  # [pages in batch] page ids, user after user
    kv_indptr: Tensor  # [B+1] where each user's pages start in kv_indices
    kv_last_page_len: Tensor  # [B] used slots of the last page, 1..page_size; 0 only without history
    total_history_lengths: Tensor  # [B] cached + new history, candidates not counted
    total_history_offsets: Tensor  # [B+1]
    new_history_offsets: Tensor  # [B+1] history tokens of this call
    batch_indices: Tensor  # [new history tokens] user row of each token to append
    position: Tensor  # [new history tokens] its absolute position in the history
    kv_seqlens: Tensor  # [B] total history + candidates
    kv_seqlen_offsets: Tensor  # [B+1]
    buffer: Tensor  # all of the above, one after the other

    @classmethod
    def on_buffer(cls, buffer: Tensor | None, batch_size: int, num_pages: int, num_tokens: int) -> KVMetadata:
        """Lay the fields over an int32 buffer; None makes a zeroed one on the host, pinned where CUDA exists."""
        b, b1 = batch_size, batch_size + 1
        sizes = (num_pages, b1, b, b, b1, b1, num_tokens, num_tokens, b, b1)
        padded = [_padded(size) for size in sizes]
        if buffer is None:
            buffer = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=torch.cuda.is_available())
        return cls(*[part[:size] for part, size in zip(buffer.split(padded), sizes, strict=True)], buffer)  # type: ignore

    @property
    def _sizes(self) -> KVCapacity:
        return KVCapacity(len(self.kv_seqlens), len(self.kv_indices), len(self.position))

    @classmethod
    def build(
        cls,
        pages: Sequence[Ints],
        total: Ints,
        new: Ints,
        num_candidates: Ints,
        page_size: int,
        capacity: KVCapacity | None = None,
    ) -> KVMetadata:
        """Metadata on the host: the pages of each of B users in order, [B] total history, new history and candidates.

        Raises ValueError where the capacity is too small, or a user's pages are not those of the history's length.
        """
        page_ids = np.concatenate([np.zeros(0, np.int32), *pages])
        need = KVCapacity(len(total), len(page_ids), int(np.sum(new)))
        room = capacity or need
        for name, needed, available in zip(need._fields, need, room, strict=True):
            if needed > available:
                raise ValueError(f"metadata needs {name} {needed}, its buffer holds {available}: use a larger capacity")
        out = cls.on_buffer(None, room.batch_size, room.num_pages + (capacity is not None), room.num_tokens)
        pad = (0, room.batch_size - need.batch_size)
        counts, total, new, candidates = (np.pad(x, pad) for x in ([len(p) for p in pages], total, new, num_candidates))
        _equal("pages", counts, -(-total // page_size), f"the pages of {page_size} that the history takes")
        for name, (values, _) in _layout(out, page_ids, total, new, total + candidates, page_size).items():
            getattr(out, name).numpy()[:] = values
        return out

    @classmethod
    def synthetic(
        cls,
        batch_size: int,
        num_tokens: int,
        num_candidates: int,
        page_size: int,
        pages: Sequence[int],
        capacity: KVCapacity | None = None,
    ) -> KVMetadata:
        """A valid request made of nothing, on the host: tokens and candidates (totals) spread evenly over the users.

        Whatever does not divide goes to the first users, one each. History is all new; `pages` are the ids it may take.
        Raises ValueError for non-positive sizes, more candidates than tokens, or too few pages.
        """
        if min(batch_size, num_tokens, page_size) < 1:
            raise ValueError(f"{batch_size=}, {num_tokens=}, {page_size=}: must all be at least 1")
        if not 0 <= num_candidates <= num_tokens:
            raise ValueError(f"num_candidates is {num_candidates}: must be 0 to num_tokens, {num_tokens}")
        users = np.arange(batch_size)
        tokens, candidates = (n // batch_size + (users < n % batch_size) for n in (num_tokens, num_candidates))
        history = tokens - candidates
        ends = np.cumsum(-(-history // page_size))
        if ends[-1] > len(pages):
            short = f"{ends[-1]} pages of {page_size}, {len(pages)} were given: {ends[-1] - len(pages)} short"
            raise ValueError(f"{batch_size} users of {history.sum()} history tokens together need {short}")
        per_user = np.split(np.asarray(pages, np.int32)[: ends[-1]], ends[:-1])
        return cls.build(per_user, history, history, candidates, page_size, capacity)

    def to(self, device: torch.device | str) -> KVMetadata:
        """The same metadata on a device: one copy, asynchronous from pinned memory."""
        return KVMetadata.on_buffer(self.buffer.to(device, non_blocking=True), *self._sizes)

    def copy_(self, source: KVMetadata) -> None:
        """Overwrite every field, tails included, by those of metadata of the same capacity: one copy."""
        if self._sizes != source._sizes:
            raise ValueError(f"{source._sizes} do not fit {self._sizes}: build both for one capacity")
        self.buffer.copy_(source.buffer, non_blocking=True)

    def validate(self, page_size: int, num_pages: int) -> None:
        """Check every relation between the fields, for a table of num_pages pages. ValueError: field, value, rule.

        Runs on the host copy, before it is sent and before anything is written.
        """
        for name in _FIELDS:
            field = getattr(self, name)
            if (got := (field.dtype, field.dim(), field.device.type)) != (torch.int32, 1, "cpu"):
                raise ValueError(f"{name} is {got}: must be int32, 1-D, and on the host (cpu) until it is validated")
        f = {name: getattr(self, name).numpy().astype(np.int64) for name in _FIELDS}
        total, seqlens, starts = f["total_history_lengths"], f["kv_seqlens"], f["new_history_offsets"]
        room = len(self.batch_indices)
        for name, size in {"kv_seqlens": len(total), "new_history_offsets": len(total) + 1, "position": room}.items():
            if len(f[name]) != size:
                raise ValueError(f"{name} has {len(f[name])} entries: the other fields ask for {size}")
        new, used = np.diff(starts), int((-(-total // page_size)).sum())
        _require("total_history_lengths", total, total >= 0, "no length is negative")
        _require("kv_seqlens", seqlens, seqlens >= total, "must not be below total_history_lengths")
        _equal("total_history_offsets", f["total_history_offsets"], _sums(total), "the sum of total_history_lengths")
        steps = np.append(starts[0] == 0, (new >= 0) & (new <= total))
        _require("new_history_offsets", starts, steps, "starts at 0, in steps of 0 to total_history_lengths")
        _require("new_history_offsets", starts, starts <= room, f"counts more than the {room} batch_indices")
        pages, needed = f["kv_indices"][:used], used + (starts[-1] < room)
        if len(self.kv_indices) < needed:
            raise ValueError(f"kv_indices has {len(self.kv_indices)}, new_history_offsets and lengths take {needed}")
        inside = (pages > SCRATCH_PAGE) & (pages < num_pages)
        _require("kv_indices", pages, inside, f"a user's page lies in {SCRATCH_PAGE + 1}..{num_pages - 1}")
        once = np.isin(np.arange(used), np.unique(pages, return_index=True)[1])
        _require("kv_indices", pages, once, "was given before; a page belongs to one user, once")
        for name, (expected, rule) in _layout(self, pages, total, new, seqlens, page_size).items():
            _equal(name, f[name], expected, rule)
        start = self.buffer.data_ptr()
        for name in _FIELDS:
            if len(field := getattr(self, name)) and (field.data_ptr() != start or not field.is_contiguous()):
                raise ValueError(f"{name} is no view of the buffer, which is what is sent: use build, not replace")
            start += _padded(len(field)) * field.itemsize


_FIELDS = [field.name for field in fields(KVMetadata) if field.name != "buffer"]


def _layout(like: KVMetadata, pages: Ints, total: Ints, new: Ints, seqlens: Ints, page_size: int) -> dict[str, tuple]:
    """Field → its values, tails included, as long as in `like`, and their rule. First those that others follow from."""
    position = np.arange(new.sum()) + np.repeat(total - new.cumsum(), new)  # the last new[b] of total[b] positions
    tail = (0, len(like.position) - len(position))
    rows = np.pad(np.repeat(np.arange(len(new)), new), tail, constant_values=len(new))
    position = np.append(position, np.arange(tail[1]) % page_size)
    page_ids = np.pad(pages, (0, len(like.kv_indices) - len(pages)), constant_values=SCRATCH_PAGE)
    last = np.where(total > 0, (total - 1) % page_size + 1, 0)
    return {
        "total_history_lengths": (total, ""),
        "total_history_offsets": (_sums(total), "the running sum of total_history_lengths"),
        "kv_seqlens": (seqlens, ""),
        "kv_seqlen_offsets": (_sums(seqlens), "the running sum of kv_seqlens"),
        "kv_indptr": (_sums(-(-total // page_size)), "the running sum of the pages that total_history_lengths take"),
        "kv_last_page_len": (last, "what total_history_lengths leave for the last page"),
        "kv_indices": (page_ids, "the scratch page behind the pages that kv_indptr counts"),
        "new_history_offsets": (_sums(new), ""),
        "batch_indices": (rows, "the user by new_history_offsets, or B behind them"),
        "position": (position, "contiguous up to total_history_lengths; slots of a page in turn behind them"),
    }


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _sums(lengths: Ints) -> Ints:
    return np.append(0, lengths.cumsum())  # [B] -> [B+1]


def _require(name: str, values: Ints, holds: NDArray[np.bool_], rule: str) -> None:
    if (wrong := np.flatnonzero(~holds)).size:
        raise ValueError(f"{name}[{wrong[0]}] is {values[wrong[0]]}: {rule}")


def _equal(name: str, values: Ints, expected: Ints, rule: str) -> None:
    if len(values) != len(expected):
        raise ValueError(f"{name} has {len(values)} entries: must have {len(expected)}, {rule}")
    if (wrong := np.flatnonzero(values != expected)).size:
        raise ValueError(f"{name}[{wrong[0]}] is {values[wrong[0]]}: must be {expected[wrong[0]]}, {rule}")
