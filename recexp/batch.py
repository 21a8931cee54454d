"""One batch of requests: ids outside (SequenceBatch), embeddings inside (TokenBatch).

A request of user b is the token row ``[context | item, action, item, action, … | candidates]``; "history" is context
and pairs together. Lengths live on the host, so that nobody has to ask the device for a maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


def window_start(num_pairs: Any, max_pairs: int, hop: int) -> Any:
    """First pair of the window of a long history: it keeps at most ``max_pairs`` and moves in steps of ``hop`` pairs.

    Between two moves the kept pairs start at the same one, so their cached keys and values stay valid.
    Accepts an int or an integer array and returns the same.
    """
    start = -((max_pairs - num_pairs) // hop) * hop
    return start * (start > 0)


def _check_ids(name: str, ids: Any, length: int, of_what: str) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be a 1-D int32 or int64 tensor, got {describe(ids)}")
    if ids.shape[0] != length:
        raise ValueError(f"{name} has {ids.shape[0]} entries where {of_what} asks for {length}")


def describe(value: Any) -> str:
    """Short text of a value for error messages: dtype and shape of a tensor, the value itself otherwise."""
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} {list(value.shape)}" if is_tensor else f"{type(value).__name__} {value!r:.80}"


@dataclass(frozen=True)
class SequenceBatch:
    """Requests of B users as ids.

    user_ids: int64 [B]. item_ids, action_ids: [sum(num_pairs)], user after user, oldest pair first.
    candidate_ids: [sum(num_candidates)]. num_pairs, num_candidates: int64 [B] on the CPU. context_ids: per feature [B].
    Lengths may be 0. Raises ValueError, naming the row at fault, when shapes, dtypes or lengths disagree.
    """

    user_ids: Tensor
    item_ids: Tensor
    action_ids: Tensor
    candidate_ids: Tensor
    num_pairs: Tensor
    num_candidates: Tensor
    context_ids: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.user_ids, Tensor) or self.user_ids.ndim != 1:
            raise ValueError(f"user_ids must be a 1-D integer tensor, got {describe(self.user_ids)}")
        for name in ("num_pairs", "num_candidates"):
            lengths = getattr(self, name)
            _check_ids(name, lengths, self.batch_size, f"a batch of {self.batch_size} users")
            if lengths.device.type != "cpu":
                raise ValueError(f"{name} is on {lengths.device}; lengths live on the host: pass a CPU tensor")
            if (negative := (lengths < 0).nonzero()).numel():
                row = int(negative[0])
                raise ValueError(f"{name} of row {row} is {int(lengths[row])}; lengths are 0 or more")
        num_pairs, num_candidates = int(self.num_pairs.sum()), int(self.num_candidates.sum())
        _check_ids("user_ids", self.user_ids, self.batch_size, "the batch")
        _check_ids("item_ids", self.item_ids, num_pairs, f"num_pairs (sum {num_pairs})")
        _check_ids("action_ids", self.action_ids, num_pairs, f"num_pairs (sum {num_pairs})")
        _check_ids("candidate_ids", self.candidate_ids, num_candidates, f"num_candidates (sum {num_candidates})")
        for name, ids in self.context_ids.items():
            _check_ids(f"context_ids[{name!r}]", ids, self.batch_size, f"a batch of {self.batch_size} users")

    @property
    def batch_size(self) -> int:
        return self.user_ids.shape[0]

    @classmethod
    def from_lists(
        cls,
        user_ids: Sequence[int],
        items: Sequence[Sequence[int]],
        actions: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
        context: Mapping[str, Sequence[int]] | None = None,
    ) -> SequenceBatch:
        """Build a batch from Python lists, one list per user."""
        for name, rows in (("items", items), ("actions", actions), ("candidates", candidates)):
            if len(rows) != len(user_ids):
                raise ValueError(f"{name} has {len(rows)} rows for {len(user_ids)} user_ids; give one list per user")
        for row, (i, a) in enumerate(zip(items, actions, strict=True)):
            if len(i) != len(a):
                raise ValueError(
                    f"row {row} has {len(i)} items and {len(a)} actions; every item of a history has one action"
                )

        def flat(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([x for row in rows for x in row], dtype=torch.int64)

        return cls(
            user_ids=torch.tensor(list(user_ids), dtype=torch.int64),
            item_ids=flat(items),
            action_ids=flat(actions),
            candidate_ids=flat(candidates),
            num_pairs=torch.tensor([len(r) for r in items], dtype=torch.int64),
            num_candidates=torch.tensor([len(r) for r in candidates], dtype=torch.int64),
            context_ids={k: torch.tensor(list(v), dtype=torch.int64) for k, v in (context or {}).items()},
        )

    def to(self, device: torch.device | str) -> SequenceBatch:
        """Ids on ``device``; the lengths stay on the host."""
        names = ("user_ids", "item_ids", "action_ids", "candidate_ids")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, context_ids={k: v.to(device) for k, v in self.context_ids.items()})

    def select(self, rows: Sequence[int]) -> SequenceBatch:
        """The requests of ``rows``, in that order."""
        index, device = torch.as_tensor(list(rows), dtype=torch.int64), self.item_ids.device
        pairs = _ranges(self.num_pairs[index], offsets(self.num_pairs)[:-1][index]).to(device)
        candidates = _ranges(self.num_candidates[index], offsets(self.num_candidates)[:-1][index]).to(device)
        on_device = index.to(self.user_ids.device)
        return SequenceBatch(
            user_ids=self.user_ids[on_device],
            item_ids=self.item_ids[pairs],
            action_ids=self.action_ids[pairs],
            candidate_ids=self.candidate_ids[candidates],
            num_pairs=self.num_pairs[index],
            num_candidates=self.num_candidates[index],
            context_ids={k: v[on_device] for k, v in self.context_ids.items()},
        )

    def windowed(self, max_pairs: int, hop: int) -> SequenceBatch:
        """Histories longer than ``max_pairs`` cut to their window (see ``window_start``)."""
        start = torch.from_numpy(window_start(self.num_pairs.numpy(), max_pairs, hop))
        if not bool(start.any()):
            return self
        kept = self.num_pairs - start
        index = _ranges(kept, offsets(self.num_pairs)[:-1] + start).to(self.item_ids.device)
        return replace(self, item_ids=self.item_ids[index], action_ids=self.action_ids[index], num_pairs=kept)


def offsets(lengths: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """[n] lengths → [n + 1] offsets: 0 and the running sums."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)


def _ranges(lengths: Tensor, starts: Tensor) -> Tensor:
    """Concatenated ranges ``starts[i] … starts[i] + lengths[i] - 1``."""
    return torch.arange(int(lengths.sum())) + (starts - offsets(lengths)[:-1]).repeat_interleave(lengths)


@dataclass(frozen=True)
class TokenBatch:
    """Embedded tokens of B users, user after user, each user's candidates last.

    values: [T, D]. seq_offsets: int32 [B+1]. num_candidates: int32 [B], on the device of values. max_seqlen: the
    longest user's tokens, or more. padding: rows behind the last user's may belong to nobody. Raises ValueError on
    wrong shapes and dtypes, and, on the CPU where looking costs nothing, on values that disagree, naming the row.
    """

    values: Tensor
    seq_offsets: Tensor
    num_candidates: Tensor
    max_seqlen: int
    padding: bool = False

    def __post_init__(self) -> None:
        check_offsets(self.values.shape[0], self.seq_offsets, self.num_candidates, self.max_seqlen, self.padding)


def check_offsets(
    num_tokens: int, seq_offsets: Tensor, num_candidates: Tensor, max_seqlen: int | None, padding: bool = False
) -> None:
    """Refuse offsets and candidate counts that do not describe ``num_tokens`` rows; see TokenBatch."""
    for name, tensor in (("seq_offsets", seq_offsets), ("num_candidates", num_candidates)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be a 1-D int32 tensor, got {describe(tensor)}")
    if seq_offsets.shape[0] != num_candidates.shape[0] + 1:
        found = f"seq_offsets has {len(seq_offsets)} entries and num_candidates {len(num_candidates)}"
        raise ValueError(f"{found}; B users need B + 1 and B")
    if max_seqlen is not None and (not isinstance(max_seqlen, int) or max_seqlen < 0):
        raise ValueError(f"max_seqlen {max_seqlen!r} must be a host integer, 0 or more")
    if seq_offsets.device.type != "cpu" or num_candidates.device.type != "cpu":
        return
    starts, lengths = seq_offsets.tolist(), seq_offsets.diff().tolist()
    if starts[0] != 0 or starts[-1] > num_tokens or (starts[-1] < num_tokens and not padding):
        found = f"seq_offsets run from {starts[0]} to {starts[-1]}"
        raise ValueError(f"{found}; {num_tokens} tokens need 0 to {num_tokens}")
    for row, (length, candidates) in enumerate(zip(lengths, num_candidates.tolist(), strict=True)):
        if length < 0:
            fall = f"seq_offsets fall from {starts[row]} to {starts[row + 1]} at row {row}"
            raise ValueError(f"{fall}; offsets never fall")
        if not 0 <= candidates <= length:
            raise ValueError(f"row {row} has {candidates} candidates and {length} tokens; give 0 to the row's tokens")
    if max_seqlen is not None and max_seqlen < max(lengths, default=0):
        raise ValueError(f"max_seqlen {max_seqlen} is below {max(lengths)}, the longest row; pass the longest or more")
