"""Keys and values of users' histories, kept between requests: look up, allocate, onload, compute, offload, release.

What is cached of a user is known by its token ids, kept exactly. Keys and values of the token at position i depend on
the tokens at positions 0..i, on those positions and on the weights; which kind of token stands at a position (context,
item, action) is the same for every request of a model. So ids that are equal from position 0 on stand for equal keys
and values, wherever the history's window starts: a window that moved shows as other ids, and what agrees is right to
reuse. One cache serves one model, on one stream, one request at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from recexp.cache.host import HostTier
from recexp.cache.pages import OutOfPages, PageAllocator, Pages, check_users
from recexp.metadata import SCRATCH_PAGE, KVCapacity, KVMetadata

Ints = NDArray[np.int64]
NUM_RECORDS = 100_000  # rows of statistics that are kept: a server runs for months
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class CachePlan:
    """What an open request may reuse and where its history goes. B users, in the order of the request.

    reused: int64 [B], tokens from the start of each history that need not be computed. wait(layer) goes before that
    layer's append: an onloaded page that is partly filled would overwrite what was appended to it.
    """

    users: list[int]
    lengths: Ints  # [B] history tokens of the request
    pages: list[Pages]  # of each user's whole history
    on_device: Ints  # [B] tokens that were on the device before
    stored: Ints  # [B] tokens that were held in any tier
    reused: Ints
    wait: Callable[[int], None]
    page_size: int
    num_pages: int
    onloaded: dict[int, int] = field(default_factory=dict)  # user -> bytes
    failed: set[int] = field(default_factory=set)

    def metadata(self, num_candidates: Sequence[int] | Ints, capacity: KVCapacity | None = None) -> KVMetadata:
        """Validated metadata of this request on the host; num_candidates: [B]. `.to(device)` sends it."""
        new, candidates = self.lengths - self.reused, np.asarray(num_candidates, np.int64)
        if candidates.shape != new.shape or (candidates < 0).any():
            raise ValueError(f"num_candidates is {candidates.tolist()}: must be {len(new)} numbers from 0 on")
        out = KVMetadata.build(self.pages, self.lengths, new, candidates, self.page_size, capacity)
        out.validate(self.page_size, self.num_pages)
        return out


class PagedKVCache:
    """One table [num_pages, 2, page_size, num_heads, head_dim] a layer (0: K, 1: V), and on request a tier on the host.

    num_pages counts all pages: page 0 is the scratch page, the next num_capture_pages are set aside for graph capture
    (`capture_pages`), the others are the users'. max_history_length: most history tokens of a user, context included.
    host_bytes: capacity of the host tier, 0 for none; it copies whole chunks of host_chunk_pages pages.
    Raises ValueError for sizes below 1, and for a dtype that is not float64, float32, bfloat16 or float16.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_history_length: int,
        device: torch.device | str = "cpu",
        num_capture_pages: int = 0,
        host_bytes: int = 0,
        host_chunk_pages: int = 4,
    ) -> None:
        sizes = {"num_layers": num_layers, "page_size": page_size, "num_heads": num_heads, "head_dim": head_dim}
        sizes |= {"max_history_length": max_history_length, "host_chunk_pages": host_chunk_pages}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if min(num_capture_pages, host_bytes) < 0 or num_pages < 2 + num_capture_pages:
            rule = "none may be negative, and num_pages counts a scratch page, those for capture, and at least one more"
            raise ValueError(f"{num_pages=}, {num_capture_pages=}, {host_bytes=}: {rule}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: must be one of {', '.join(map(str, DTYPES))}")
        shape = (num_pages, 2, page_size, num_heads, head_dim)
        self.page_size, self.max_history_length = page_size, max_history_length
        self.tables: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.capture_pages = range(SCRATCH_PAGE + 1, SCRATCH_PAGE + 1 + num_capture_pages)
        self.pages = PageAllocator(num_pages, page_size, num_reserved=self.capture_pages.stop)
        self.host = HostTier(self.tables, host_bytes, host_chunk_pages)
        self.weights_version: Hashable = None
        self.records: deque[dict[str, object]] = deque(maxlen=NUM_RECORDS)
        self._tokens: dict[int, Ints] = {}  # ids of what the device or the host holds, whichever is more
        self._num_requests, self._is_open = 0, False

    @contextmanager
    def request(
        self, user_ids: Sequence[int], token_ids: Sequence[Ints], *, weights_version: Hashable
    ) -> Iterator[CachePlan]:
        """Open a request: token_ids holds each user's whole history (context, item, action, …), integers [h].

        Another weights_version than last time empties the cache. Inside, append every token behind `plan.reused` in
        every layer. On a normal exit that is what the cache holds, and what is new is copied to the host; on an
        exception each user of the batch keeps what was held before and is still whole. Raises, with the cache
        unchanged, OutOfPages, and ValueError for bad or repeated user ids and for histories not integer or too long.
        """
        users, histories = self._check(user_ids, token_ids)
        if weights_version != self.weights_version:
            self.clear()
            self.weights_version = weights_version
        plan = self._allocate(users, histories)
        self._is_open = True
        try:
            self._onload(plan)
            yield plan
            self._commit(plan, histories)
        except BaseException:
            self._roll_back(plan)
            raise
        finally:
            self._is_open = False

    def clear(self) -> None:
        """Forget every user, on the device and on the host. Waits for copies under way."""
        if self._is_open:
            raise ValueError("the cache cannot be cleared while a request is open: leave it first")
        self._unpin(wait=True)
        self.pages.clear()
        self.host.chunks.clear()
        self._tokens.clear()

    def evict(self, user: int) -> None:
        """Free the user's device pages now; a host copy stays."""
        if self._is_open:
            raise ValueError(f"user {user} cannot be evicted while a request is open: leave it first")
        self._unpin(wait=self.pages.pinned(user))
        self.pages.release(user)
        self._trim(user)

    def cached_tokens(self, user: int) -> Ints:
        """Ids of the tokens whose keys and values are held, in either tier."""
        return self._tokens.get(user, np.zeros(0, np.int64))

    def statistics(self) -> pd.DataFrame:
        """One row a user and request that succeeded, the newest 100,000.

        tier: "device", "host", "miss" (nothing reused) or "partial" (less than was both held and asked for: ids
        differ). Candidates are never cached and not counted. pages_wasted: the unused share of the last page.
        """
        return pd.DataFrame(self.records)

    def _check(self, user_ids: Sequence[int], token_ids: Sequence[Ints]) -> tuple[list[int], list[Ints]]:
        if self._is_open:
            raise ValueError("a request is open: leave it before the next one")
        users = check_users(user_ids)
        if len(token_ids) != len(users):
            raise ValueError(f"{len(token_ids)} histories for {len(users)} users: give one each")
        for row, ids in enumerate(token_ids):
            if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(f"token ids in row {row} are {type(ids).__name__}: must be a 1-D integer array")
            if len(ids) > self.max_history_length:
                limit = f"max_history_length is {self.max_history_length}: cut it to the model's window"
                raise ValueError(f"history of user {users[row]} (row {row}) has {len(ids)} tokens, {limit}")
        return users, [ids.astype(np.int64) for ids in token_ids]

    def _lookup(self, user: int, ids: Ints) -> int:
        """Tokens of the history that can be reused: up to the last equal one, of the host's copy in whole pages."""
        held = self.cached_tokens(user)
        num = min(len(held), len(ids))
        differs = np.flatnonzero(held[:num] != ids[:num])
        equal = int(differs[0]) if differs.size else num
        if on_device := self.pages.length(user):
            return min(equal, on_device)
        return equal if equal == self.host.length(user) else equal // self.page_size * self.page_size

    def _allocate(self, users: list[int], histories: list[Ints]) -> CachePlan:
        self._unpin()
        lengths = [len(ids) for ids in histories]
        reused = [self._lookup(user, ids) for user, ids in zip(users, histories, strict=True)]
        on_device = [self.pages.length(user) for user in users]
        try:
            evicted = self.pages.allocate(users, lengths)
        except OutOfPages:  # what is being copied to the host can be evicted after all, once it has arrived
            if not self._unpin(wait=True):
                raise
            evicted = self.pages.allocate(users, lengths)
        for user in evicted:
            self._trim(user)
        return CachePlan(
            users,
            np.array(lengths, np.int64),
            [self.pages.pages(user) for user in users],
            np.array(on_device, np.int64),
            np.array([len(self.cached_tokens(user)) for user in users], np.int64),
            np.array(reused, np.int64),
            self.host.wait,
            self.page_size,
            self.pages.num_pages,
        )

    def _onload(self, plan: CachePlan) -> None:
        if any(self.pages.pinned(user) for user in plan.users):
            self.host.fence()  # a history that changed overwrites pages that may still be on their way to the host
        rows = np.flatnonzero((plan.on_device == 0) & (plan.reused > 0))
        jobs = [(plan.users[row], plan.pages[row][: -(-plan.reused[row] // self.page_size)]) for row in rows]
        if jobs:
            plan.failed = self.host.onload(jobs)
            plan.reused[[user in plan.failed for user in plan.users]] = 0
        plan.onloaded = {user: len(pages) * self.host.page_bytes for user, pages in jobs if user not in plan.failed}

    def _commit(self, plan: CachePlan, histories: list[Ints]) -> None:
        for layer in range(len(self.tables)):  # pages may be given away from here on
            plan.wait(layer)
        jobs = []
        for row, user in enumerate(plan.users):
            reused, length = int(plan.reused[row]), int(plan.lengths[row])
            self._tokens[user] = histories[row]
            if self.host.length(user) > reused:
                self.host.chunks.truncate(user, reused // self.page_size * self.page_size)
            if self.host.length(user) < length:
                jobs.append((user, plan.pages[row], length))
        offloaded, failed, evicted = self.host.offload(jobs)
        for user in offloaded:
            self.pages.pin(user)
        for user in (*plan.users, *evicted):
            self._trim(user)
        self._unpin()
        self._record(plan, offloaded, failed)

    def _roll_back(self, plan: CachePlan) -> None:
        self.host.fence()
        for user, reused, on_device in zip(plan.users, plan.reused, plan.on_device, strict=True):
            keep = int(min(reused, on_device))  # what lies behind may be half written
            self.pages.truncate(user, 0 if self.host.length(user) > keep else keep)
            self._trim(user)

    def _trim(self, user: int) -> None:
        """Keep the ids of what is still held."""
        held = max(self.pages.length(user), self.host.length(user))
        if not held:
            self._tokens.pop(user, None)
        elif held < len(self._tokens[user]):
            self._tokens[user] = self._tokens[user][:held].copy()

    def _unpin(self, wait: bool = False) -> int:
        done = self.host.completed(wait)
        for user in done:
            self.pages.unpin(user)
        return len(done)

    def _record(self, plan: CachePlan, offloaded: dict[int, int], failed: set[int]) -> None:
        for row, user in enumerate(plan.users):
            reused, length, stored = int(plan.reused[row]), int(plan.lengths[row]), int(plan.stored[row])
            tier = "miss" if not reused else "device" if plan.on_device[row] else "host"
            tier = "partial" if 0 < reused < min(stored, length) else tier
            record: dict[str, object] = {"request": self._num_requests, "user": user, "tier": tier}
            record |= {"tokens_reused": reused, "tokens_computed": length - reused}
            record |= {"bytes_onloaded": plan.onloaded.get(user, 0), "bytes_offloaded": offloaded.get(user, 0)}
            record["pages_wasted"] = -length % self.page_size / self.page_size
            record["copy_failed"] = user in plan.failed or user in failed
            self.records.append(record)
        self._num_requests += 1
