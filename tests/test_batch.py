"""SequenceBatch and TokenBatch: checks that name the row at fault, and the window of long histories."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recexp.batch import SequenceBatch, TokenBatch, window_start


def batch() -> SequenceBatch:
    return SequenceBatch.from_lists(
        [7, 8, 9], [[1, 2, 3], [], [4]], [[5, 4, 3], [], [2]], [[10], [11, 12], []], {"degree": [0, 1, 2]}
    )


def test_select_reorders_whole_requests() -> None:
    picked = batch().select([2, 0])
    assert picked.user_ids.tolist() == [9, 7]
    assert picked.item_ids.tolist() == [4, 1, 2, 3] and picked.action_ids.tolist() == [2, 5, 4, 3]
    assert picked.candidate_ids.tolist() == [10] and picked.num_candidates.tolist() == [0, 1]
    assert picked.context_ids["degree"].tolist() == [2, 0]


@given(st.integers(0, 400), st.integers(1, 60), st.data())
def test_window_keeps_the_newest_and_moves_in_hops(num_pairs: int, max_pairs: int, data: st.DataObject) -> None:
    hop = data.draw(st.integers(1, max_pairs))
    start = window_start(num_pairs, max_pairs, hop)
    expected = math.ceil((num_pairs - max_pairs) / hop) * hop if num_pairs > max_pairs else 0
    assert start == expected
    assert window_start(np.array([num_pairs]), max_pairs, hop).tolist() == [expected]
    assert max_pairs - hop < num_pairs - start <= max_pairs or start == 0


def test_windowed_cuts_only_long_histories() -> None:
    rows = [list(range(n)) for n in (3, 11, 0, 8)]
    b = SequenceBatch.from_lists(range(4), rows, rows, [[0]] * 4).windowed(8, 2)
    assert b.num_pairs.tolist() == [3, 7, 0, 8]
    assert b.item_ids.tolist() == [0, 1, 2, *range(4, 11), *range(8)]
    assert b.windowed(8, 2) is b


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_pairs", torch.tensor([3, -1, 1]), "num_pairs of row 1 is -1"),
        ("num_pairs", torch.tensor([3, 0]), "num_pairs has 2 entries"),
        ("num_pairs", torch.tensor([3, 1, 1]), r"item_ids has 4 entries where num_pairs \(sum 5\)"),
        ("num_candidates", torch.tensor([1, 2, 1]), r"candidate_ids has 3 entries where num_candidates \(sum 4\)"),
        ("action_ids", torch.tensor([1]), "action_ids has 1 entries"),
        ("item_ids", torch.rand(4), "item_ids must be a 1-D int32 or int64 tensor, got torch.float32"),
        ("user_ids", torch.zeros(3, 1, dtype=torch.int64), "user_ids must be a 1-D"),
        ("context_ids", {"degree": torch.tensor([1])}, r"context_ids\['degree'\] has 1 entries"),
    ],
)
def test_lengths_that_disagree(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(batch(), **{field: value})


def test_lists_that_disagree() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 items and 1 actions"):
        SequenceBatch.from_lists([1, 2], [[], [1, 2]], [[], [1]], [[], []])
    with pytest.raises(ValueError, match="candidates has 1 rows for 2 user_ids"):
        SequenceBatch.from_lists([1, 2], [[], []], [[], []], [[]])


@pytest.mark.parametrize(
    ("offsets", "candidates", "longest", "message"),
    [
        ([0, 3, 5], [1, 3], 5, "row 1 has 3 candidates and 2 tokens"),
        ([0, 3, 5], [-1, 1], 5, "row 0 has -1 candidates"),
        ([0, 6, 5], [0, 0], 6, "fall from 6 to 5 at row 1"),
        ([0, 3, 4], [0, 0], 5, "run from 0 to 4; 5 tokens need 0 to 5"),
        ([0, 5], [0, 0], 5, "seq_offsets has 2 entries and num_candidates 2"),
        ([0, 3, 5], [0, 0], 2, "max_seqlen 2 is below 3"),
    ],
)
def test_token_batch(offsets: list[int], candidates: list[int], longest: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatch(
            torch.zeros(5, 4),
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(candidates, dtype=torch.int32),
            longest,
        )
