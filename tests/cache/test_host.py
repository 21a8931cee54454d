"""Copies on a side stream: what waits for what. On the CPU there is nothing to wait for; see test_kv_cache.py."""

import numpy as np
import pytest
import torch

from recexp.cache import PagedKVCache

pytestmark = pytest.mark.gpu

NUM_LAYERS, PAGE_SIZE, NUM_PAGES = 4, 32, 256
HISTORY = np.arange(NUM_PAGES * PAGE_SIZE)


def fill(cache, plan, values) -> None:
    for layer, table in enumerate(cache.tables):
        plan.wait(layer)
        pages = torch.from_numpy(np.concatenate(plan.pages)).cuda().long()
        table[pages] = values[layer]


@pytest.fixture
def cache():
    """Two users of 64 MiB a layer fit, three on the host. User 1 is on the host alone, its layer i full of i + 1."""
    sizes = {"num_layers": NUM_LAYERS, "num_pages": 2 * NUM_PAGES + 1, "page_size": PAGE_SIZE, "num_heads": 4}
    sizes |= {"head_dim": 512, "dtype": torch.bfloat16, "max_history_length": len(HISTORY)}
    cache = PagedKVCache(**sizes, device="cuda", host_bytes=3 * NUM_LAYERS * NUM_PAGES * PAGE_SIZE * 2 * 4 * 512 * 2)
    with cache.request([1], [HISTORY], weights_version=0) as plan:
        fill(cache, plan, [1, 2, 3, 4])
    cache.evict(1)
    torch.cuda.synchronize()
    for table in cache.tables:
        table.fill_(torch.nan)
    return cache


def test_a_layer_starts_before_the_onload_of_the_next_ends(cache, monkeypatch):
    def record():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    monkeypatch.setattr(cache.host, "_record", record)
    for _ in range(2):  # the first round allocates pinned memory and loads kernels
        cache.evict(1)
        torch.cuda.synchronize()
        started, sums = [], []
        with cache.request([1], [HISTORY], weights_version=0) as plan:
            arrived = list(cache.host._arrived)
            pages = torch.from_numpy(plan.pages[0]).pin_memory().to("cuda", non_blocking=True)
            for layer, table in enumerate(cache.tables):
                plan.wait(layer)
                started.append(record())
                sums.append((table[pages] - (layer + 1)).abs().sum())
        torch.cuda.synchronize()
        assert plan.reused.tolist() == [len(HISTORY)]
        assert [float(x) for x in sums] == [0] * NUM_LAYERS
        for layer in range(NUM_LAYERS):
            assert arrived[layer].elapsed_time(started[layer]) >= 0  # not before its own pages are there
    for layer in range(NUM_LAYERS - 1):
        assert started[layer].elapsed_time(arrived[layer + 1]) > 0


def test_opening_and_leaving_a_request_never_synchronises(cache):
    """PyTorch raises on a synchronisation here; eviction, an onload and an offload are all in the request."""
    with cache.request([2, 3], [HISTORY + 7, HISTORY + 9], weights_version=0) as plan:
        fill(cache, plan, [5, 5, 5, 5])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with cache.request([1], [np.append(HISTORY[:-40], 3)], weights_version=0) as plan:
            plan.metadata([2]).to("cuda")
            for layer in range(NUM_LAYERS):
                plan.wait(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plan.reused.tolist() == [len(HISTORY) - 64]
    assert cache.host.length(1) == len(HISTORY) - 39


def test_pages_on_their_way_to_the_host_are_copied_before_they_are_overwritten(cache):
    """A history changes from its first token on while its copy waits for a busy side stream; then the model fails."""
    with torch.cuda.stream(cache.host._stream):
        torch.cuda._sleep(500_000_000)
    with cache.request([2], [HISTORY + 7], weights_version=0) as plan:
        fill(cache, plan, [5, 6, 7, 8])
    assert cache.pages.pinned(2)
    with pytest.raises(KeyError), cache.request([2], [HISTORY + 8], weights_version=0) as plan:
        fill(cache, plan, [9, 9, 9, 9])
        raise KeyError
    torch.cuda.synchronize()
    assert (cache.pages.length(2), cache.host.length(2)) == (0, len(HISTORY))
    for layer, copy in enumerate(cache.host._copies):
        assert (copy[cache.host._host_pages(2)] == 5 + layer).all()
