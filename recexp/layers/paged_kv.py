"""History keys and values into a paged table and out of it: plain PyTorch, any device and dtype.

Position p of user b: page `kv_indices[kv_indptr[b] + p // page_size]`, slot `p % page_size` (FlashInfer's NHD layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recexp.batch import describe
from recexp.metadata import KVMetadata


@dataclass(frozen=True)
class OnePass(KVMetadata):
    """Metadata for one pass through the layers: the first of them finds what to append where, the others find it here.

    Made anew for every pass, within what a CUDA graph captures, since lengths change in place between replays.
    """

    seq_offsets: Tensor
    num_rows: int  # of k and v
    page_size: int

    @classmethod
    def of(cls, metadata: KVMetadata, seq_offsets: Tensor, num_rows: int, page_size: int) -> OnePass:
        return cls(**vars(metadata), seq_offsets=seq_offsets, num_rows=num_rows, page_size=page_size)

    @cached_property
    def targets(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each token to append: its row of k and v [new], and indices page [new, 1], half [2], slot [new, 1] of the
        table; int64."""
        users = self.batch_indices.long()
        shift = (self.seq_offsets - self.new_history_offsets)[users]
        rows = torch.arange(users.shape[0], device=users.device) + shift
        rows = rows.clamp_(max=self.num_rows - 1)  # tokens that pad may count past the last row
        page = self.kv_indices[self.kv_indptr[users] + self.position // self.page_size]
        slot = self.position % self.page_size
        return rows, page[:, None].long(), torch.arange(2, device=rows.device), slot[:, None].long()


def append_kv(table: Tensor, metadata: KVMetadata, k: Tensor, v: Tensor, seq_offsets: Tensor) -> None:
    """Write the new history's rows of k and v [T, H, d] into table [num_pages, 2, page_size, H, d], in place.

    seq_offsets int32 [B+1]: a user's rows are its new history, then its candidates, which are not written. Tokens that
    only pad the metadata land in the scratch page. No synchronisation. ValueError, before anything is written, for
    a table of another shape or dtype than k asks for, and for tensors on different devices.
    """
    _check(table, metadata, k, v, seq_offsets)
    if not metadata.position.shape[0]:
        return
    if not isinstance(metadata, OnePass):
        metadata = OnePass.of(metadata, seq_offsets, k.shape[0], table.shape[2])
    rows, page, half, slot = metadata.targets
    # one write and no view of the table: a compiler would copy all pages of the view, and back
    table[page, half, slot] = torch.stack([k, v], dim=1)[rows]  # [new, 2, H, d]


def gather_kv(table: Tensor, metadata: KVMetadata, user: int) -> tuple[Tensor, Tensor]:
    """Keys and values [h, H, d] of one user's total history, in order. Unwritten slots are not read.

    Asks the device for the user's length and place: for the reference path and for tests.
    """
    start, end = metadata.kv_indptr[user : user + 2].tolist()
    length = int(metadata.total_history_lengths[user])
    pages = table[metadata.kv_indices[start:end]]  # [pages, 2, page_size, H, d]
    keys, values = pages.transpose(0, 1).flatten(1, 2)
    return keys[:length], values[:length]


def _check(table: Tensor, metadata: KVMetadata, k: Tensor, v: Tensor, seq_offsets: Tensor) -> None:
    if table.ndim != 5 or table.shape[1] != 2 or table.shape[3:] != k.shape[1:] or k.shape != v.shape:
        raise ValueError(
            f"the table is {describe(table)}, k {describe(k)} and v {describe(v)}: "
            "needed are a table [num_pages, 2, page_size, H, d], and k and v [T, H, d]"
        )
    if not table.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the table holds {table.dtype}, k is {k.dtype}, v {v.dtype}: make the cache in the model's dtype"
        )
    devices = {"k": k.device, "v": v.device, "seq_offsets": seq_offsets.device, "metadata": metadata.buffer.device}
    for name, device in devices.items():
        if device != table.device:
            raise ValueError(f"{name} is on {device}, the table on {table.device}: send it there first")
    if seq_offsets.shape[0] != metadata.kv_indptr.shape[0]:  # len() would fix it in an export
        raise ValueError(
            f"seq_offsets has {len(seq_offsets)} entries, the metadata's kv_indptr {len(metadata.kv_indptr)}"
        )
