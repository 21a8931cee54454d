"""The static buffers that all buckets share, and how a request gets into them.

Everything from the host goes in one copy: a bucket's metadata, offsets, candidates and rows lie one behind the other in
one int32 buffer, laid out anew for every bucket, and in a pinned one like it on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from recexp.batch import TokenBatch
from recexp.config import Bucket, ModelConfig
from recexp.metadata import KVCapacity, KVMetadata

_ALIGN = 4  # int32 fields start on 16 bytes, as in KVMetadata


def capacity(bucket: Bucket, page_size: int, max_history: int) -> KVCapacity:
    """Room of a bucket's metadata: all of its tokens may be new history, all of its users may have the longest one."""
    return KVCapacity(bucket.batch_size, bucket.batch_size * -(-max_history // page_size), bucket.num_tokens)


def num_capture_pages(buckets: Iterable[Bucket], page_size: int) -> int:
    """Pages that a cache must set aside for capture: those of the largest bucket's made-up request."""
    most = 0
    for batch_size, num_tokens, num_candidates in buckets:
        user = np.arange(batch_size)
        tokens, candidates = (n // batch_size + (user < n % batch_size) for n in (num_tokens, num_candidates))
        most = max(most, int((-(-(tokens - candidates) // page_size)).sum()))
    return most


@dataclass
class Static:
    """A bucket's part of the static buffers, what was captured over it, and how it was used."""

    bucket: Bucket
    capacity: KVCapacity  # what a request's metadata is built for
    sizes: list[int]  # of the four parts of ints
    ints: Tensor  # int32, all that is copied from the host: metadata, seq_offsets, num_candidates, rows
    metadata: KVMetadata
    tokens: TokenBatch
    rows: Tensor  # int32 [candidates], where each candidate's row is
    logits: Tensor  # [candidates, num_tasks]
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    capture_ms: float = 0.0
    memory_bytes: int = 0  # by which the pool grew
    launches: int = 0
    replays: int = 0
    tokens_used: int = 0


class StaticBuffers:
    """Buffers for the largest bucket, zeroed, and every bucket's views of them, in the order given.

    requests: buckets with metadata of their capacity, on the host. ``table``: any layer's, for device and dtype.
    """

    def __init__(self, requests: Sequence[tuple[Bucket, KVMetadata]], config: ModelConfig, table: Tensor) -> None:
        cuda, most = table.is_cuda, max(bucket.num_tokens for bucket, _ in requests)
        values = table.new_zeros(most, config.hidden_size)
        logits = table.new_zeros(most, config.num_tasks)
        sizes = [_sizes(bucket, metadata, config.max_candidates) for bucket, metadata in requests]
        ints = torch.zeros(max(map(sum, sizes)), dtype=torch.int32, device=table.device)
        self._staging = torch.zeros(len(ints), dtype=torch.int32, pin_memory=cuda)
        self._staged = torch.cuda.Event() if cuda else None  # the end of its last copy to the device
        self.buckets = []
        for (bucket, metadata), size in zip(requests, sizes, strict=True):
            users, num_tokens, num_rows = bucket.batch_size, bucket.num_tokens, _num_rows(bucket, config.max_candidates)
            room = capacity(bucket, table.shape[2], config.max_history_tokens)
            used = ints[: sum(size)]
            buffer, seq_offsets, num_candidates, rows = used.split(size)
            on_device = KVMetadata.on_buffer(buffer, users, len(metadata.kv_indices), num_tokens)
            lengths = seq_offsets[: users + 1], num_candidates[:users], num_tokens
            tokens = TokenBatch(values[:num_tokens], *lengths, padding=True)
            self.buckets.append(Static(bucket, room, size, used, on_device, tokens, rows[:num_rows], logits[:num_rows]))

    def send(self, static: Static, metadata: KVMetadata, num_tokens: int) -> int:
        """Copy a request's lengths and places, tails included, to the device; returns how many candidates it has."""
        if len(metadata.buffer) != len(static.metadata.buffer):
            raise ValueError(
                f"the metadata fills {len(metadata.buffer)} numbers, the bucket's buffer has "
                f"{len(static.metadata.buffer)}: build it for {static.capacity}"
            )
        candidates = metadata.kv_seqlens.numpy() - metadata.total_history_lengths.numpy()
        ends = np.cumsum(candidates)
        seq_offsets = metadata.new_history_offsets.numpy().copy()
        seq_offsets[1:] += ends  # behind the last user both repeat their last value
        rows = np.arange(ends[-1]) + np.repeat(seq_offsets[1:] - ends, candidates)
        if num_tokens != seq_offsets[-1] or num_tokens > static.bucket.num_tokens or len(rows) > len(static.rows):
            raise ValueError(
                f"{num_tokens} rows of values, metadata of {seq_offsets[-1]} tokens and {len(rows)} candidates: must "
                f"agree, and be at most {static.bucket.num_tokens} tokens and {len(static.rows)} candidates"
            )
        if self._staged is not None:
            self._staged.synchronize()
        host, at = self._staging.numpy(), 0
        for part, size in zip((metadata.buffer.numpy(), seq_offsets, candidates, rows), static.sizes, strict=True):
            host[at : at + len(part)] = part
            host[at + len(part) : at + size] = 0
            at += size
        static.ints.copy_(self._staging[:at], non_blocking=True)
        if self._staged is not None:
            self._staged.record()
        return len(rows)


def _num_rows(bucket: Bucket, max_candidates: int) -> int:
    return min(bucket.num_tokens, bucket.batch_size * max_candidates)


def _sizes(bucket: Bucket, metadata: KVMetadata, max_candidates: int) -> list[int]:
    """Lengths of metadata, seq_offsets, num_candidates and rows in a bucket's buffer."""
    lengths = [len(metadata.buffer), bucket.batch_size + 1, bucket.batch_size, _num_rows(bucket, max_candidates)]
    return [-(-length // _ALIGN) * _ALIGN for length in lengths]
