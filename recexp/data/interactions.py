"""Users' histories of one data set, as flat arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Interactions:
    """N interactions of U users, user after user, oldest first; those of equal time keep the order of their file.

    offsets: int64 [U+1], where each user's rows start. item_ids, action_ids, timestamps: int64 [N], ids dense from 0,
    time in seconds. user_keys [U], item_keys [num_items]: the ids of the source. action_values: float64 [num_actions],
    what each action id stands for, such as its rating; NaN for an id that does not occur (0 is padding).
    """

    name: str
    offsets: Ints
    item_ids: Ints
    action_ids: Ints
    timestamps: Ints
    user_keys: NDArray[Any]
    item_keys: NDArray[Any]
    action_values: Floats

    @classmethod
    def from_events(
        cls,
        name: str,
        users: ArrayLike,
        items: ArrayLike,
        action_ids: ArrayLike,
        times: ArrayLike,
        values: Sequence[float],
    ) -> Interactions:
        """Your own log: four arrays with an entry per event, in any order; users and items are integers or strings.

        The order of the arrays breaks ties of time; values are the action_values. Raises ValueError when the arrays are
        empty or differ in length, hold what is no id or time, or an action id is outside 0 … len(values) - 1.
        """
        users, items, actions, times = (np.asarray(a) for a in (users, items, action_ids, times))
        if len(set(lengths := [len(a) for a in (users, items, actions, times)])) > 1:
            found = f"users, items, actions and times have {lengths} entries"
            raise ValueError(f"{name}: {found}; give one of each per event")
        if not len(users):
            raise ValueError(f"{name} holds no interactions; give at least one")
        if actions.dtype.kind not in "iu" or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
            found = f"action ids are {actions.dtype} and times {times.dtype}"
            raise ValueError(f"{name}: {found}; give integers and finite times")
        if None in users or None in items:
            raise ValueError(f"{name}: a user or an item is None; leave such events out")
        if len(bad := np.flatnonzero((actions < 0) | (actions >= len(values)))):
            limit = f"0 … {len(values) - 1}; values needs an entry per id"
            raise ValueError(f"{name}: action id {actions[bad[0]]} of event {bad[0]} is outside {limit}")
        user_keys, user_rows = np.unique(users, return_inverse=True)
        item_keys, item_ids = np.unique(items, return_inverse=True)
        order = np.lexsort((times, user_rows))  # stable: by user, then time, then order of arrival
        offsets = np.concatenate([[0], np.cumsum(np.bincount(user_rows))])
        in_order = [a[order].astype(np.int64) for a in (item_ids, actions, times)]
        action_values = np.asarray(values, dtype=np.float64)
        return cls(name, offsets, in_order[0], in_order[1], in_order[2], user_keys, item_keys, action_values)

    @property
    def num_items(self) -> int:
        return len(self.item_keys)

    @property
    def num_actions(self) -> int:
        """Action ids with the padding id 0: the rows an action table needs."""
        return len(self.action_values)

    @property
    def lengths(self) -> Ints:
        """int64 [U]: interactions of each user."""
        return np.diff(self.offsets)

    @cached_property
    def user_rows(self) -> Ints:
        """int64 [N]: the user of each interaction."""
        return np.repeat(np.arange(len(self.user_keys)), self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything a model can see, so that a checkpoint names the data it was trained on."""
        digest = hashlib.sha256(str(self.num_items).encode())
        for array in (self.offsets, self.item_ids, self.action_ids, self.timestamps, self.action_values):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
