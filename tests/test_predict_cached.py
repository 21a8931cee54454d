"""predict_cached: the same logits as predict, whatever is held where, and a cache that errors leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recexp import RankingModel, SequenceBatch, checkpoint
from recexp.cache import OutOfPages
from recexp.config import ModelConfig
from recexp.experiments.compare import equal

from .cache.serving import snapshot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKBONES = ["hstu", "transformer"]
CONTEXT = {"gender": 2, "age": 8, "work": 20}
MAX_PAIRS, HOP = 12, 3
# every pair of backbone, page size, number of context features and backend is in one of them
CASES = [
    ("hstu", 1, 0, "reference"),
    ("transformer", 1, 3, "padded"),
    ("hstu", 3, 3, "reference"),
    ("transformer", 3, 0, "padded"),
    ("hstu", 16, 0, "padded"),
    ("transformer", 16, 3, "reference"),
    ("hstu", 128, 3, "padded"),
    ("transformer", 128, 0, "reference"),
]


def make_model(
    backbone: str = "hstu",
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_context: int = 0,
    backend: str = "reference",
) -> RankingModel:
    config = ModelConfig(
        backbone=backbone,
        num_items=40,
        hidden_size=16,
        head_dim=8,
        max_history_pairs=MAX_PAIRS,
        window_hop=HOP,
        context=dict(list(CONTEXT.items())[:num_context]),
        embedding_std=1.0,  # so that every token matters to the logits
        attention_backend=backend,
    )
    return RankingModel(config, device, dtype)


def give_cache(model: RankingModel, page_size: int, num_users: int, num_host_users: int = 0):
    """Room for so many users of the longest history on the device, and on the host; NaN everywhere, pages shuffled."""
    pages = -(-model.config.max_history_tokens // page_size)
    bytes_per_token = 2 * model.config.num_layers * model.config.num_heads * model.config.head_dim
    page_bytes = page_size * bytes_per_token * model.sequence.item_embedding.weight.element_size()
    chunks = -(-pages // 2) * num_host_users
    cache = model.make_cache(
        num_pages=1 + pages * num_users, page_size=page_size, host_bytes=2 * chunks * page_bytes, host_chunk_pages=2
    )
    shuffle(cache, np.random.default_rng(0))
    for table in (*cache.tables, *cache.host._copies):
        table.fill_(torch.nan)
    return cache


def shuffle(cache, random: np.random.Generator) -> None:
    random.shuffle(cache.pages.free)
    random.shuffle(cache.host.chunks.free)


def forget_free_slots(cache) -> None:
    """NaN in every slot of the device that holds no token of a user."""
    held = np.zeros((cache.tables[0].shape[0], cache.page_size), bool)
    for user in cache.pages.users:
        position = np.arange(cache.pages.length(user))
        held[cache.pages.pages(user)[position // cache.page_size], position % cache.page_size] = True
    free = torch.from_numpy(~held).to(cache.tables[0].device)
    for table in cache.tables:
        table.masked_fill_(free[:, None, :, None, None], torch.nan)


def tokens(random: np.random.Generator, num_context: int, num_pairs: int) -> list[int]:
    sizes = [*CONTEXT.values()][:num_context] + [40, 6] * num_pairs
    return [int(random.integers(size)) for size in sizes]


def batch_of(
    users: Sequence[int], histories: Sequence[list[int]], num_context: int = 0, num_candidates: Sequence[int] = ()
) -> SequenceBatch:
    """Requests from token ids: context, then item, action, …"""
    counts = [*num_candidates] or [1 + row % 3 for row in range(len(users))]
    context = {name: [ids[i] for ids in histories] for i, name in enumerate([*CONTEXT][:num_context])}
    pairs = [ids[num_context:] for ids in histories]
    candidates = [[(7 * row + i) % 40 for i in range(count)] for row, count in enumerate(counts)]
    return SequenceBatch.from_lists(users, [p[::2] for p in pairs], [p[1::2] for p in pairs], candidates, context)


def assert_right(model: RankingModel, batch: SequenceBatch) -> Tensor:
    """The cached answer is the uncached one; returns it."""
    cached, uncached = model.predict_cached(batch), model.predict(batch)
    assert cached.shape == (int(batch.num_candidates.sum()), model.config.num_tasks)
    assert equal(cached, uncached, torch.float64)
    return cached


def tiers(model: RankingModel) -> list[tuple[int, str, int, int]]:
    frame = model.cache.statistics()
    return list(zip(frame.user, frame.tier, frame.tokens_reused, frame.tokens_computed, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backbone", "page_size", "num_context", "backend"), CASES)
def test_every_cut_of_the_history(backbone, page_size, num_context, backend, device) -> None:
    """User c comes first with a history that differs from position c on: exactly c tokens of the next can be reused.

    So prefixes end inside the context, after an item and after an action; the slots behind hold nothing or other keys.
    """
    random = np.random.default_rng(1)
    model = make_model(backbone, device, num_context=num_context, backend=backend)
    history = num_context + 2 * 8
    users = range(history + 1)
    give_cache(model, page_size, len(users))
    wanted = [tokens(random, num_context, 8) for _ in users]
    before = []
    for cut, ids in zip(users, wanted, strict=True):
        end = max(num_context, cut + 1)
        end += (end - num_context) % 2  # whole pairs
        other = ids[:end]
        if cut < history:
            other[cut] ^= 1
        before.append(other)
    assert_right(model, batch_of(users, before, num_context))
    assert_right(model, batch_of(users, wanted, num_context, [cut % 4 for cut in users]))
    assert tiers(model)[-len(users) :] == [
        (
            cut,
            "miss" if not cut else "device" if cut == min(len(before[cut]), history) else "partial",
            cut,
            history - cut,
        )
        for cut in users
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backbone", "page_size", "num_context", "backend"), CASES)
def test_rounds_of_histories_that_change_through_a_cache_too_small(
    backbone, page_size, num_context, backend, device
) -> None:
    """Growth, shrinking, other ids and moving windows, with eviction and copies to the host and back in between."""
    random = np.random.default_rng(page_size)
    model = make_model(backbone, device, num_context=num_context, backend=backend)
    cache = give_cache(model, page_size, num_users=4, num_host_users=5)
    latest = [tokens(random, num_context, 4) for _ in range(7)]
    for _ in range(60):
        users = random.permutation(7)[: random.integers(1, 5)]
        for user in users:
            ids = latest[user]
            pairs = (len(ids) - num_context) // 2
            change = random.choice(["same", "grow", "grow", "grow", "grow", "shrink", "other"])
            if change == "shrink":
                ids = ids[: num_context + 2 * int(random.integers(pairs + 1))]
            if change == "other" and ids:
                ids = [*ids]
                ids[random.integers(len(ids))] ^= 1
            if change in ("grow", "shrink"):
                ids = ids + tokens(random, 0, int(random.integers(1, 5)))
            latest[user] = ids
        assert_right(model, batch_of([*users], [latest[user] for user in users], num_context))
        cache.evict(int(random.integers(7)))
        shuffle(cache, random)
        forget_free_slots(cache)
    frame = cache.statistics()
    assert set(frame.tier) == {"device", "host", "miss", "partial"}
    assert max(map(len, latest)) > model.config.max_history_tokens  # windows did move
    assert not frame.copy_failed.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("backbone", "backend"), [("hstu", "padded"), ("transformer", "reference")])
def test_low_precision_errs_at_most_twice_as_much_as_the_plain_path(backbone, backend, dtype, device) -> None:
    random = np.random.default_rng(2)
    model = make_model(backbone, device, dtype, backend=backend)
    exact = make_model(backbone, device)
    exact.load_state_dict(model.state_dict())  # the rounded weights: only the arithmetic differs
    cache = give_cache(model, 16, num_users=10, num_host_users=10)
    histories = [tokens(random, 0, 12) for _ in range(10)]
    for num_pairs in (4, 5, 9, 12):
        batch = batch_of(range(10), [ids[: 2 * num_pairs] for ids in histories], 0, [8] * 10)
        cached, plain, expected = model.predict_cached(batch), model.predict(batch), exact.predict(batch)
        assert equal(cached, expected, dtype, plain)
        for user in range(0, 10, 2):
            cache.evict(user)
    assert cache.statistics().tier.value_counts().to_dict() == {"device": 15, "host": 15, "miss": 10}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_partly_filled_last_page_is_onloaded_and_appended_to(backbone, device) -> None:
    model = make_model(backbone, device)
    cache = give_cache(model, 16, num_users=2, num_host_users=2)
    ids = tokens(np.random.default_rng(3), 0, 10)
    for num_pairs in (3, 5, 10):  # 6, 10 and 20 tokens in pages of 16
        assert_right(model, batch_of([4], [ids[: 2 * num_pairs]]))
        cache.evict(4)
        forget_free_slots(cache)
    assert tiers(model) == [(4, "miss", 0, 6), (4, "host", 6, 4), (4, "host", 10, 10)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_history_that_shrinks_and_then_grows_differently(device) -> None:
    model = make_model(device=device)
    give_cache(model, 3, num_users=2, num_host_users=2)
    ids, other = (tokens(np.random.default_rng(seed), 0, 8) for seed in (4, 5))
    for history in (ids, ids[:6], ids[:6] + other, ids):
        assert_right(model, batch_of([0], [history]))
    assert [row[1:3] for row in tiers(model)] == [("miss", 0), ("device", 6), ("device", 6), ("partial", 6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_context", [0, 3])
def test_a_window_that_moves_is_computed_from_its_start_and_then_reused(num_context, device) -> None:
    """At most 12 pairs, hop 3: with 13 to 15 pairs the window starts at the fourth, with 16 at the seventh."""
    model = make_model(device=device, num_context=num_context)
    give_cache(model, 3, num_users=1)
    ids = list(range(num_context)) + [value for pair in range(16) for value in (pair, pair % 6)]  # all items differ
    for num_pairs in range(11, 17):
        assert_right(model, batch_of([0], [ids[: num_context + 2 * num_pairs]], num_context))
    reused = [0, 22, None, 20, 22, None]  # None: moved, the context alone is the same
    assert [row[2] for row in tiers(model)] == [
        num_context if n is None else n + num_context * (i > 0) for i, n in enumerate(reused)
    ]


def step(model: RankingModel, folder: Path, **options: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(batch_of([0], [[1, 2, 3, 4]])).square().sum().backward()
    optimizer.step()


def load_state_dict(model: RankingModel, folder: Path) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def load_checkpoint(model: RankingModel, folder: Path) -> None:
    other = RankingModel(model.config.model_copy(update={"seed": 9}))
    checkpoint.load_weights(model, model.config, other.save(folder).parent, convert=True)


def one_embedding(model: RankingModel, folder: Path) -> None:
    with torch.no_grad():
        model.sequence.item_embedding.weight[1, 0] += 1


def round_trip(model: RankingModel, folder: Path) -> None:
    """Memory may be given anew at the very same address, so that afterwards nothing tells the weights apart."""
    model.to(torch.bfloat16)
    assert not model.cache.pages.users
    model.to(torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change",
    [
        step,
        lambda model, folder: step(model, folder, foreach=True),
        lambda model, folder: step(model, folder, fused=True),
        load_state_dict,
        load_checkpoint,
        one_embedding,
        round_trip,
    ],
    ids=["step", "foreach", "fused", "load_state_dict", "load_checkpoint", "one_embedding", "round_trip"],
)
def test_changed_weights_empty_the_cache(change, device, tmp_path) -> None:
    model = make_model(device=device)
    cache = give_cache(model, 3, num_users=3, num_host_users=3)
    batch = batch_of([0, 1], [[1, 2, 3, 4], [5, 1]])
    old = assert_right(model, batch)
    model.predict(batch)  # reads only: what is held stays
    assert_right(model, batch)
    change(model, tmp_path)
    assert not equal(assert_right(model, batch), old, torch.float64)
    assert [row[1] for row in tiers(model)] == ["miss"] * 2 + ["device"] * 2 + ["miss"] * 2
    change(model, tmp_path)
    assert_right(model, batch_of([2], [[1, 2, 3, 4]]))
    assert cache.pages.users == cache.host.chunks.users == [2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_copies_that_fail_are_counted_logged_once_and_never_seen_in_an_answer(
    backbone, device, monkeypatch, caplog
) -> None:
    random = np.random.default_rng(6)
    model = make_model(backbone, device)
    cache = give_cache(model, 3, num_users=5, num_host_users=5)
    histories = [tokens(random, 0, 1) for _ in range(4)]

    def unreliable(copy):
        def copy_or_fail(layer, *pages):
            if layer == 1 and random.random() < 0.3:
                raise RuntimeError("the bus is busy")
            copy(layer, *pages)

        return copy_or_fail

    for name in ("_to_host", "_to_device"):
        monkeypatch.setattr(cache.host, name, unreliable(getattr(cache.host, name)))
    for _ in range(MAX_PAIRS - 1):
        histories = [ids + tokens(random, 0, 1) for ids in histories]
        assert_right(model, batch_of(range(4), histories))
        for user in (0, 2):
            cache.evict(user)
        forget_free_slots(cache)
    frame = cache.statistics()
    assert cache.host.num_failed >= frame.copy_failed.sum() > 5
    assert {"host", "miss"} == set(frame[frame.copy_failed & (frame.user % 2 == 0)].tier)  # both directions failed
    assert (frame[frame.copy_failed & (frame.tier == "miss")].tokens_reused == 0).all()
    assert len(caplog.records) == 1 and "the bus is busy" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_nobody_nothing_and_other_names(device) -> None:
    model = make_model(device=device)
    give_cache(model, 3, num_users=3)
    assert_right(model, batch_of([], []))
    assert_right(model, batch_of([0, 1, 2], [[], [1, 2], []], 0, [2, 0, 0]))
    assert_right(model, batch_of([0, 1, 2], [[], [1, 2], []], 0, [0, 0, 0]))
    batch = batch_of([1], [[1, 2, 3, 4]])
    model.predict_cached(batch, torch.tensor([77]))
    model.predict_cached(batch.to(device))
    assert tiers(model)[-2:] == [(77, "miss", 0, 4), (1, "device", 2, 2)]


HISTORIES = [[1, 2, 3, 4], [5, 1]]
BAD = {
    "row 1 is -3": (batch_of([1, -3], HISTORIES), None),
    "row 0 is 1.5": (batch_of([1, 2], HISTORIES), torch.tensor([1.5, 2.0])),
    "row 0 is True": (batch_of([1, 2], HISTORIES), torch.tensor([True, False])),
    "user 4 is in rows 0 and 1": (batch_of([4, 4], HISTORIES), None),
    "2 histories for 3 users": (batch_of([1, 2], HISTORIES), torch.tensor([1, 2, 3])),
    "item_ids of row 1 holds 40": (batch_of([1, 2], [[1, 2], [40, 0]]), None),
    "action_ids of row 0 holds 6": (batch_of([1, 2], [[1, 6], [4, 0]]), None),
    "row 0 has 257 candidates": (batch_of([1], [[1, 2]], 0, [257]), None),
    "needs 10 more, 6 are free and 0 can be evicted": (batch_of([1, 2], [[1, 2] * 9] * 2), None),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_leaves_the_cache_as_it_was(message) -> None:
    batch, user_ids = BAD[message]
    model = make_model()
    cache = give_cache(model, 3, num_users=1)
    model.predict_cached(batch_of([1], [[1, 2, 9, 3]]))
    before = snapshot(cache)
    with pytest.raises(OutOfPages if "evicted" in message else ValueError, match=message):
        model.predict_cached(batch, user_ids)
    assert snapshot(cache) == before


def test_a_model_without_a_cache_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="call make_cache"):
        make_model().predict_cached(batch_of([1], [[1, 2]]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_fails_halfway_leaves_nothing_half_written_behind(device) -> None:
    model = make_model(device=device)
    cache = give_cache(model, 3, num_users=3)
    ids = tokens(np.random.default_rng(8), 0, 6)
    other = [*ids[:3], ids[3] ^ 1, *ids[4:]]
    assert_right(model, batch_of([0, 1], [ids[:6], ids[:8]]))

    def fail(*_: object) -> None:
        raise KeyError("out of luck")

    hook = model.backbone.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model.predict_cached(batch_of([0, 1, 2], [ids, other, ids]))
    hook.remove()
    assert [cache.cached_tokens(user).tolist() for user in range(3)] == [ids[:6], ids[:3], []]
    assert_right(model, batch_of([0, 1, 2], [ids, ids, ids]))
    assert tiers(model)[-3:] == [(0, "device", 6, 6), (1, "device", 3, 9), (2, "miss", 0, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_layer_starts_before_the_onload_of_the_next_ends(backbone, monkeypatch) -> None:
    """Four users of 64 MiB a layer each on the host: layer i begins when its own pages are there, not all layers'."""
    config = ModelConfig(
        backbone=backbone, num_items=40, hidden_size=64, num_layers=4, num_heads=4, head_dim=256, max_history_pairs=8192
    )
    model = RankingModel(config, "cuda", torch.bfloat16)
    cache = model.make_cache(num_pages=1 + 4 * 512, page_size=32, host_bytes=4 * 4 * 512 * 32 * 2 * 4 * 256 * 2)
    users = range(4)
    histories = [tokens(np.random.default_rng(user), 0, 8192) for user in users]
    for num_pairs in range(512, 8193, 512):  # in steps, so that scores take little memory
        for user in users:
            model.predict_cached(batch_of([user], [histories[user][: 2 * num_pairs]]))
    expected = model.predict_cached(batch_of(users, histories))
    starts: list[torch.cuda.Event] = []

    def event(*_: object) -> torch.cuda.Event:
        recorded = torch.cuda.Event(enable_timing=True)
        recorded.record()
        return recorded

    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda *_: starts.append(event()))
    monkeypatch.setattr(cache.host, "_record", event)
    for _ in range(2):  # the first round loads kernels
        for user in users:
            cache.evict(user)
        torch.cuda.synchronize()
        for table in cache.tables:
            table.fill_(torch.nan)
        starts.clear()
        logits = model.predict_cached(batch_of(users, histories))
        torch.cuda.synchronize()
        assert torch.equal(logits, expected)  # the same rows, the same keys
    assert set(cache.statistics().tail(4).tier) == {"host"}
    for layer, arrived in enumerate(cache.host._arrived):
        assert arrived.elapsed_time(starts[layer]) >= 0
    for start, (_, arrived) in zip(starts, pairwise(cache.host._arrived), strict=False):
        assert start.elapsed_time(arrived) > 0
