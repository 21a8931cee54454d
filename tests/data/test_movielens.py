import numpy as np
import pytest

from recexp.config import DataConfig, cache_dir
from recexp.data import Interactions, leave_last, load_interactions, load_movielens
from recexp.data.movielens import LAYOUTS
from recexp.data.requests import candidate_rows

EVENTS = [(7, 30, 4, 100), (3, 10, 5, 50), (7, 20, 1, 100), (7, 10, 3, 90), (3, 30, 2, 50), (3, 20, 2, 40)]


def write(folder, name, rows):
    separator, header = LAYOUTS[name]
    lines = ([header] if header else []) + [separator.join(map(str, row)) for row in rows]
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder / name


def test_movielens_100k_is_whole(ml100k):
    assert len(ml100k.item_ids) == 100_000
    assert len(ml100k.user_keys) == 943
    assert ml100k.num_items == 1_682
    assert ml100k.lengths.max() == 737
    assert ml100k.num_actions == 6
    assert np.bincount(ml100k.action_ids).tolist() == [0, 6_110, 11_370, 27_145, 34_174, 21_201]
    assert (np.diff(ml100k.timestamps)[np.diff(ml100k.user_rows) == 0] >= 0).all()


def test_half_of_the_rows_share_a_time_stamp_so_only_a_stable_sort_makes_the_test_set(ml100k):
    same_user = np.diff(ml100k.user_rows) == 0
    tied = same_user & (np.diff(ml100k.timestamps) == 0)
    assert tied.sum() == 50_561
    test_items = ml100k.item_ids[candidate_rows(ml100k, leave_last(ml100k).test)]
    backwards = slice(None, None, -1)  # the same events, ties the other way round: as right to an unstable sort
    columns = (ml100k.user_rows, ml100k.item_ids, ml100k.action_ids, ml100k.timestamps)
    other = Interactions.from_events("other", *(c[backwards] for c in columns), ml100k.action_values)
    other_items = other.item_ids[candidate_rows(other, leave_last(other).test)]
    test = leave_last(ml100k).test
    pairs = [set(zip(test.candidate_users, items, strict=True)) for items in (test_items, other_items)]
    assert len(pairs[0] - pairs[1]) > 0.05 * len(test_items)


def test_configured_data_set_is_the_cached_file(ml100k):
    loaded = load_interactions(DataConfig(), quiet=True)
    assert loaded.name == "ml-100k"
    assert loaded.fingerprint == ml100k.fingerprint
    again = load_interactions(DataConfig(dataset="movielens", folder=cache_dir() / "data"))
    assert again.fingerprint == ml100k.fingerprint


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("as_folder", [True, False])
def test_every_layout(tmp_path, name, as_folder):
    path = write(tmp_path, name, EVENTS)
    interactions = load_movielens(tmp_path if as_folder else path)
    assert interactions.name == tmp_path.name
    assert interactions.user_keys.tolist() == [3, 7]
    assert interactions.offsets.tolist() == [0, 3, 6]
    assert interactions.item_keys[interactions.item_ids].tolist() == [20, 10, 30, 10, 30, 20]
    assert interactions.action_ids.tolist() == [2, 5, 2, 3, 4, 1]
    assert interactions.timestamps.tolist() == [40, 50, 50, 90, 100, 100]
    np.testing.assert_array_equal(interactions.action_values, [np.nan, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("name", ["ratings.csv", "ratings.dat"])
def test_half_stars(tmp_path, name):
    interactions = load_movielens(write(tmp_path, name, [(1, 1, "0.5", 1), (1, 2, "4.0", 2), (1, 3, "5", 3)]))
    assert interactions.action_ids.tolist() == [1, 8, 10]
    assert interactions.action_values[interactions.action_ids].tolist() == [0.5, 4.0, 5.0]
    assert interactions.num_actions == 11


def test_ties_keep_the_order_of_the_file(tmp_path):
    rng = np.random.default_rng(0)
    items, times = rng.permutation(5_000), rng.integers(0, 3, 5_000)
    interactions = load_movielens(write(tmp_path, "u.data", [(1, i, 3, t) for i, t in zip(items, times, strict=True)]))
    assert interactions.item_ids.tolist() == [i for t in range(3) for i in items[times == t].tolist()]


BAD_LINES = ["1{s}2{s}3", "1{s}2{s}3{s}4{s}5", "x{s}2{s}3{s}4", "1{s}2.5{s}3{s}4", "1{s}2{s}6{s}4", "1{s}2{s}0{s}4"]
BAD_LINES += [
    "1{s}2{s}2.75{s}4",
    "1{s}{s}3{s}4",
    "1{s}2{s}nan{s}4",
    "1{s}2{s}3{s}-4",
    "1;2;3;4",
    "1{s}2{s}3{s}\N{DIGIT ZERO}x",
]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("place", [0, 2])
def test_bad_line_is_named(tmp_path, name, bad, place):
    separator, header = LAYOUTS[name]
    path = write(tmp_path, name, EVENTS)
    lines = path.read_text().splitlines()
    text = bad.format(s=separator)
    lines.insert(place + bool(header), text)
    path.write_text("\n".join(lines))
    expected = separator.join(("user", "item", "rating", "timestamp")).replace("\t", "<tab>")
    with pytest.raises(ValueError, match="expected") as error:
        load_movielens(path)
    assert str(error.value).startswith(f"{path}, line {place + 1 + bool(header)}: {text!r}; expected {expected}, ")


def test_single_colons_and_binary_are_not_ratings(tmp_path):
    (tmp_path / "ratings.dat").write_text("1:2:3:4\n")
    with pytest.raises(ValueError, match=r"ratings\.dat, line 1: '1:2:3:4'; expected user::item::rating::timestamp"):
        load_movielens(tmp_path)
    (tmp_path / "ratings.dat").write_bytes(b"1::2::3::4\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"ratings\.dat, line 2: "):
        load_movielens(tmp_path)


def test_nothing_to_read(tmp_path):
    looked_for = r"one file of ratings\.csv, ratings\.dat, u\.data, ml-100k\.inter; found none"
    for path in (tmp_path, tmp_path / "absent", tmp_path / "ratings.txt"):
        (tmp_path / "ratings.txt").write_text("1,2,3,4\n")
        with pytest.raises(ValueError, match=f"no ratings to read at {path}: give it {looked_for}"):
            load_movielens(path)


def test_two_layouts_in_one_folder(tmp_path):
    write(tmp_path, "u.data", EVENTS)
    write(tmp_path, "ratings.csv", EVENTS)
    with pytest.raises(ValueError, match=r"found ratings\.csv and u\.data"):
        load_movielens(tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_file_without_ratings(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name} holds no ratings"):
        load_movielens(write(tmp_path, name, []))


@pytest.mark.parametrize("name", ["ratings.csv", "ml-100k.inter"])
def test_header_is_checked(tmp_path, name):
    path = write(tmp_path, name, EVENTS)
    path.write_text("\n".join(path.read_text().splitlines()[1:]))
    with pytest.raises(ValueError, match=r"line 1: '7.*30.*4.*100'; expected the header '"):
        load_movielens(path)
