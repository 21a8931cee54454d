"""Append and gather against a dictionary of slots, over tables full of NaN."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recexp.batch import TokenBatch
from recexp.config import ModelConfig
from recexp.layers import Backbone
from recexp.layers.paged_kv import OnePass, append_kv, gather_kv
from recexp.metadata import SCRATCH_PAGE, KVCapacity, KVMetadata

H, D = 2, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


def metadata_of(cached, new, candidates, page_size, pages, capacity=None) -> KVMetadata:
    cached, new = np.array(cached, np.int64), np.array(new, np.int64)
    out = KVMetadata.build(pages, cached + new, new, np.array(candidates, np.int64), page_size, capacity)
    out.validate(page_size, 200)
    return out


def rows_of(new, candidates, extra_users=0, extra_rows=0, dtype=torch.float64):
    lengths = np.array(new, np.int64) + candidates
    ends = np.cumsum([0, *lengths, *[0] * extra_users])
    k, v = torch.randn(2, int(ends[-1]) + extra_rows, H, D, dtype=torch.float64).to(dtype)
    return k, v, torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_rounds_of_appends_read_back_exactly_from_shuffled_pages(device, rounds, page_size, seed, padded, dtype):
    """Each round appends to three users; only written slots come back, whatever the table held before."""
    free = list(np.random.default_rng(seed).permutation(np.arange(1, 200)))
    table = torch.full((200, 2, page_size, H, D), torch.nan, dtype=dtype, device=device)
    pages, written, total = [[], [], []], [[], [], []], np.zeros(3, np.int64)
    for users in rounds:
        new, candidates = zip(*users, strict=True)
        total = total + new
        for row in range(3):
            pages[row] += [free.pop() for _ in range(-(-total[row] // page_size) - len(pages[row]))]
        capacity = KVCapacity(4, 150, 80) if padded else None
        metadata = metadata_of(
            total - new, new, candidates, page_size, [np.array(p, np.int32) for p in pages], capacity
        )
        k, v, seq_offsets = rows_of(new, candidates, extra_users=padded, extra_rows=padded, dtype=dtype)
        append_kv(table, metadata.to(device), k.to(device), v.to(device), seq_offsets.to(device))
        for row in range(3):
            start = seq_offsets[row]
            written[row] += [(k[i], v[i]) for i in range(start, start + new[row])]
            keys, values = gather_kv(table, metadata.to(device), row)
            assert keys.shape == values.shape == (total[row], H, D)
            for i, (key, value) in enumerate(written[row]):
                assert torch.equal(keys[i].cpu(), key)
                assert torch.equal(values[i].cpu(), value)
    held = {int(page) for row in pages for page in row} | {SCRATCH_PAGE}
    untouched = [page for page in range(200) if page not in held]
    assert table[untouched].isnan().all()
    assert table.isfinite().all(dim=(3, 4))[sorted(held - {SCRATCH_PAGE})].sum() == 2 * total.sum()
    assert padded or table[SCRATCH_PAGE].isnan().all()


def test_only_padding_writes_only_to_the_scratch_page():
    table = torch.full((200, 2, 3, H, D), torch.nan)
    metadata = metadata_of([4], [0], [2], 3, [np.array([7, 9], np.int32)], KVCapacity(3, 5, 6))
    append_kv(table, metadata, torch.ones(2, H, D), torch.ones(2, H, D), torch.tensor([0, 2, 2, 2], dtype=torch.int32))
    assert table[SCRATCH_PAGE, :, 0].isfinite().all()
    assert table[1:].isnan().all()


def test_rows_with_strides_of_their_own_are_read_as_they_lie():
    table = torch.full((200, 2, 3, H, D), torch.nan, dtype=torch.float64)
    packed = torch.randn(5, 4, H, D, dtype=torch.float64)
    metadata = metadata_of([0], [5], [0], 3, [np.array([7, 9], np.int32)])
    append_kv(table, metadata, packed[:, 2], packed[:, 3], torch.tensor([0, 5], dtype=torch.int32))
    keys, values = gather_kv(table, metadata, 0)
    assert torch.equal(keys, packed[:, 2])
    assert torch.equal(values, packed[:, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(200, 2, 3, H * D)}, "needed are a table"),
        ({"table": torch.zeros(200, 3, 3, H, D)}, "needed are a table"),
        ({"table": torch.zeros(200, 2, 3, H, D + 1)}, "needed are a table"),
        ({"v": torch.zeros(4, H, D)}, "needed are a table"),
        ({"table": torch.zeros(200, 2, 3, H, D).double()}, "make the cache in the model's dtype"),
        (
            {"metadata": metadata_of([0], [5], [0], 3, [np.array([7, 9])]).to("meta")},
            "metadata is on meta, the table on cpu",
        ),
        ({"seq_offsets": torch.zeros(2, dtype=torch.int32, device="meta")}, "seq_offsets is on meta"),
        ({"seq_offsets": torch.zeros(3, dtype=torch.int32)}, "seq_offsets has 3 entries"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, message):
    arguments = {
        "table": torch.zeros(200, 2, 3, H, D),
        "metadata": metadata_of([0], [5], [0], 3, [np.array([7, 9], np.int32)]),
        "k": torch.ones(5, H, D),
        "v": torch.ones(5, H, D),
        "seq_offsets": torch.tensor([0, 5], dtype=torch.int32),
    } | change
    with pytest.raises(ValueError, match=message):
        append_kv(**arguments)
    assert not arguments["table"].any()


def test_a_pass_finds_its_targets_once_and_the_next_pass_its_own(monkeypatch):
    """Three layers, twice, over one metadata whose pages change in place in between, as static buffers do."""
    found, find = [], OnePass.targets.func
    monkeypatch.setattr(OnePass.targets, "func", lambda self: found.append(1) or find(self))
    config = ModelConfig(num_items=9, num_layers=3, hidden_size=8, num_heads=H, head_dim=D, attention_backend="paged")
    backbone, metadata = Backbone(config).eval(), metadata_of([0], [5], [1], 3, [np.array([7, 9])])
    tables = [torch.full((200, 2, 3, H, D), torch.nan) for _ in range(3)]
    lengths = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 6
    for pages, passes in (([7, 9], 1), ([4, 5], 2)):
        metadata.kv_indices.copy_(torch.tensor(pages))
        with torch.no_grad():
            backbone(TokenBatch(torch.randn(6, 8), *lengths), tables, metadata)
        assert len(found) == passes
        assert all(table[pages].isfinite().sum() == 2 * 5 * H * D for table in tables)
