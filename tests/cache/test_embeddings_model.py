"""RankingModel over stores: the same logits as over its own tables, and caches that follow updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recexp import RankingModel, SequenceBatch
from recexp.cache.embeddings import EmbeddingStore, engines, lookup_features
from recexp.config import GraphConfig, ModelConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 16


def make_model(device: str = "cpu", **changes: object) -> RankingModel:
    values = {"num_items": 40, "hidden_size": WIDTH, "head_dim": 8, "max_history_pairs": 12, "embedding_std": 1.0}
    return RankingModel(ModelConfig.model_validate(values | {"context": {"user_id": 20, "age": 6}} | changes), device)


def store_of(table: torch.nn.Embedding, engine: str = "torch", num_rows: int | None = None) -> EmbeddingStore:
    weight = table.weight.detach()
    store = engines[engine](num_rows or len(weight), weight.shape[1], dtype=weight.dtype, device=weight.device)
    store.update(torch.arange(len(weight), device=weight.device), weight)
    return store


def batch() -> SequenceBatch:
    items = [[1, 2, 3, 2, 1], [], [5, 5, 39, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
    actions = [[i % 6 for i in row] for row in items]
    return SequenceBatch.from_lists([3, 0, 19], items, actions, [[7, 1, 30], [3], [39]], {"age": [5, 0, 1]})


@pytest.mark.parametrize("engine", ["torch", "fbgemm"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_logits_are_those_of_the_models_own_tables(engine: str, device: str) -> None:
    if reason := engines[engine].missing(device):
        pytest.skip(f"engine {engine}: {reason}")
    model = make_model(device)
    own = model.predict(batch())
    model.use_stores({name: store_of(table, engine) for name, table in model.sequence.tables.items()})
    for table in model.sequence.tables.values():
        table.weight.data.fill_(torch.nan)  # nobody reads them
    assert torch.equal(model.predict(batch()), own)
    model.make_cache(num_pages=40, page_size=4)
    for _ in range(2):
        assert torch.allclose(model.predict_cached(batch()), own, rtol=1e-5, atol=1e-5)
    assert set(model.cache.statistics().tail(3)["tier"]) == {"device"}


def test_some_tables_in_stores_others_in_the_model() -> None:
    model = make_model()
    own = model.predict(batch())
    model.use_stores({"item": store_of(model.sequence.item_embedding)})
    assert torch.equal(model.predict(batch()), own)
    model.stores["item"].clear()
    assert not torch.equal(model.predict(batch()), own)
    model.use_stores({})
    assert torch.equal(model.predict(batch()), own)


@pytest.mark.parametrize("device", DEVICES)
def test_updates_show_and_empty_the_kv_cache_of_every_model_that_shares_the_store(device: str) -> None:
    first, second = make_model(device), make_model(device, seed=1)
    store = store_of(first.sequence.item_embedding)
    for model in (first, second):
        model.use_stores({"item": store})
        model.make_cache(num_pages=40, page_size=4)
        model.predict_cached(batch())
    store.lookup(torch.tensor([1], device=device))  # changes nothing: both still hit
    for model in (first, second):
        before = model.predict_cached(batch())
        assert set(model.cache.statistics().tail(3)["tier"]) == {"device"}
        assert torch.allclose(before, model.predict(batch()), rtol=1e-5, atol=1e-5)
    for change in (
        lambda: store.update(torch.tensor([1], device=device), torch.ones(1, WIDTH, device=device)),
        lambda: store.erase(torch.tensor([1], device=device)),
        lambda: store.insert(torch.tensor([1], device=device), torch.ones(1, WIDTH, device=device)),
        store.clear,
    ):
        old = [model.predict(batch()) for model in (first, second)]
        change()
        for model, before in zip((first, second), old, strict=True):
            after = model.predict_cached(batch())
            assert set(model.cache.statistics().tail(3)["tier"]) == {"miss"}
            assert torch.allclose(after, model.predict(batch()), rtol=1e-5, atol=1e-5)
            assert not torch.allclose(after, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_ids_of_any_integer_type_on_any_device(device: str) -> None:
    """As over the model's own tables: a store on the CPU too serves a batch and a model on a GPU."""
    model = make_model(device)
    own = model.predict(batch())
    item = model.sequence.item_embedding.weight.detach().cpu()
    store = engines["torch"](*item.shape)
    store.update(torch.arange(len(item)), item)
    model.use_stores({"item": store})
    ids = {name: getattr(batch(), name).int() for name in ("item_ids", "action_ids", "candidate_ids")}
    assert torch.equal(model.predict(replace(batch(), **ids).to(device)), own)


def test_an_unknown_key_leaves_the_kv_cache_as_it_was() -> None:
    model = make_model()
    own, item = model.predict(batch()), model.sequence.item_embedding.weight.detach()
    store = engines["torch"](*item.shape, unknown="error")
    store.update(torch.arange(39), item[:39])
    model.use_stores({"item": store})
    cache = model.make_cache(num_pages=40, page_size=4)
    with pytest.raises(ValueError, match="key 39 is unknown"):
        model.predict_cached(batch())
    assert cache.statistics().empty
    store.update(torch.tensor([39]), item[39:])
    assert torch.allclose(model.predict_cached(batch()), own, rtol=1e-5, atol=1e-5)


def test_another_store_empties_the_kv_cache() -> None:
    model = make_model()
    model.make_cache(num_pages=40, page_size=4)
    for store in (store_of(model.sequence.item_embedding), store_of(make_model(seed=1).sequence.item_embedding)):
        model.use_stores({"item": store})
        cached = model.predict_cached(batch())
        assert set(model.cache.statistics().tail(3)["tier"]) == {"miss"}
        assert torch.allclose(cached, model.predict(batch()), rtol=1e-5, atol=1e-5)


def test_a_store_is_asked_once_for_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two context features and the items share one table: one lookup, of distinct keys."""
    model = make_model()
    shared, asked = store_of(model.sequence.item_embedding), []
    lookup = shared.lookup
    monkeypatch.setattr(
        shared, "lookup", lambda keys, **options: asked.append(keys.tolist()) or lookup(keys, **options)
    )
    model.use_stores({"item": shared, "context.user_id": shared, "context.age": shared})
    model.predict(batch())
    items, users, ages = {1, 2, 3, 30, 39, *range(7, 17)}, {3, 0, 19}, {5, 0, 1}  # 5 items lie before the window
    assert len(asked) == 1 and sorted(asked[0]) == sorted(items | users | ages)


@pytest.mark.parametrize("device", DEVICES)
def test_lookup_features_spreads_rows_in_order(device: str) -> None:
    a, b = (engines["torch"](9, 2, device=device) for _ in range(2))
    for store, scale in ((a, 1.0), (b, 100.0)):
        store.update(torch.arange(9, device=device), scale * torch.arange(18.0, device=device).view(9, 2))
    ids = {
        "x": torch.tensor([3, 3, 0]),
        "y": torch.tensor([8]),
        "z": torch.tensor([3, 1]),
        "n": torch.tensor([]).long(),
    }
    rows = lookup_features({"x": a, "y": b, "z": a, "n": b}, ids, torch.device(device))
    assert {name: found[:, 0].tolist() for name, found in rows.items()} == {
        "x": [6, 6, 0],
        "y": [1600],
        "z": [6, 2],
        "n": [],
    }
    assert a.num_keys == 3 and rows["n"].shape == (0, 2)
    with pytest.raises(ValueError, match="key 9 is out of range"):
        lookup_features({"x": a}, {"x": torch.tensor([9])}, torch.device(device))


@pytest.mark.parametrize("ids", [torch.tensor([1.9]), torch.tensor([True]), torch.tensor([[1, 2]])], ids=str)
def test_features_have_whole_ids_in_one_row(ids: torch.Tensor) -> None:
    store = engines["torch"](4, 2)
    good = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ids of 'y' are torch\.\w+ \[1.*must be a 1-D tensor of torch.int32 or"):
        lookup_features({"x": store, "y": store}, {"x": good, "y": ids}, torch.device("cpu"))
    assert store.num_keys == 0


def test_ids_reach_as_far_as_the_store() -> None:
    """So a model with a store needs no table of its own size."""
    large = make_model()
    small = make_model(num_items=1)
    small.load_state_dict({n: w[:1] if n.startswith("sequence.item_") else w for n, w in large.state_dict().items()})
    with pytest.raises(ValueError, match="num_items is 1"):
        small.predict(batch())
    small.use_stores({"item": store_of(large.sequence.item_embedding)})
    assert torch.equal(small.predict(batch()), large.predict(batch()))
    wrong = SequenceBatch.from_lists([0], [[1]], [[1]], [[40]], {"age": [0]})
    with pytest.raises(ValueError, match="candidate_ids of row 0 holds 40; the item store's num_rows is 40"):
        small.predict(wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_lookups_stay_outside_graphs(device: str) -> None:
    """What was captured holds no row: after an update the replay gives the new answer."""
    model = make_model(device, attention_backend="paged" if device == "cpu" else "auto")
    store = store_of(model.sequence.item_embedding)
    model.use_stores({"item": store})
    model.make_cache(num_pages=120, page_size=4, num_capture_pages=60)
    model.make_graphs(GraphConfig(batch_sizes=[4], tokens_per_user=[32]))
    for value in (1.0, -2.0):
        store.update(torch.tensor([39], device=device), torch.full((1, WIDTH), value, device=device))
        wanted = model.predict(batch())
        assert torch.allclose(model.predict_cached(batch()), wanted, rtol=1e-4, atol=1e-4)


def test_refusals() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"store 'items' has width 16; .*'context.age': 16"):
        model.use_stores({"items": store_of(model.sequence.item_embedding)})
    with pytest.raises(ValueError, match="store 'item' has width 4"):
        model.use_stores({"item": engines["torch"](40, 4)})
    model.use_stores({"item": store_of(model.sequence.item_embedding)})
    with pytest.raises(ValueError, match="no gradients"):
        model.train()(batch())
