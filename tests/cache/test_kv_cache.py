"""PagedKVCache: what it reuses, what it holds after anything that can happen, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recexp.cache import OutOfPages

from .serving import NUM_LAYERS, contents, history, keys_of, make_cache, serve, snapshot

USERS = st.integers(0, 5)


def common_prefix(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class CacheMachine(RuleBasedStateMachine):
    """Users whose histories grow, shrink and change, through a cache too small for them and copies that fail.

    The model: per user the ids on the device and the ids on the host, two dictionaries of lists.
    """

    on = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(device=self.on)
        self.device: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.latest: dict[int, list[int]] = {}
        self.version, self.failures, self.num_failed, self.hold = 0, [], 0, False
        host = self.cache.host
        for name in ("_to_host", "_to_device"):
            setattr(host, name, self.unreliable(getattr(host, name)))
        completed = host.completed
        host.completed = lambda wait=False: completed(wait) if wait or not self.hold else []

    def unreliable(self, copy):
        def copy_or_fail(*arguments):
            if self.failures and self.failures.pop():
                self.num_failed += 1
                raise RuntimeError("the copy failed")
            copy(*arguments)

        return copy_or_fail

    def draw_batch(self, data) -> dict[int, np.ndarray]:
        batch = {}
        for user in data.draw(st.lists(USERS, min_size=1, max_size=3, unique=True)):
            ids = self.latest.get(user, [])
            keep = data.draw(st.sampled_from([len(ids), len(ids), len(ids), 0, len(ids) // 2, max(len(ids) - 1, 0)]))
            new = data.draw(st.lists(st.integers(0, 2), max_size=7))
            batch[user] = np.array((ids[:keep] + new)[:18], np.int64)
        return batch

    def reusable(self, user, ids) -> int:
        if user in self.device:
            return common_prefix(self.device[user], ids)
        equal, held = common_prefix(self.host.get(user, []), ids), len(self.host.get(user, []))
        return equal if equal == held else equal // 3 * 3

    def follow(self) -> None:
        """Take over what only the cache can choose (whom it evicts, what fits), after checking that it is allowed."""
        for model, tier in ((self.device, self.cache.pages), (self.host, self.cache.host.chunks)):
            for user in list(model):
                length = tier.length(user)
                assert length in (0, len(model[user]))
                if not length:
                    del model[user]

    @rule(data=st.data(), failures=st.just([]) | st.lists(st.sampled_from([False, False, True]), max_size=6))
    def request(self, data, failures):
        batch = self.draw_batch(data)
        before, held_by = snapshot(self.cache), {user: self.reusable(user, ids) for user, ids in batch.items()}
        self.failures, failed = list(failures), self.num_failed
        try:
            plan = serve(self.cache, batch, self.version)
        except OutOfPages as error:
            assert error.needed > error.free + error.evictable
            assert sum(-(-len(ids) // 3) for ids in batch.values()) - error.needed <= 12
            assert snapshot(self.cache) == before
            return
        finally:
            self.failures = []
        for user, reused in zip(plan.users, plan.reused, strict=True):
            assert reused == (0 if user in plan.failed else held_by[user])
        records = self.cache.statistics().tail(len(batch)).set_index("user")
        for user, ids in batch.items():
            ids, row = ids.tolist(), records.loc[user]
            failed_onload = user in plan.failed
            held = self.device.get(user) or self.host.get(user) or []
            reused = 0 if failed_onload else held_by[user]
            assert row.tokens_reused + row.tokens_computed == len(ids)
            assert (row.tier == "partial") == (0 < reused < min(len(held), len(ids)))
            assert (row.tier == "miss") == (reused == 0)
            assert (row.bytes_onloaded > 0) == (user not in self.device and reused > 0)
            self.latest[user] = self.device[user] = ids
            on_host = self.cache.host.length(user)
            kept = (
                []
                if failed_onload
                else self.host.get(user, [])[: reused if reused >= len(self.host.get(user, [])) else reused // 3 * 3]
            )
            assert on_host in (0, len(kept), len(ids))
            self.host[user] = ids[:on_host]
            if not row.copy_failed:
                assert (row.bytes_offloaded > 0) == (len(kept) < on_host)
            if not ids:
                del self.device[user]
        assert (records.copy_failed.sum() > 0) == (self.num_failed > failed)
        self.host = {user: ids for user, ids in self.host.items() if ids}
        self.follow()

    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS - 1))
    def request_whose_model_fails(self, data, layer):
        batch = self.draw_batch(data)
        before = snapshot(self.cache)
        try:
            with pytest.raises(KeyError):
                serve(self.cache, batch, self.version, fail_in_layer=layer)
        except OutOfPages:
            assert snapshot(self.cache) == before
            return
        assert list(self.cache.records) == before["records"]
        for user, ids in batch.items():
            whole = common_prefix(self.device.get(user, []), ids)
            assert self.cache.host.length(user) == len(self.host.get(user, []))
            if whole < len(self.host.get(user, [])) or not whole:
                self.device.pop(user, None)
                assert not self.cache.pages.length(user)
            else:
                self.device[user] = self.device[user][:whole]
                assert self.cache.pages.length(user) == whole
        self.follow()

    @rule(user=USERS)
    def evict(self, user):
        self.cache.evict(user)
        self.device.pop(user, None)
        assert not self.cache.pages.length(user)

    @rule()
    def evict_all(self):
        for user in list(self.device):
            self.evict(user)

    @rule(seed=st.integers(0, 9))
    def shuffle(self, seed):
        np.random.default_rng(seed).shuffle(self.cache.pages.free)
        np.random.default_rng(seed).shuffle(self.cache.host.chunks.free)

    @rule(hold=st.booleans())
    def copies_to_the_host_take_long(self, hold):
        self.hold = hold

    @precondition(lambda self: self.latest)
    @rule(chance=st.integers(0, 9))
    def new_weights(self, chance):
        if chance == 0:
            self.version += 1
            with self.cache.request([], [], weights_version=self.version):
                pass
            self.device, self.host = {}, {}

    @invariant()
    def every_page_has_one_place(self):
        for pages, first in ((self.cache.pages, 3), (self.cache.host.chunks, 0)):
            owned = [page for user in pages.users for page in pages.pages(user)]
            assert sorted([*owned, *pages.free]) == list(range(first, pages.num_pages))

    @invariant()
    def every_user_is_in_one_of_the_four_states_and_what_is_held_is_right(self):
        assert set(self.cache.pages.users) == set(self.device)
        assert set(self.cache.host.chunks.users) == set(self.host)
        for user in range(6):
            device, host = self.device.get(user, []), self.host.get(user, [])
            assert not device or host == device[: len(host)]
            assert self.cache.cached_tokens(user).tolist() == (device or host)
            for tier, ids in (("device", device), ("host", host)):
                for layer, keys in enumerate(contents(self.cache, user)[tier]):
                    assert torch.equal(keys, keys_of(ids, layer, self.version))

    @invariant()
    def every_failed_copy_was_counted_and_no_other(self):
        assert self.cache.host.num_failed == self.num_failed

    @invariant()
    def scratch_and_capture_pages_are_untouched(self):
        assert all(table[:3].isnan().all() for table in self.cache.tables)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)  # 2,500 steps


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

    class CudaCacheMachine(CacheMachine):
        on = "cuda"

    TestCacheOnCuda = pytest.mark.gpu(CudaCacheMachine.TestCase)
    TestCacheOnCuda.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)


@pytest.fixture(params=DEVICES)
def cache(request):
    return make_cache(device=request.param)


def tiers(cache) -> list[tuple]:
    frame = cache.statistics()
    return list(zip(frame.user, frame.tier, frame.tokens_reused, frame.tokens_computed, strict=True))


def test_a_partly_filled_last_page_is_onloaded_and_then_appended_to(cache):
    serve(cache, {1: history(5, 6, 7, 8)})
    cache.evict(1)
    for table in cache.tables:
        table.fill_(torch.nan)
    serve(cache, {1: history(5, 6, 7, 8, 9)})  # slot 1 of the second page; checked inside
    cache.evict(1)
    serve(cache, {1: history(5, 6, 7, 8, 9)})
    assert tiers(cache) == [(1, "miss", 0, 4), (1, "host", 4, 1), (1, "host", 5, 0)]


def test_nothing_new_but_candidates(cache):
    serve(cache, {1: history(5, 6, 7), 2: history()})
    serve(cache, {1: history(5, 6, 7), 2: history()})
    assert tiers(cache) == [(1, "miss", 0, 3), (2, "miss", 0, 0), (1, "device", 3, 0), (2, "miss", 0, 0)]
    assert cache.pages.users == [1]


def test_a_history_that_shrinks_then_grows_differently(cache):
    serve(cache, {1: history(1, 2, 3, 4, 5, 6, 7)})
    serve(cache, {1: history(1, 2, 3, 4)})
    assert (cache.pages.length(1), cache.host.length(1)) == (4, 4)
    serve(cache, {1: history(1, 2, 3, 4, 9, 6, 7)})
    serve(cache, {1: history(1, 2, 3, 4, 9, 6, 8)})
    assert tiers(cache) == [(1, "miss", 0, 7), (1, "device", 4, 0), (1, "device", 4, 3), (1, "partial", 6, 1)]


def test_a_host_copy_of_a_changed_history_is_reused_in_whole_pages(cache):
    serve(cache, {1: history(1, 2, 3, 4, 5, 6, 7)})
    cache.evict(1)
    serve(cache, {1: history(1, 2, 3, 4, 5, 9, 7)})
    assert tiers(cache)[-1] == (1, "partial", 3, 4)


def test_a_window_that_moved_reuses_no_more_than_the_context(cache):
    context = [40, 41]
    serve(cache, {1: history(*context, 1, 2, 3, 4, 5, 6)})
    serve(cache, {1: history(*context, 3, 4, 5, 6, 7, 8)})
    assert tiers(cache)[-1] == (1, "partial", 2, 6)


def test_new_weights_empty_both_tiers(cache):
    serve(cache, {1: history(1, 2, 3)})
    serve(cache, {2: history(4, 5)}, version=1)
    assert cache.pages.users == cache.host.chunks.users == [2]
    serve(cache, {1: history(1, 2, 3)}, version=1)
    assert tiers(cache)[-1] == (1, "miss", 0, 3)


def test_statistics_count_bytes_and_wasted_slots(cache):
    page = NUM_LAYERS * 2 * 3 * 2 * 8  # layers, K and V, slots, elements of a token, bytes
    serve(cache, {1: history(1, 2, 3, 4)})
    cache.evict(1)
    serve(cache, {1: history(1, 2, 3, 4, 5, 6)})
    frame = cache.statistics()
    assert frame.request.tolist() == [0, 1]
    assert frame.bytes_onloaded.tolist() == [0, 2 * page]
    assert frame.bytes_offloaded.tolist() == [2 * page, 2 * page]  # the chunk of both pages was not full: again
    assert frame.pages_wasted.tolist() == [2 / 3, 0]
    assert not frame.copy_failed.any()


def test_only_chunks_that_were_not_full_are_copied_to_the_host_again(cache):
    for length in (6, 8, 9, 12, 13):  # chunks of 2 pages of 3 tokens
        serve(cache, {1: history(*range(length))})
    assert (cache.statistics().bytes_offloaded // cache.host.page_bytes).tolist() == [2, 1, 1, 2, 1]


def test_a_failed_onload_is_recomputed_counted_and_logged_once(cache, monkeypatch, caplog):
    serve(cache, {1: history(1, 2, 3, 4), 2: history(5, 6)})
    for user in (1, 2):
        cache.evict(user)

    def fail(layer, *_):
        if layer == 1:
            raise RuntimeError("no such page")

    with monkeypatch.context() as patch:
        patch.setattr(cache.host, "_to_device", fail)
        serve(cache, {1: history(1, 2, 3, 4, 5), 2: history(5, 6)})
    assert tiers(cache)[-2:] == [(1, "miss", 0, 5), (2, "miss", 0, 2)]
    assert cache.statistics().copy_failed.tolist() == [False, False, True, True]
    assert cache.host.num_failed == 2
    assert len(caplog.records) == 1
    assert "copy of user 1's pages failed: no such page" in caplog.text
    cache.evict(1)
    serve(cache, {1: history(1, 2, 3, 4, 5)})  # copied to the host again
    assert tiers(cache)[-1] == (1, "host", 5, 0)
    cache.evict(1)
    monkeypatch.setattr(cache.host, "_to_device", fail)
    with pytest.raises(KeyError):
        serve(cache, {1: history(1, 2, 3, 4, 5)}, fail_in_layer=0)
    assert (cache.pages.length(1), cache.host.length(1), len(cache.cached_tokens(1))) == (0, 0, 0)


def test_a_failed_offload_leaves_the_user_on_the_device_alone(cache, monkeypatch):
    serve(cache, {1: history(1, 2, 3, 4)})

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache.host, "_to_host", fail)
        serve(cache, {1: history(1, 2, 3, 4, 5, 6, 7, 8)})
    assert (cache.pages.length(1), cache.host.length(1)) == (8, 0)
    assert len(cache.host.chunks.free) == 5
    serve(cache, {1: history(1, 2, 3, 4, 5, 6, 7, 8, 9)})
    assert tiers(cache)[-1] == (1, "device", 8, 1)


def test_a_user_on_its_way_to_the_host_is_evicted_last_and_only_when_it_has_arrived(cache, monkeypatch):
    serve(cache, {1: history(*range(12))})  # 4 of 12 pages
    waits = []
    completed = cache.host.completed

    def slow(wait=False):
        waits.append(wait)
        return completed(wait=True) if wait else []

    monkeypatch.setattr(cache.host, "completed", slow)
    serve(cache, {1: history(*range(13))})
    serve(cache, {2: history(*range(12))})
    cache.host._in_flight.pop()  # the copy of user 2 has arrived, that of user 1 has not
    cache.pages.unpin(2)
    serve(cache, {3: history(*range(12))})
    assert cache.pages.users == [1, 3]
    assert not any(waits)
    serve(cache, {4: history(*range(18)), 5: history(*range(18))})
    assert any(waits)
    assert cache.pages.users == [4, 5]


def test_the_host_tier_evicts_its_own_least_recently_used(cache):
    for user in range(5):
        serve(cache, {user: history(1, 2)})
    serve(cache, {0: history(1, 2, 3)})
    serve(cache, {7: history(1, 2)})
    assert cache.host.chunks.users == [2, 3, 4, 0, 7]
    serve(cache, {8: history(*range(13))})  # 3 chunks
    assert cache.host.chunks.users == [0, 7, 8]


def test_without_a_host_tier_nothing_is_copied():
    cache = make_cache(host_bytes=0)
    serve(cache, {1: history(1, 2, 3)})
    cache.evict(1)
    serve(cache, {1: history(1, 2, 3)})
    assert [row[1] for row in tiers(cache)] == ["miss", "miss"]
    assert cache.statistics().bytes_offloaded.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size is 0: must be at least 1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"max_history_length": 0}, "max_history_length is 0"),
        ({"host_chunk_pages": 0}, "host_chunk_pages is 0"),
        ({"num_pages": 3}, "num_pages=3, num_capture_pages=2"),
        ({"num_capture_pages": -1}, "num_capture_pages=-1"),
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"dtype": torch.int8}, "dtype is torch.int8: must be one of torch.float64"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**change)


@pytest.mark.parametrize(
    ("users", "histories", "message"),
    [
        ([1, -3], [history(1), history(2)], "row 1 is -3"),
        ([1, 2.5], [history(1), history(2)], "row 1 is 2.5"),
        ([4, 4], [history(1), history(2)], "user 4 is in rows 0 and 1"),
        ([1, 2], [history(1), history(*range(19))], r"user 2 \(row 1\) has 19 tokens, max_history_length is 18"),
        ([1, 2], [history(1)], "1 histories for 2 users"),
        ([1, 2], [history(1), np.array([0.5])], "row 1 are ndarray"),
        ([1, 2], [history(1), [1, 2]], "row 1 are list"),
        ([1, 2, 3], [history(*range(15))] * 3, "needs 14 more, 11 are free and 0 can be evicted"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_changes_nothing(cache, users, histories, message):
    serve(cache, {1: history(1, 2, 9)})
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message), cache.request(users, histories, weights_version=0):
        pytest.fail("was opened")
    assert snapshot(cache) == before


def test_wrong_candidates_or_a_second_request_inside_one_change_nothing(cache):
    serve(cache, {1: history(1, 2, 9)})
    before = snapshot(cache)
    for bad in ([1, 2], [-1], 3):
        with (
            pytest.raises(ValueError, match="num_candidates is"),
            cache.request([1], [history(1, 2, 9)], weights_version=0) as plan,
        ):
            plan.metadata(bad)
    for call in (lambda: serve(cache, {2: history(3)}), lambda: cache.evict(1), cache.clear):
        with (
            pytest.raises(ValueError, match="request is open"),
            cache.request([1], [history(1, 2, 9)], weights_version=0),
        ):
            call()
    assert snapshot(cache) == before
