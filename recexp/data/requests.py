"""Interactions → ranking requests: which candidates, behind which history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recexp.batch import SequenceBatch
from recexp.config import TaskConfig
from recexp.data.interactions import Floats, Interactions, Ints


@dataclass(frozen=True, eq=False)
class Requests:
    """R requests: history is the user's interactions [0, split), candidates are [split, end). All int64 [R]."""

    user_rows: Ints
    split: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.user_rows)

    def select(self, rows: Sequence[int] | Ints | slice) -> Requests:
        return Requests(self.user_rows[rows], self.split[rows], self.end[rows])

    @property
    def candidate_users(self) -> Ints:
        """int64 [sum(num_candidates)]: the user of each candidate, in the order of ``make_batch``."""
        return np.repeat(self.user_rows, self.end - self.split)


@dataclass(frozen=True, eq=False)
class Splits:
    """A user's first train_end [U] interactions may be trained on. Those up to test_start [U] are history for the test,
    but neither trained on nor tested; validation chooses settings, the test reports."""

    train_end: Ints
    test_start: Ints
    validation: Requests
    test: Requests


def _splits(train_end: Ints, test_start: Ints, lengths: Ints, max_candidates: int) -> Splits:
    def requests(start: Ints, stop: Ints) -> Requests:
        users = np.flatnonzero(stop > start)
        return Requests(users, start[users], np.minimum(start + max_candidates, stop)[users])

    return Splits(train_end, test_start, requests(train_end, test_start), requests(test_start, lengths))


def leave_last(interactions: Interactions, max_candidates: int = 10) -> Splits:
    """The last min(max_candidates, n // 4) of a user's n interactions are test candidates, as many before validation.

    Users with n < 4 have no request; all they did is training.
    """
    lengths = interactions.lengths
    held_out = np.minimum(max_candidates, lengths // 4)
    return _splits(lengths - 2 * held_out, lengths - held_out, lengths, max_candidates)


def global_time(
    interactions: Interactions, max_candidates: int = 10, shares: tuple[float, float] = (0.8, 0.9)
) -> Splits:
    """Two cuts in time for all users, before validation and before test: training knows nothing that came later.

    A cut is the time of the interaction at this share of the log; what happened in that second lies behind it. A user
    active between two cuts has one request there, its first max_candidates interactions; a new one has no history.
    """
    cuts = np.quantile(interactions.timestamps, shares, method="higher")
    earlier = [np.append(0, np.cumsum(interactions.timestamps < cut))[interactions.offsets] for cut in cuts]
    return _splits(np.diff(earlier[0]), np.diff(earlier[1]), interactions.lengths, max_candidates)


def replay(interactions: Interactions, max_candidates: int = 10) -> Requests:
    """The whole log as requests in time order: users return, each time with a longer history.

    A visit is max_candidates interactions in a row of one user (its last visit may be shorter), timed by the first;
    the first visit has no history. Every interaction is a candidate exactly once.
    """
    visits = -(-interactions.lengths // max_candidates)
    users = np.repeat(np.arange(len(visits)), visits)
    split = (np.arange(len(users)) - np.repeat(np.cumsum(visits) - visits, visits)) * max_candidates
    end = np.minimum(split + max_candidates, interactions.lengths[users])
    times = interactions.timestamps[interactions.offsets[users] + split]
    return Requests(users, split, end).select(np.argsort(times, kind="stable"))


def candidate_rows(interactions: Interactions, requests: Requests) -> Ints:
    """int64 [sum(num_candidates)]: the row of each candidate in ``interactions``."""
    lengths = requests.end - requests.split
    shift = interactions.offsets[requests.user_rows] + requests.split - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


def make_batch(interactions: Interactions, requests: Requests) -> tuple[SequenceBatch, Ints]:
    """The requests as one batch, and the action of each candidate, int64 [sum(num_candidates)], for ``labels``.

    user_ids are rows of ``interactions.user_keys``. Histories are whole: ``SequenceBatch.windowed`` cuts them.
    """
    before = Requests(requests.user_rows, np.zeros_like(requests.split), requests.split)
    history = candidate_rows(interactions, before)
    candidates = candidate_rows(interactions, requests)
    batch = SequenceBatch(
        user_ids=torch.tensor(requests.user_rows),
        item_ids=torch.tensor(interactions.item_ids[history]),
        action_ids=torch.tensor(interactions.action_ids[history]),
        candidate_ids=torch.tensor(interactions.item_ids[candidates]),
        num_pairs=torch.tensor(requests.split),
        num_candidates=torch.tensor(requests.end - requests.split),
    )
    return batch, interactions.action_ids[candidates]


def labels(actions: Ints, tasks: Sequence[TaskConfig], action_values: Floats | None = None) -> NDArray[np.float32]:
    """[N] action ids → float32 [N, num_tasks] of 0 and 1.

    "threshold": ``action_values[action] >= value``; without action_values an id stands for itself, which is right for
    whole stars and wrong for half stars. "bit": bit ``value`` of the id.
    """
    values = actions if action_values is None else action_values[actions]
    columns = [values >= t.value if t.kind == "threshold" else actions >> t.value & 1 for t in tasks]
    return np.stack(columns, axis=1).astype(np.float32)
