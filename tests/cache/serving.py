"""Requests without a model: keys and values are fingerprints of what they stand for, so stale ones are recognised."""

import numpy as np
import torch

from recexp.cache import CachePlan, PagedKVCache
from recexp.layers.paged_kv import append_kv, gather_kv

NUM_LAYERS, H, D = 2, 1, 2


def make_cache(**changes) -> PagedKVCache:
    """Tables full of NaN; 2 pages for capture and 12 for users, of 3 tokens; a host tier of 5 chunks of 2 pages."""
    sizes = {"num_layers": NUM_LAYERS, "num_pages": 15, "page_size": 3, "num_heads": H, "head_dim": D}
    sizes |= {"dtype": torch.float64, "max_history_length": 18, "num_capture_pages": 2}
    sizes |= {"host_chunk_pages": 2, "host_bytes": 5 * 2 * NUM_LAYERS * 2 * 3 * H * D * 8}
    cache = PagedKVCache(**(sizes | changes))
    for table in cache.tables:
        table.fill_(torch.nan)
    return cache


def keys_of(ids, layer: int, version: int) -> torch.Tensor:
    """[h, H, d] float64: each row depends on every id up to it, on the layer and on the version of the weights."""
    rows, state = [], version + 1
    for token in ids:
        state = (state * 31 + int(token) + 1) % 1_000_003
        rows.append(state + layer / 4)
    return torch.tensor(rows, dtype=torch.float64)[:, None, None].repeat(1, H, D)


def history(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def serve(cache, histories: dict[int, np.ndarray], version: int = 0, fail_in_layer: int | None = None) -> CachePlan:
    """A request as a model would make it, one candidate a user. In every layer, all that attention reads is checked."""
    lengths = np.array([len(ids) for ids in histories.values()])
    device = cache.tables[0].device
    with cache.request(list(histories), list(histories.values()), weights_version=version) as plan:
        metadata = plan.metadata([1] * len(histories)).to(device)
        seq_offsets = torch.tensor([0, *np.cumsum(lengths - plan.reused + 1)], dtype=torch.int32, device=device)
        for layer, table in enumerate(cache.tables):
            plan.wait(layer)
            rows = [torch.full((0, H, D), 0.0, dtype=torch.float64)]
            for ids, reused in zip(histories.values(), plan.reused, strict=True):
                rows += [keys_of(ids, layer, version)[reused:], torch.full((1, H, D), -7.0, dtype=torch.float64)]
            k = torch.cat(rows).to(device)
            append_kv(table, metadata, k, -k, seq_offsets)
            if layer == fail_in_layer:
                raise KeyError("the model failed")
            for row, ids in enumerate(histories.values()):
                keys, values = gather_kv(table, metadata, row)
                assert torch.equal(keys.cpu(), keys_of(ids, layer, version))
                assert torch.equal(values.cpu(), -keys_of(ids, layer, version))
    return plan


def contents(cache, user: int) -> dict[str, list[torch.Tensor]]:
    """Keys [h, H, d] a layer that each tier holds of a user, every copy finished."""
    if cache.tables[0].is_cuda:
        torch.cuda.synchronize()
    out = {}
    for tier, owner, tables in (
        ("device", cache.pages, cache.tables),
        ("host", cache.host.chunks, [copy.unflatten(0, (-1, cache.host.chunk_pages)) for copy in cache.host._copies]),
    ):
        pages = torch.from_numpy(owner.pages(user).astype(np.int64))
        keys = [table[pages.to(table.device)].cpu() for table in tables]
        keys = [k.flatten(0, -5)[:, 0].flatten(0, 1) for k in keys]
        out[tier] = [k[: owner.length(user)] for k in keys]
    return out


def snapshot(cache) -> dict:
    """Everything that an error may not change."""
    users = sorted(set(cache.pages.users) | set(cache.host.chunks.users))
    return {
        "pages": {user: cache.pages.pages(user).tolist() for user in cache.pages.users},
        "order": (cache.pages.users, cache.host.chunks.users),
        "lengths": {user: (cache.pages.length(user), cache.host.length(user)) for user in users},
        "free": cache.pages.free.tolist(),
        "tokens": {user: cache.cached_tokens(user).tolist() for user in users},
        "tables": [table.nan_to_num().tolist() for table in cache.tables],
        "records": list(cache.records),
    }
