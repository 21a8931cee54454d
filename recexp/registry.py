"""A table of names that the user can extend: unknown names are refused with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message about ``name``: the nearest known name, if any is near, and all known ones."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"


class Registry(Generic[T]):
    """Names to entries, in order of registration.

    The package's own names are fixed once it is imported; a name of the user's may be registered again and is then
    replaced, so that a notebook cell can be run twice.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}
        self._fixed: frozenset[str] = frozenset()

    def add(self, name: str, entry: T) -> None:
        if name in self._fixed:
            raise ValueError(
                f"{self.what} {name!r} belongs to recexp; choose a name other than {', '.join(sorted(self._fixed))}"
            )
        self._entries[name] = entry

    def fix(self) -> None:
        """Make the names registered so far the package's own."""
        self._fixed = frozenset(self._entries)

    def is_fixed(self, name: str) -> bool:
        """Whether the name is the package's own, not the user's."""
        return name in self._fixed

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(f"unknown {self.what} {name!r}; {nearest(name, list(self))}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
