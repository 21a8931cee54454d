"""KVMetadata against a plain loop, and against every way of being wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recexp.metadata import SCRATCH_PAGE, KVCapacity, KVMetadata

FIELDS = {
    "kv_indices",
    "kv_indptr",
    "kv_last_page_len",
    "total_history_lengths",
    "total_history_offsets",
    "new_history_offsets",
    "batch_indices",
    "position",
    "kv_seqlens",
    "kv_seqlen_offsets",
}


def by_hand(users: list[tuple[int, int, int]], page_size: int, pages: list[list[int]]) -> dict[str, list[int]]:
    """users: (cached, new, candidates) each; written token by token, without arithmetic on whole arrays."""
    out: dict[str, list[int]] = {name: [] for name in FIELDS}
    for name in ("kv_indptr", "total_history_offsets", "new_history_offsets", "kv_seqlen_offsets"):
        out[name] = [0]
    for row, (cached, new, candidates) in enumerate(users):
        total = cached + new
        out["kv_indices"] += pages[row]
        out["kv_indptr"].append(len(out["kv_indices"]))
        filled = 0
        for _ in range(total):
            filled = 1 if filled == page_size else filled + 1
        out["kv_last_page_len"].append(filled)
        out["total_history_lengths"].append(total)
        out["total_history_offsets"].append(out["total_history_offsets"][-1] + total)
        out["new_history_offsets"].append(out["new_history_offsets"][-1] + new)
        for p in range(cached, total):
            out["batch_indices"].append(row)
            out["position"].append(p)
        out["kv_seqlens"].append(total + candidates)
        out["kv_seqlen_offsets"].append(out["kv_seqlen_offsets"][-1] + total + candidates)
    return out


def give_pages(users: list[tuple[int, int, int]], page_size: int, num_pages: int, seed: int) -> list[list[int]]:
    ids = (np.random.default_rng(seed).permutation(num_pages - 1) + 1).tolist()
    return [[ids.pop() for _ in range(0, cached + new, page_size)] for cached, new, _ in users]


def build(users: list[tuple[int, int, int]], page_size: int, pages: list[list[int]], capacity=None) -> KVMetadata:
    cached, new, candidates = np.array(users, np.int64).reshape(-1, 3).T
    per_user = [np.array(p, np.int32) for p in pages]
    return KVMetadata.build(per_user, cached + new, new, candidates, page_size, capacity)


users_strategy = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4)), max_size=6)


@given(users_strategy, st.sampled_from([1, 3, 16]), st.integers(0, 99), st.booleans())
def test_build_equals_the_plain_loop_and_sets_every_tail(users, page_size, seed, roomy):
    num_pages = 120
    pages = give_pages(users, page_size, num_pages, seed)
    expected = by_hand(users, page_size, pages)
    used = KVCapacity(len(users), len(expected["kv_indices"]), len(expected["position"]))
    capacity = KVCapacity(used.batch_size + 3, used.num_pages + 5, used.num_tokens + 7) if roomy else None
    metadata = build(users, page_size, pages, capacity)
    metadata.validate(page_size, num_pages)
    tails = dict.fromkeys(FIELDS, 0) | {name: expected[name][-1] for name in FIELDS if len(expected[name]) > len(users)}
    tails |= {"kv_indices": SCRATCH_PAGE, "batch_indices": len(users) + 3}
    tails = {name: [value] * 99 for name, value in tails.items()} | {"position": [i % page_size for i in range(99)]}
    for name in FIELDS:
        field = getattr(metadata, name)
        assert field.dtype == torch.int32
        assert field.tolist()[: len(expected[name])] == expected[name], name
        tail = field.tolist()[len(expected[name]) :]
        assert tail == tails[name][: len(tail)], name
        assert roomy == (len(field) > len(expected[name])), name


def test_targets_of_the_tail_are_in_the_scratch_page_by_the_rule_for_real_tokens():
    metadata = build([(2, 3, 1), (0, 4, 0)], 3, [[7, 2], [5, 9]], KVCapacity(5, 8, 20))
    row, position = metadata.batch_indices.long(), metadata.position.long()
    targets = metadata.kv_indices[metadata.kv_indptr[row] + position // 3].tolist()
    assert targets == [7, 2, 2, 5, 5, 5, 9] + [SCRATCH_PAGE] * 13


def example(capacity: KVCapacity | None) -> KVMetadata:
    users = [(5, 2, 3), (0, 0, 2), (3, 3, 0), (4, 0, 1), (0, 5, 2)]
    return build(users, 3, give_pages(users, 3, num_pages=10, seed=0), capacity)  # all of its 9 pages are in use


@pytest.mark.parametrize("capacity", [None, KVCapacity(7, 14, 16)])
@pytest.mark.parametrize("change", [1, -1, 1000, -1000])
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_corrupted_entry_is_caught_by_name(name, change, capacity):
    for i in range(len(getattr(example(capacity), name))):
        metadata = example(capacity)
        metadata.validate(3, 10)
        getattr(metadata, name)[i] += change
        with pytest.raises(ValueError, match=name):
            metadata.validate(3, 10)


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x[:-1], lambda x: x.long(), lambda x: x[None], lambda x: x.to("meta")],
    ids=["short", "long", "2d", "device"],
)
def test_a_field_of_the_wrong_shape_type_or_device_is_caught(name, spoil):
    metadata = example(None)
    object.__setattr__(metadata, name, spoil(getattr(metadata, name)))
    with pytest.raises(ValueError, match=rf"{name}|entries"):
        metadata.validate(3, 20)


def test_page_ids_outside_the_table_shared_or_scratch_are_caught():
    example(None).validate(3, 20)
    with pytest.raises(ValueError, match=r"kv_indices\[\d\] is 9: a user's page lies in 1\.\.8"):
        example(None).validate(3, 9)
    shared, scratch = example(None), example(None)
    shared.kv_indices[4] = shared.kv_indices[0]
    with pytest.raises(ValueError, match=r"kv_indices\[4\] is \d+: was given before"):
        shared.validate(3, 20)
    scratch.kv_indices[1] = SCRATCH_PAGE
    with pytest.raises(ValueError, match=r"kv_indices\[1\] is 0"):
        scratch.validate(3, 20)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 40), st.sampled_from([1, 3, 16]), st.booleans())
def test_synthetic_is_valid_and_spreads_evenly(batch_size, num_tokens, num_candidates, page_size, roomy):
    if num_candidates > num_tokens:
        with pytest.raises(ValueError, match=f"num_candidates is {num_candidates}.*{num_tokens}"):
            KVMetadata.synthetic(batch_size, num_tokens, num_candidates, page_size, range(1, 60))
        return
    capacity = KVCapacity(batch_size, 50, num_tokens) if roomy else None
    metadata = KVMetadata.synthetic(batch_size, num_tokens, num_candidates, page_size, range(10, 60), capacity)
    metadata.validate(page_size, 60)
    assert metadata.kv_seqlens.sum() == num_tokens
    assert metadata.total_history_lengths.sum() == num_tokens - num_candidates == metadata.new_history_offsets[-1]
    for per_user in (metadata.kv_seqlens, metadata.kv_seqlens - metadata.total_history_lengths):
        assert per_user.tolist() == sorted(per_user.tolist(), reverse=True)
        assert per_user[0] - per_user[-1] <= 1
    used = metadata.kv_indices[: metadata.kv_indptr[-1]].tolist()
    assert used == list(range(10, 10 + len(used)))
    assert len(metadata.position) == (num_tokens if roomy else num_tokens - num_candidates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0, 2, range(1, 9)), "batch_size=0"),
        ((2, 0, 0, 2, range(1, 9)), "num_tokens=0"),
        ((2, 4, -1, 2, range(1, 9)), "num_candidates is -1"),
        ((2, 4, 0, 0, range(1, 9)), "page_size=0"),
        ((2, 40, 0, 2, range(1, 9)), "need 20 pages of 2, 8 were given: 12 short"),
        ((2, 8, 0, 2, range(1, 9), KVCapacity(1, 8, 8)), "batch_size 2, its buffer holds 1"),
        ((2, 8, 0, 2, range(1, 9), KVCapacity(2, 3, 8)), "num_pages 4, its buffer holds 3"),
        ((2, 8, 0, 2, range(1, 9), KVCapacity(2, 8, 7)), "num_tokens 8, its buffer holds 7"),
    ],
)
def test_synthetic_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVMetadata.synthetic(*arguments)


def test_build_refuses_pages_that_are_not_those_of_the_history():
    with pytest.raises(ValueError, match=r"pages\[0\] is 1: must be 2"):  # the next user has one too many
        build([(0, 4, 0), (0, 1, 0)], 3, [[1], [2, 3]])


def test_a_copy_moves_every_field_and_resets_every_tail():
    capacity = KVCapacity(7, 14, 16)
    large, small = example(capacity), build([(1, 1, 1)], 3, [[4]], capacity)
    large.copy_(small)
    for name in FIELDS:
        assert torch.equal(getattr(large, name), getattr(small, name))
    with pytest.raises(ValueError, match="num_tokens=16"):
        large.copy_(example(None))


def test_all_fields_are_views_of_one_buffer_on_16_byte_boundaries():
    metadata = example(None).to("cpu")
    start = metadata.buffer.data_ptr()
    for name in FIELDS:
        at = getattr(metadata, name).data_ptr() - start
        assert 0 <= at < metadata.buffer.nbytes
        assert at % 16 == 0, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_to_a_device_is_one_copy_and_validation_stays_on_the_host():
    host = example(KVCapacity(7, 14, 16))
    assert host.buffer.is_pinned()
    device = host.to("cuda")
    assert all(torch.equal(getattr(device, name).cpu(), getattr(host, name)) for name in FIELDS)
    with pytest.raises(ValueError, match="on the host"):
        device.validate(3, 20)
