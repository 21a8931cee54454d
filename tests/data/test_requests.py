import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recexp.config import DataConfig, TaskConfig
from recexp.data import Interactions, global_time, leave_last, make_splits
from recexp.data.requests import candidate_rows, labels, make_batch, replay

TASKS = DataConfig().tasks


@st.composite
def logs(draw):
    """Up to 6 users with up to 60 events in few distinct seconds, so that ties abound; every event has its own item."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = sum(lengths)
    users = np.repeat(np.arange(len(lengths)), lengths)
    times = rng.integers(0, 20, total)
    return Interactions.from_events("log", users, np.arange(total), rng.integers(1, 6, total), times, range(6))


def check_no_leak(interactions, requests):
    assert (requests.split >= 0).all()
    assert (requests.end > requests.split).all()
    assert (requests.end <= interactions.lengths[requests.user_rows]).all()
    batch, actions = make_batch(interactions, requests)
    items, candidates = (
        batch.item_ids.split(batch.num_pairs.tolist()),
        batch.candidate_ids.split(batch.num_candidates.tolist()),
    )
    for history, ahead in zip(items, candidates, strict=True):  # every event has its own item here
        assert not set(history.tolist()) & set(ahead.tolist())
    assert len(actions) == len(batch.candidate_ids) == len(requests.candidate_users)


@given(logs(), st.integers(1, 12))
def test_leave_last(interactions, max_candidates):
    splits = leave_last(interactions, max_candidates)
    lengths = interactions.lengths
    for requests in (splits.validation, splits.test):
        check_no_leak(interactions, requests)
        assert requests.user_rows.tolist() == [u for u, n in enumerate(lengths) if n >= 4]
        wanted = [min(max_candidates, n // 4) for n in lengths if n >= 4]
        assert (requests.end - requests.split).tolist() == wanted
    users = splits.test.user_rows
    np.testing.assert_array_equal(splits.test.end, lengths[users])
    np.testing.assert_array_equal(splits.test.split, splits.validation.end)  # validation is history of the test
    np.testing.assert_array_equal(splits.validation.split, splits.train_end[users])
    np.testing.assert_array_equal(splits.test.split, splits.test_start[users])
    few = np.flatnonzero(lengths < 4)
    np.testing.assert_array_equal(splits.train_end[few], lengths[few])


@given(logs(), st.integers(1, 12))
def test_global_time(interactions, max_candidates):
    splits = global_time(interactions, max_candidates)
    for requests, start in ((splits.validation, splits.train_end), (splits.test, splits.test_start)):
        check_no_leak(interactions, requests)
        np.testing.assert_array_equal(requests.split, start[requests.user_rows])
        assert (requests.end - requests.split <= max_candidates).all()
        position = np.arange(len(interactions.item_ids)) - interactions.offsets[interactions.user_rows]
        before = position < start[interactions.user_rows]
        known, later = interactions.timestamps[before], interactions.timestamps[~before]
        assert known.max(initial=-1) < later.min()  # one cut for all: nothing after it is known
    assert (splits.train_end <= splits.test_start).all()
    assert (splits.validation.end <= splits.test_start[splits.validation.user_rows]).all()


@given(logs(), st.integers(1, 12))
def test_replay_returns_in_time_order_and_covers_everything_once(interactions, max_candidates):
    requests = replay(interactions, max_candidates)
    check_no_leak(interactions, requests)
    assert sorted(candidate_rows(interactions, requests).tolist()) == list(range(len(interactions.item_ids)))
    assert (np.diff(interactions.timestamps[interactions.offsets[requests.user_rows] + requests.split]) >= 0).all()
    for user in range(len(interactions.user_keys)):
        splits = requests.split[requests.user_rows == user]
        assert splits.tolist() == list(range(0, interactions.lengths[user], max_candidates))


@given(logs(), st.data())
def test_make_batch_against_plain_slices(interactions, data):
    everything = replay(interactions, 7)
    rows = data.draw(st.lists(st.integers(0, len(everything) - 1), max_size=8))
    requests = everything.select(rows)
    batch, actions = make_batch(interactions, requests)
    items, given_actions, candidates, wanted = [], [], [], []
    for user, split, end in zip(requests.user_rows, requests.split, requests.end, strict=True):
        of_user = slice(interactions.offsets[user], interactions.offsets[user + 1])
        items += interactions.item_ids[of_user][:split].tolist()
        given_actions += interactions.action_ids[of_user][:split].tolist()
        candidates += interactions.item_ids[of_user][split:end].tolist()
        wanted += interactions.action_ids[of_user][split:end].tolist()
    assert batch.user_ids.tolist() == requests.user_rows.tolist()
    assert batch.item_ids.tolist() == items
    assert batch.action_ids.tolist() == given_actions
    assert batch.candidate_ids.tolist() == candidates
    assert actions.tolist() == wanted
    assert batch.num_pairs.tolist() == requests.split.tolist()
    assert {t.dtype for t in (batch.user_ids, batch.item_ids, batch.candidate_ids, batch.num_pairs)} == {torch.int64}


def test_a_batch_is_a_copy():
    interactions = Interactions.from_events("log", [0, 0, 0], [0, 1, 2], [1, 1, 1], [0, 1, 2], range(2))
    requests = replay(interactions, 2)
    batch, _ = make_batch(interactions, requests)
    batch.user_ids.add_(1)
    batch.num_pairs.add_(1)
    assert requests.user_rows.tolist() == [0, 0]
    assert requests.split.tolist() == [0, 2]


def test_rows_and_positives_of_movielens_100k(ml100k):
    splits = make_splits(DataConfig(), ml100k)
    assert len(splits.test) == len(splits.validation) == 943
    for requests, positives in ((splits.test, [4_516, 1_841]), (splits.validation, [4_478, 1_733])):
        _, actions = make_batch(ml100k, requests)
        assert len(actions) == 8_374
        assert labels(actions, TASKS).sum(0).tolist() == positives
    by_time = make_splits(DataConfig(protocol="global_time", max_candidates=5), ml100k)
    assert (by_time.test.end - by_time.test.split).max() == 5
    assert ml100k.timestamps[candidate_rows(ml100k, by_time.test)].min() >= np.quantile(ml100k.timestamps, 0.9)


def test_labels_by_threshold_bit_and_half_stars():
    tasks = [TaskConfig(name="high", value=4), TaskConfig(name="bit 1", kind="bit", value=1)]
    wanted = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float32)
    found = labels(np.array([1, 3, 5, 6]), tasks)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)
    half_stars = np.array([np.nan, *np.arange(1, 11) / 2])
    assert labels(np.array([7, 8, 4]), tasks[:1], half_stars).ravel().tolist() == [0, 1, 0]
    assert labels(np.array([7, 8, 4]), tasks[:1]).ravel().tolist() == [1, 1, 1]


@pytest.mark.parametrize(("length", "held_out"), [(3, 0), (4, 1), (39, 9), (40, 10), (400, 10)])
def test_leave_last_by_hand(length, held_out):
    times = np.arange(length)
    interactions = Interactions.from_events("log", np.zeros(length, int), times, np.ones(length, int), times, range(2))
    splits = leave_last(interactions)
    assert len(splits.test.candidate_users) == len(splits.validation.candidate_users) == held_out
    assert splits.train_end.tolist() == [length - 2 * held_out]
