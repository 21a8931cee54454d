"""The host tier: copies of users' pages in host memory, a prefix of each user's history."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from recexp.cache.pages import OutOfPages, PageAllocator, Pages

log = logging.getLogger(__name__)


class HostTier:
    """Whole chunks of pages on the host, with a capacity and a least-recently-used order of their own.

    On CUDA the memory is pinned, and copies run on a side stream: all of them, so that host pages given anew and device
    pages of an onload are used in the order of the calls. On the CPU the same code copies at once. A user whose copy
    fails has no host copy afterwards; failures are counted, and the first one is logged.
    """

    def __init__(self, tables: Sequence[Tensor], capacity_bytes: int, chunk_pages: int) -> None:
        table = tables[0]
        self.page_bytes = len(tables) * table[0].nbytes  # K and V of one page in all layers
        self.chunk_pages = chunk_pages
        num_chunks = capacity_bytes // (self.page_bytes * chunk_pages)
        self.chunks = PageAllocator(num_chunks, chunk_pages * table.shape[2], num_reserved=0)
        self.num_failed = 0
        self._tables = tables
        shape = (num_chunks * chunk_pages, *table.shape[1:])
        self._copies = [torch.empty(shape, dtype=table.dtype, pin_memory=table.is_cuda) for _ in tables]
        self._stream = torch.cuda.Stream(table.device) if table.is_cuda else None
        self._arrived: list[torch.cuda.Event | None] = [None] * len(tables)
        self._in_flight: deque[tuple[torch.cuda.Event | None, list[int]]] = deque()

    def length(self, user: int) -> int:
        """Tokens of the user's history, from its start on, that the host holds."""
        return self.chunks.length(user)

    def onload(self, jobs: Sequence[tuple[int, Pages]]) -> set[int]:
        """Start copying each user's first host pages into as many device pages; return the users that failed.

        Waits, on the side stream, for what the current stream has been given so far: it may still use those pages.
        """
        failed: set[int] = set()
        with self._side_stream():
            for layer in range(len(self._tables)):
                for user, pages in jobs:
                    if user in failed:
                        continue
                    try:
                        self._to_device(layer, self._host_pages(user)[: len(pages)], pages)
                    except RuntimeError as error:
                        self._report(user, error)
                        failed.add(user)
                        self.chunks.release(user)
                self._arrived[layer] = self._record()
        return failed

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the last onload of one layer's pages."""
        if (event := self._arrived[layer]) is not None:
            torch.cuda.current_stream(self._tables[layer].device).wait_event(event)

    def offload(self, jobs: Sequence[tuple[int, Pages, int]]) -> tuple[dict[int, int], set[int], list[int]]:
        """Start copying what the host lacks of each user: user, all device pages, tokens in them.

        A chunk that was not full is copied again. A user that does not fit keeps the prefix that is there. Returns
        bytes per user copied, users that failed, and users evicted. Whose copy has ended, `completed` says.
        """
        moved: dict[int, int] = {}
        failed: set[int] = set()
        evicted: list[int] = []
        for user, _, _ in jobs:
            self.chunks.pin(user)  # users of one batch do not push each other out
        try:
            with self._side_stream():
                for user, pages, length in jobs:
                    first = self.length(user) // self.chunks.page_size * self.chunk_pages
                    try:
                        evicted += self.chunks.allocate([user], [length])
                        failed.add(user)  # until every copy is under way
                        host_pages = self._host_pages(user)[first : len(pages)]
                        for layer in range(len(self._tables)):
                            self._to_host(layer, pages[first:], host_pages)
                    except OutOfPages:
                        continue
                    except RuntimeError as error:
                        self._report(user, error)
                        continue
                    failed.remove(user)
                    moved[user] = len(host_pages) * self.page_bytes
                self._in_flight.append((self._record(), list(moved)))
        finally:
            for user, _, _ in jobs:
                self.chunks.unpin(user)
            for user in failed:
                self.chunks.release(user)
        return moved, failed, evicted

    def completed(self, wait: bool = False) -> list[int]:
        """Users of offloads that ended since the last call, once an offload. wait: first wait for those under way."""
        users = []
        while self._in_flight and ((event := self._in_flight[0][0]) is None or wait or event.query()):
            if event is not None:
                event.synchronize()
            users += self._in_flight.popleft()[1]
        return users

    def fence(self) -> None:
        """Let the current stream wait for every copy started so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _to_device(self, layer: int, host_pages: Pages, device_pages: Pages) -> None:
        table = self._tables[layer]
        staging = table.new_empty(len(host_pages), *table.shape[1:])
        for start, end in _runs(host_pages):
            source = self._copies[layer][host_pages[start] : host_pages[end - 1] + 1]
            staging[start:end].copy_(source, non_blocking=True)
        table.index_copy_(0, self._send(device_pages), staging)

    def _to_host(self, layer: int, device_pages: Pages, host_pages: Pages) -> None:
        staging = self._tables[layer].index_select(0, self._send(device_pages))
        for start, end in _runs(host_pages):
            target = self._copies[layer][host_pages[start] : host_pages[end - 1] + 1]
            target.copy_(staging[start:end], non_blocking=True)

    def _send(self, pages: Pages) -> Tensor:
        index = torch.from_numpy(pages.astype(np.int64))
        return index if self._stream is None else index.pin_memory().to(self._stream.device, non_blocking=True)

    def _host_pages(self, user: int) -> Pages:
        chunks = self.chunks.pages(user)
        return (chunks[:, None] * self.chunk_pages + np.arange(self.chunk_pages, dtype=np.int32)).ravel()

    def _side_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _report(self, user: int, error: RuntimeError) -> None:
        if not self.num_failed:
            log.warning(
                "a copy of user %d's pages failed: %s; from here on such failures are only counted", user, error
            )
        self.num_failed += 1


def _runs(pages: Pages) -> Iterator[tuple[int, int]]:
    """Ranges of `pages` that are consecutive in memory: each is one copy."""
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    yield from zip([0, *breaks], [*breaks, len(pages)], strict=True)
