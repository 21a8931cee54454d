"""Who owns which page: plain host work over integers, no tensor and no device in sight."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
_NONE: Pages = np.zeros(0, np.int32)


class OutOfPages(ValueError):
    """A batch needs more pages than are free and can be evicted. Nothing was changed. All counts are in pages."""

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        super().__init__(
            f"out of pages: the batch needs {needed} more, {free} are free and {evictable} can be evicted (not those "
            "of this batch, nor of users being copied to the host); use a smaller batch or a cache of more pages"
        )
        self.needed, self.free, self.evictable = needed, free, evictable


class PageAllocator:
    """Pages of one table, owned by users. The first num_reserved pages are never given to anybody.

    Users are kept least recently used first; only whole users are evicted, never a pinned one, never one of the batch
    that asks. A call either succeeds or raises with nothing changed.
    """

    def __init__(self, num_pages: int, page_size: int, num_reserved: int = 1) -> None:
        self.num_pages, self.page_size, self.num_reserved = num_pages, page_size, num_reserved
        self.clear()

    def clear(self) -> None:
        """Take every page from every user."""
        self._stack = np.arange(self.num_pages - 1, self.num_reserved - 1, -1, dtype=np.int32)  # free ones first
        self._num_free = len(self._stack)
        self._pages: OrderedDict[int, Pages] = OrderedDict()
        self._lengths: dict[int, int] = {}
        self._pins: Counter[int] = Counter()

    @property
    def free(self) -> Pages:
        """The free pages, the next one to be given last (a view: a test may shuffle it)."""
        return self._stack[: self._num_free]

    @property
    def users(self) -> list[int]:
        """Users that own pages, least recently used first."""
        return list(self._pages)

    def pages(self, user: int) -> Pages:
        """The user's pages, in order of position."""
        return self._pages.get(user, _NONE)

    def length(self, user: int) -> int:
        """Tokens the user's pages were allocated for; 0 for an unknown user."""
        return self._lengths.get(user, 0)

    def allocate(self, user_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Give each user the pages of a history of so many tokens, all of them or none; return the users evicted.

        Held pages stay in place; of a history that shrank, those behind its end are freed. Raises OutOfPages, and
        ValueError for a user id that is no integer, negative, or twice in the batch.
        """
        users = check_users(user_ids)
        wanted = [-(-length // self.page_size) for length in lengths]
        missing = sum(wanted) - sum(len(self.pages(user)) for user in users)
        victims, found = [], self._num_free
        if missing > found:
            batch = set(users)
            for user, pages in self._pages.items():
                if user not in batch and not self._pins[user]:
                    victims.append(user)
                    found += len(pages)
                    if found >= missing:
                        break
            else:
                raise OutOfPages(missing, self._num_free, found - self._num_free)
        for user in victims:
            self.release(user)
        for user, length in zip(users, lengths, strict=True):  # first all that give, then all that take
            if length < self.length(user):
                self.truncate(user, length)
        for user, length, num_wanted in zip(users, lengths, wanted, strict=True):
            if length:
                more = num_wanted - len(self.pages(user))
                new = self._stack[self._num_free - more : self._num_free][::-1]
                self._num_free -= more
                self._pages[user] = np.concatenate([self.pages(user), new])
                self._pages.move_to_end(user)
                self._lengths[user] = length
        return victims

    def truncate(self, user: int, length: int) -> None:
        """Keep the pages of the user's first `length` tokens and free the others."""
        assert length <= self.length(user)
        pages, keep = self.pages(user), -(-length // self.page_size)
        freed = pages[keep:]
        self._stack[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        if length:
            self._pages[user], self._lengths[user] = pages[:keep], length
        elif user in self._pages:
            del self._pages[user], self._lengths[user]

    def release(self, user: int) -> None:
        """Free all pages of a user. The caller has seen to it that no copy of them is under way."""
        self.truncate(user, 0)

    def pin(self, user: int) -> None:
        """Keep the user from being evicted until as many `unpin` calls."""
        self._pins[user] += 1

    def unpin(self, user: int) -> None:
        assert self._pins[user] > 0
        self._pins -= Counter([user])  # forgets users without pins

    def pinned(self, user: int) -> bool:
        return self._pins[user] > 0


def check_users(user_ids: Sequence[int]) -> list[int]:
    """The ids as Python integers. ValueError: not an integer, negative, or given twice; names the rows."""
    rows: dict[int, int] = {}
    for row, value in enumerate(user_ids):
        try:
            user = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            user = -1
        if user < 0:
            raise ValueError(f"user id in row {row} is {value!r}: must be an integer from 0 on")
        if (first := rows.setdefault(user, row)) != row:
            raise ValueError(f"user {user} is in rows {first} and {row}: split the batch, a user comes once in it")
    return list(rows)
