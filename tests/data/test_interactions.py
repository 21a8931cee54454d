import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recexp.data.interactions import Interactions

events = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(5, 9), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40
)


def from_rows(rows, values=(np.nan, 1, 2)):
    return Interactions.from_events("log", *map(np.array, zip(*rows, strict=True)), values)


@given(events)
def test_rows_by_user_and_time_with_ties_in_order_of_arrival(rows):
    interactions = from_rows(rows)
    columns = (
        interactions.user_keys[interactions.user_rows],
        interactions.item_keys[interactions.item_ids],
        interactions.action_ids,
        interactions.timestamps,
    )
    # Python's sort is stable
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == sorted(rows, key=lambda row: (row[0], row[3]))
    assert interactions.offsets[0] == 0
    assert interactions.lengths.min() > 0
    assert interactions.num_items == len({row[1] for row in rows})
    assert interactions.num_actions == 3


def test_fingerprint_covers_what_a_model_sees_and_not_the_name():
    base = from_rows([("a", 5, 1, 0), ("a", 6, 2, 1), ("b", 5, 0, 2)])
    assert dataclasses.replace(base, name="other").fingerprint == base.fingerprint
    prints = {base.fingerprint}
    for field in ("offsets", "item_ids", "action_ids", "timestamps", "action_values"):
        changed = getattr(base, field).copy()
        changed[1] += 1
        prints.add(dataclasses.replace(base, **{field: changed}).fingerprint)
    prints.add(dataclasses.replace(base, item_keys=np.arange(9)).fingerprint)
    assert len(prints) == 7


def test_bad_events_are_refused():
    with pytest.raises(ValueError, match=r"log: users, items, actions and times have \[2, 2, 1, 2\] entries"):
        Interactions.from_events("log", [1, 1], [1, 2], [0], [5, 6], [0.0])
    with pytest.raises(ValueError, match="log holds no interactions"):
        Interactions.from_events("log", [], [], [], [], [0.0])
    with pytest.raises(ValueError, match=r"action id 2 of event 1 is outside 0 … 1; values needs an entry per id"):
        Interactions.from_events("log", [1, 1], [1, 2], [1, 2], [5, 6], [0.0, 1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_ids": np.array([1.5, 1.0])}, "action ids are float64"),
        ({"times": np.array([0.0, np.nan])}, "finite times"),
        ({"users": np.array(["a", None], dtype=object)}, "a user or an item is None"),
    ],
)
def test_what_is_no_id_or_time_is_refused(change, message):
    columns = {"users": ["a", "b"], "items": [1, 2], "action_ids": [1, 1], "times": [0, 1]}
    with pytest.raises(ValueError, match=message):
        Interactions.from_events("log", **(columns | change), values=(np.nan, 1))
