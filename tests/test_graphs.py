"""Graphs and their static buffers: whatever was in them before, a request gets the answer it gets without them.

Everything but the capture itself is tested on the CPU, in mode "static".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recexp import RankingModel, SequenceBatch, graphs
from recexp.config import Bucket, ExperimentConfig, GraphConfig, ModelConfig, load_config
from recexp.experiments.compare import equal
from recexp.graphs import GraphedModel
from recexp.layers import register_attention_backend
from recexp.layers.attention import AttentionCall
from recexp.metadata import SCRATCH_PAGE

PAIRS, CANDIDATES = 12, 6  # with a context token at most 25 + 6 tokens a user
BACKBONES = ["hstu", "transformer"]
ONE = GraphConfig(batch_sizes=[4], tokens_per_user=[31])
SOME = GraphConfig(batch_sizes=[1, 2, 4], tokens_per_user=[8, 16, 31])
READ = ["kv_indices", "kv_indptr", "total_history_lengths", "new_history_offsets", "batch_indices", "position"]
FIELDS = [*READ, "kv_last_page_len", "total_history_offsets", "kv_seqlens", "kv_seqlen_offsets"]


def make_model(
    backbone: str = "hstu",
    config: GraphConfig | None = ONE,
    page_size: int = 4,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_users: int = 8,
    host_users: int = 0,
    backend: str = "paged",
    head_dim: int = 8,
    fused_layers: bool = False,
    **options: object,
) -> RankingModel:
    """A model whose cache has room for so many of the longest histories, NaN everywhere, and graphs if configured."""
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_dim": head_dim, "head_sizes": [8]}
    limits = {"num_items": 40, "max_history_pairs": PAIRS, "max_candidates": CANDIDATES}
    some = {"backbone": backbone, "attention_backend": backend, "context": {"user_id": 9}, "embedding_std": 1.0}
    some |= {"fused_layers": fused_layers}
    model = RankingModel(ModelConfig(**shape, **limits, **some), device, dtype)
    reserved = graphs.num_capture_pages((config or ONE).buckets(model.config), page_size)
    pages = -(-model.config.max_history_tokens // page_size)
    page_bytes = 2 * 2 * page_size * 2 * head_dim * model.sequence.item_embedding.weight.element_size()
    host = {"host_bytes": host_users * pages * page_bytes, "host_chunk_pages": 1}
    cache = model.make_cache(
        num_pages=1 + reserved + pages * num_users, page_size=page_size, num_capture_pages=reserved, **host
    )
    for table in cache.tables:
        table.fill_(torch.nan)
    if config:
        model.make_graphs(config, **options)
    return model


def batch_of(users: Sequence[int], pairs: Sequence[int], candidates: Sequence[int], seed: int = 0) -> SequenceBatch:
    """User u's history is always the start of the same one."""
    made = [np.random.default_rng([seed, user]).integers(1, 6, (2, 40)) for user in users]
    items = [(6 * m[0] + m[1])[:n].tolist() for m, n in zip(made, pairs, strict=True)]
    actions = [m[1][:n].tolist() for m, n in zip(made, pairs, strict=True)]
    wanted = [[(3 * user + i) % 40 for i in range(n)] for user, n in zip(users, candidates, strict=True)]
    return SequenceBatch.from_lists(list(users), items, actions, wanted)


def assert_right(model: RankingModel, batch: SequenceBatch) -> Tensor:
    before = int(model.graphs.report()["replays"].sum())
    answer, expected = model.predict_cached(batch), model.predict(batch)
    assert answer.shape == expected.shape and equal(answer, expected, expected.dtype)
    assert model.graphs.report()["replays"].sum() == before + 1
    return answer


@contextmanager
def one_request(model: RankingModel, batch: SequenceBatch):
    """values and what makes metadata, with the request open in the model's cache."""
    from recexp.layers.sequence import history_ids, token_layout

    ids = history_ids(batch, list(model.config.context))
    with torch.inference_mode(), model.cache.request(batch.user_ids.tolist(), ids, weights_version=0) as plan:
        layout = token_layout(batch, len(model.config.context), plan.reused)
        yield model.sequence.eval()(batch, layout).values, plan, layout.num_candidates


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_log_of_requests_gets_the_uncached_answers(backbone: str, page_size: int) -> None:
    """Growing histories, moving windows, eviction and the host tier, through buckets of all sizes."""
    random = np.random.default_rng(page_size)
    model = make_model(backbone, SOME, page_size, num_users=5, host_users=4)
    pairs = random.integers(0, 5, 9)
    for _ in range(25):
        users = random.permutation(9)[: random.integers(1, 5)]
        pairs[users] += random.integers(0, 4, len(users))
        assert_right(model, batch_of(users.tolist(), pairs[users].tolist(), random.integers(0, 7, len(users)).tolist()))
        model.cache.evict(int(random.integers(9)))
    assert pairs.max() > PAIRS and {"device", "host", "miss"} <= set(model.cache.statistics().tier)
    report = model.graphs.report()
    assert (report["replays"] > 0).sum() >= 5 and report["padding"].between(0, 1).all() and model.graphs.misses == 0


CASES = {
    "no history, candidates only": ([1, 2], [0, 0], [6, 1], 0),
    "history fills its pages": ([1], [8], [2], 0),  # 1 + 16 tokens, and in the next call 4 pages and one token
    "history is a multiple of the page size": ([1, 2], [12, 12], [2, 2], 1),  # pages of 5: 25 tokens
    "all cached, only candidates are left": ([1, 2, 3], [3, 5, 0], [6, 6, 6], 0),
    "users with 0 candidates": ([1, 2, 3], [3, 5, 2], [0, 2, 0], 0),
    "nobody has candidates": ([1, 2], [3, 5], [0, 0], 0),
    "every token of the bucket": ([1, 2, 3, 4], [12] * 4, [6] * 4, 0),
}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("case", CASES)
def test_special_requests_first_and_again(backbone: str, case: str) -> None:
    users, pairs, candidates, longer = CASES[case]
    model = make_model(backbone, page_size=4 + longer)
    batch = batch_of(users, pairs, candidates)
    first, again = assert_right(model, batch), assert_right(model, batch)
    assert equal(first, again, torch.float64)
    assert_right(model, batch_of(users, [n + 1 for n in pairs], candidates))


@given(st.data())
def test_every_split_of_a_bucket(data: st.DataObject) -> None:
    """Tokens between users, users between cached, new history and candidates, whatever was in the buffers before."""
    model = shared_model(data.draw(st.sampled_from(BACKBONES)))
    model.cache.clear()
    users = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True))
    pairs = [data.draw(st.integers(0, PAIRS)) for _ in users]
    candidates = [data.draw(st.integers(0, CANDIDATES)) for _ in users]
    model.predict_cached(batch_of(users, [data.draw(st.integers(0, n)) for n in pairs], candidates))
    assert_right(model, batch_of(users, pairs, candidates))


def shared_model(backbone: str, _made: dict[str, RankingModel] = {}) -> RankingModel:  # noqa: B006
    if backbone not in _made:
        _made[backbone] = make_model(backbone)
    return _made[backbone]


@torch.inference_mode()
def poison(model: RankingModel) -> None:
    """Indices no table has, NaN, and stale answers in every static buffer."""
    for static in model.graphs._buffers.buckets:
        static.ints.fill_(2**31 - 1)
        static.tokens.values.fill_(torch.nan)
        static.logits.fill_(torch.nan)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_small_request_after_a_large_one_is_bit_exact(backbone: str) -> None:
    large, small = batch_of([1, 2, 3, 4], [12, 12, 11, 12], [6, 6, 5, 6]), batch_of([5, 6], [3, 0], [2, 1])
    alone, after, poisoned = (make_model(backbone) for _ in range(3))
    assert_right(after, large)
    poison(poisoned)
    expected = alone.predict_cached(small)
    for model in (after, poisoned):
        assert torch.equal(model.predict_cached(small), expected)
    for table in after.cache.tables:  # what padding wrote lies in the scratch page
        untouched = list(after.cache.capture_pages) + after.cache.pages.free.tolist()
        assert len(untouched) > 20 and table[untouched].isnan().all() and table[SCRATCH_PAGE].isfinite().any()


def test_every_field_arrives_with_its_tail() -> None:
    model = make_model()
    static = model.graphs.fit(1, 1)
    for batch in (batch_of([1, 2, 3, 4], [12] * 4, [5] * 4), batch_of([5, 6], [3, 0], [2, 1])):
        poison(model)
        with one_request(model, batch) as (values, plan, num_candidates):
            metadata = plan.metadata(num_candidates, static.capacity)
            model.graphs.replay(static, values, metadata)
            for name in FIELDS:
                assert torch.equal(getattr(static.metadata, name), getattr(metadata, name)), name
            new = np.diff(metadata.new_history_offsets.numpy())[: batch.batch_size]
            ends = np.pad(np.append(0, np.cumsum(new + num_candidates)), (0, 4 - batch.batch_size), mode="edge")
            assert static.tokens.seq_offsets.tolist() == ends.tolist()
            assert static.tokens.num_candidates.tolist() == [*num_candidates, 0, 0, 0, 0][:4]
            rows = [r for end, n in zip(ends[1:], num_candidates, strict=False) for r in range(end - n, end)]
            assert static.rows.tolist() == rows + [0] * (len(static.rows) - len(rows))
            assert static.tokens.values[len(values) :].eq(0).all() and torch.equal(
                static.tokens.values[: len(values)], values
            )


@pytest.mark.parametrize("stale", [*READ, "seq_offsets", "num_candidates", "rows"])
def test_a_field_that_is_not_copied_shows_in_the_answer(stale: str) -> None:
    """The field keeps what an earlier request left: then the small request is answered otherwise, or not at all."""
    model = make_model()
    static = model.graphs.fit(1, 1)
    owner = (
        static if stale == "rows" else static.tokens if stale in ("seq_offsets", "num_candidates") else static.metadata
    )
    small = batch_of([5, 6], [3, 6], [2, 1])
    model.predict_cached(batch_of([6, 5], [1, 2], [1, 1]))
    model.predict_cached(batch_of([1, 2, 3, 4], [5, 12, 7, 12], [2, 6, 5, 6]))
    old = getattr(owner, stale).clone()

    def put_back(*_: object) -> None:
        getattr(owner, stale).copy_(old)

    handle = model.backbone.register_forward_pre_hook(put_back)
    try:
        answer = model.predict_cached(small)
    except (ValueError, IndexError):
        return
    finally:
        handle.remove()
    assert not equal(answer, model.predict(small), torch.float64)


def test_the_answer_is_the_callers() -> None:
    model = make_model()
    first = model.predict_cached(batch_of([1], [3], [6]))
    kept = first.clone()
    model.predict_cached(batch_of([2], [5], [6]))
    assert torch.equal(first, kept)


def test_each_layer_waits_for_its_pages_first() -> None:
    model = make_model(config=SOME)
    order: list[object] = []
    for i, layer in enumerate(model.backbone.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: order.append(f"layer {i}"))
    static = model.graphs.fit(1, 8)
    with one_request(model, batch_of([1], [2], [2])) as (values, plan, num_candidates):
        model.graphs.replay(static, values, plan.metadata(num_candidates, static.capacity), order.append)
    assert order == [0, "layer 0", 1, "layer 1"]


def test_the_bucket_is_the_one_with_fewest_tokens_then_users() -> None:
    fit = make_model(config=SOME).graphs.fit
    picked = {request: fit(*request).bucket[:2] for request in [(1, 8), (1, 9), (2, 8), (2, 17), (3, 30), (1, 124)]}
    assert picked == {
        (1, 8): (1, 8), (1, 9): (1, 16), (2, 8): (2, 16), (2, 17): (2, 32), (3, 30): (4, 32), (1, 124): (4, 124)
    }  # fmt: skip
    sparse = make_model(config=GraphConfig(batch_sizes=[1, 2], tokens_per_user=[8, 31])).graphs.fit
    assert sparse(1, 10).bucket[:2] == (2, 16)  # rows cost more than users


def test_what_fits_nowhere_is_an_error_or_counted() -> None:
    small = {"batch_sizes": [2], "tokens_per_user": [8]}
    too_long, too_many = batch_of([1], [8], [1]), batch_of([1, 2, 3], [1, 1, 1], [1, 1, 1])
    strict = make_model(config=GraphConfig(**small))
    with pytest.raises(ValueError, match=r"no bucket holds 1 users with 18 tokens; buckets .*: 2 x 16"):
        strict.predict_cached(too_long)
    with pytest.raises(ValueError, match="no bucket holds 3 users with 12 tokens"):
        strict.predict_cached(too_many)
    assert not strict.cache.pages.users and strict.graphs.misses == 2
    assert_right(strict, batch_of([1], [7], [1]))  # 16 tokens
    lenient = make_model(config=GraphConfig(**small, eager_fallback=True))
    assert equal(lenient.predict_cached(too_long), lenient.predict(too_long), torch.float64)
    assert lenient.graphs.misses == 1 and lenient.graphs.report()["replays"].sum() == 0
    assert_right(lenient, batch_of([1], [8], [3]))  # all but the candidates is cached


def test_report_counts_replays_and_padding() -> None:
    model = make_model(config=SOME)
    for _ in range(3):
        model.predict_cached(batch_of([1], [1], [3]))  # 6 tokens, then 3 twice, in a bucket of 8
    report = model.graphs.report().set_index(["batch_size", "num_tokens"])
    assert report["replays"].to_dict() == {key: 3 * (key == (1, 8)) for key in report.index}
    assert report.loc[(1, 8), "padding"] == 1 - (6 + 3 + 3) / 24
    assert set(report["mode"]) == {"static"} and (report["launches"] == 0).all() and report.index[0] == (4, 124)


def graphed(model: RankingModel, **change: object) -> GraphedModel:
    arguments = {"backbone": model.backbone, "head": model.head, "config": model.config, "tables": model.cache.tables}
    arguments |= {"capture_pages": model.cache.capture_pages, "buckets": [Bucket(2, 20, 4)]}
    return GraphedModel(**(arguments | change))


REFUSALS = {  # what is refused, and the nearest thing that is not
    "no table": ({"tables": []}, {}, "no table"),
    "no buckets": ({"buckets": []}, {"buckets": [Bucket(1, 1, 1)]}, "no buckets"),
    "batch size": ({"buckets": [Bucket(0, 20, 4)]}, {"buckets": [Bucket(1, 20, 4)]}, "batch_size=0"),
    "tokens": ({"buckets": [Bucket(1, 0, 0)]}, {"buckets": [Bucket(1, 1, 0)]}, "num_tokens=0"),
    "candidates": (
        {"buckets": [Bucket(2, 20, 21)]},
        {"buckets": [Bucket(2, 20, 20)]},
        "num_candidates is 21: must be 0 to num_tokens, 20",
    ),
    "history": (  # 25 tokens in pages of 4: the metadata has room for 7 pages, 28 tokens, a user
        {"buckets": [Bucket(1, 29, 0)]},
        {"buckets": [Bucket(1, 28, 0)]},
        "metadata needs num_pages 8, its buffer holds 7",
    ),
    "pages": ({"capture_pages": range(1, 4)}, {"capture_pages": range(1, 5)}, "4 pages of 4, 3 were given: 1 short"),
    "a bad bucket behind good ones": (
        {"buckets": [Bucket(2, 20, 4), Bucket(1, 4, 5)]},
        {"buckets": [Bucket(2, 20, 4), Bucket(1, 4, 4)]},
        "num_candidates=5.* cannot be captured",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_at_their_limit_and_one_below(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(config=None, page_size=4)
    refused, accepted, message = REFUSALS[case]
    writes = []
    monkeypatch.setattr(graphs.graphed.StaticBuffers, "__init__", lambda *_: writes.append("buffers"))
    with pytest.raises(ValueError, match=message):
        graphed(model, **refused)
    assert not writes and all(table.isnan().all() for table in model.cache.tables)
    monkeypatch.undo()
    graphed(model, **accepted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t[0][0], t[1][0]], r"layer 0 is torch.float64 \[2, 4, 2, 8\]: must be 5-D"),
        (lambda t: [t[0], t[1][:, :1]], "layer 1 .*: must be 5-D"),
        (lambda t: [t[0], t[1][:, :, :2]], "layer 1 .* share page size"),
        (lambda t: [t[0], t[1][1:]], "layer 1 .* that of layer 0"),
        (lambda t: [t[0], t[1].float()], "layer 1 .* dtype"),
        (lambda t: t[:1], "1 tables for 2 layers"),
        (lambda t: [*t, t[0]], "3 tables for 2 layers"),
    ],
)
def test_tables_that_do_not_fit(change, message: str) -> None:
    model = make_model(config=None)
    with pytest.raises(ValueError, match=message):
        graphed(model, tables=change(model.cache.tables))


def test_backends_that_cannot_be_captured_or_refuse() -> None:
    @register_attention_backend(
        "wide", capturable=True, refuses=lambda r: f"page_size {r.page_size}" if (r.page_size or 0) % 32 else None
    )
    def wide(call: AttentionCall) -> Tensor:
        return torch.zeros_like(call.q)

    for backend, meant in (("padded", "padded"), ("auto", "reference")):  # in float64 on a CPU
        with pytest.raises(ValueError, match=rf"'{meant}' reads lengths on the host: set attention_backend to .*paged"):
            make_model(backend=backend)
    with pytest.raises(ValueError, match=r"'wide' refuses .*: page_size 31"):
        make_model(backend="wide", page_size=31)
    make_model(backend="wide", page_size=32)
    with pytest.raises(ValueError, match="mode 'graph' needs a CUDA device, the tables are on cpu"):
        make_model(mode="graph")


def test_requests_that_do_not_fit_their_bucket() -> None:
    model = make_model(config=SOME)
    static, other = model.graphs.fit(1, 8), model.graphs.fit(1, 30)
    with one_request(model, batch_of([1], [2], [2])) as (values, plan, num_candidates):
        with pytest.raises(ValueError, match="the metadata fills"):
            model.graphs.replay(static, values, plan.metadata(num_candidates, other.capacity))
        metadata = plan.metadata(num_candidates, static.capacity)
        with pytest.raises(ValueError, match="6 rows of values, metadata of 7 tokens"):
            model.graphs.replay(static, values[1:], metadata)
        with pytest.raises(ValueError, match="8 candidates: must agree, and be at most 8 tokens and 6"):
            model.graphs.replay(static, values[:0], plan.metadata(num_candidates + 6, static.capacity))


def test_graphs_go_when_cache_or_weights_go() -> None:
    model = make_model()
    batch = batch_of([1], [3], [2])
    with torch.no_grad():  # in place: the same memory, so graphs stay, and the cache forgets
        model.head.mlp[0].weight.mul_(2.0)
        model.backbone.layers[0].input_norm.weight.mul_(2.0)
    assert_right(model, batch)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="call make_graphs again"):
        model.predict_cached(batch)
    model.make_graphs(ONE)
    assert_right(model, batch)
    model.to(torch.float64)
    assert model.graphs is None
    model.make_graphs(ONE)
    model.make_cache(num_pages=20, page_size=4)
    assert model.graphs is None
    with pytest.raises(ValueError, match=r"28 pages|short"):
        model.make_graphs(ONE)  # this cache sets no pages aside
    assert model.graphs is None and model.predict_cached(batch).isfinite().all()
    with pytest.raises(ValueError, match="the model has no cache"):
        RankingModel(model.config).make_graphs()


def test_capacity_rules() -> None:
    large = load_config("configs/models/hstu_8x1024.yaml")
    buckets = GraphConfig().buckets(large)
    assert len(buckets) == 30 and {b.num_tokens // b.batch_size for b in buckets} == {384, 512, 768, 1280, 2304, 4352}
    assert graphs.capacity(Bucket(8, 8 * 384, 0), 32, 4096) == (8, 8 * 128, 8 * 384)
    assert graphs.num_capture_pages(buckets, 32) == 16 * 128 and graphs.num_capture_pages([Bucket(2, 7, 1)], 2) == 4
    models = {"hstu": {"num_items": 9, "max_history_pairs": PAIRS, "max_candidates": CANDIDATES}}
    some = {"name": "a", "notebook": "a.ipynb", "models": models}
    some |= {"data": {"max_candidates": CANDIDATES}, "measure": {"num_candidates": CANDIDATES}}
    ExperimentConfig(**some, graphs={"tokens_per_user": [30]})
    with pytest.raises(ValueError, match="has 31, and a user has at most 30 tokens"):
        ExperimentConfig(**some, graphs={"tokens_per_user": [8, 31]})


KERNELS = [  # backbone, backend, dtype, head_dim, fused
    ("hstu", "paged", torch.float64, 8, False),
    ("transformer", "paged", torch.float64, 8, False),
    ("hstu", "triton", torch.bfloat16, 32, False),
    ("transformer", "triton", torch.bfloat16, 32, False),
    ("hstu", "triton", torch.float32, 128, True),
    ("hstu", "gluon", torch.bfloat16, 128, True),
    ("transformer", "gluon", torch.bfloat16, 64, False),
]
EXACT = {"device": "cuda", "dtype": torch.float64, "backend": "reference"}
LOG = [  # users, pairs, candidates: growing histories, buckets of several sizes, one after the other
    ([1, 2, 3, 4], [12, 11, 12, 12], [6, 6, 6, 6]), ([5, 6], [3, 0], [2, 1]), ([5], [3], [6]),
    ([6, 1], [9, 12], [0, 6]), ([7], [8], [0]), ([3], [12], [1]), ([5, 6, 7], [12, 12, 9], [6, 0, 6]),
]  # fmt: skip


@pytest.mark.parametrize(("backbone", "fused"), [("hstu", False), ("transformer", False), ("hstu", True)])
def test_kernels_take_rows_of_nobody(backbone: str, fused: bool) -> None:
    """The Triton kernels over the static buffers, without a GPU under the interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GraphConfig(batch_sizes=[3], tokens_per_user=[6])
    shape = {"device": device, "dtype": torch.float32, "backend": "triton", "head_dim": 128, "num_users": 2}
    model = make_model(backbone, config, fused_layers=fused, mode="static", **shape)
    for pairs in ([1, 2], [3, 2]):
        assert_right(model, batch_of([1, 2], pairs, [3, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(("backbone", "backend", "dtype", "head_dim", "fused"), KERNELS)
def test_a_replay_is_its_static_buffers_bit_for_bit(backbone, backend, dtype, head_dim, fused, segmented) -> None:
    shape = {"device": "cuda", "dtype": dtype, "backend": backend, "head_dim": head_dim, "fused_layers": fused}
    host = {"host_users": 3 * segmented, "page_size": 8}  # gluon copies eight rows at least
    graph, static = (make_model(backbone, SOME, mode=mode, **shape, **host) for mode in ("graph", "static"))
    eager, exact = (
        make_model(backbone, None, **shape, **host),
        make_model(backbone, None, **(EXACT | {"head_dim": head_dim})),
    )
    exact.load_state_dict(graph.state_dict())
    answers = []
    for request in LOG:
        batch = batch_of(*request)
        answers.append([model.predict_cached(batch) for model in (graph, static, eager)] + [exact.predict(batch)])
        for model in (graph, static, eager):
            model.cache.evict(5)
    tested, same, plain, expected = (torch.cat(each) for each in zip(*answers, strict=True))
    assert torch.equal(tested, same) and equal(tested, expected, dtype, plain)
    report = graph.graphs.report()
    assert set(report["segments"]) == {3 if segmented else 1} and (report["launches"] > 10).all()
    assert report["replays"].sum() == len(LOG) and set(report["mode"]) == {"graph"}
    assert not segmented or "host" in set(graph.cache.statistics().tier)


def live_pages(model: RankingModel) -> list[Tensor]:
    pages = [int(page) for user in model.cache.pages.users for page in model.cache.pages.pages(user)]
    return [table[pages].view(torch.int64).clone() for table in model.cache.tables]  # bits: NaN is not equal to itself


@pytest.mark.gpu
@pytest.mark.parametrize("segmented", [False, True])
def test_capture_leaves_users_pages_alone(segmented: bool) -> None:
    """A full cache, captured over twice while another stream and another thread work; the users' keys stay theirs."""
    from threading import Event, Thread

    model = make_model(config=None, device="cuda", num_users=4)
    full = batch_of([1, 2, 3, 4], [12] * 4, [6] * 4)
    model.predict_cached(full)
    before, stop, errors = live_pages(model), Event(), []
    assert len(model.cache.pages.free) == 0

    def allocate() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    torch.zeros(1 << 20, device="cuda").add_(1)
        except RuntimeError as error:
            errors.append(error)

    thread = Thread(target=allocate)
    thread.start()
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda") / 64
    with torch.cuda.stream(other):
        for _ in range(200):
            x = x @ x
    for _ in range(2):
        model.make_graphs(ONE, segmented=segmented)
        assert_right(model, full)
        for pages, old in zip(live_pages(model), before, strict=True):
            assert torch.equal(pages, old)
    stop.set()
    thread.join()
    assert not errors and set(model.cache.statistics().tier.tail(8)) == {"device"}


@pytest.mark.gpu
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("fails_at", [1, 4])
def test_capture_that_fails_half_way_can_be_retried(fails_at: int, segmented: bool) -> None:
    model, seen = make_model(config=SOME, device="cuda"), []

    def fail(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            seen.append(1)
            if len(seen) == fails_at:
                raise torch.OutOfMemoryError("nothing left")

    handle = model.backbone.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="nothing left"):
        model.make_graphs(SOME, segmented=segmented)
    handle.remove()
    assert model.graphs is None and not torch.cuda.is_current_stream_capturing()
    batch = batch_of([1, 2], [5, 7], [3, 2])
    assert equal(model.predict_cached(batch), model.predict(batch), torch.float64)
    model.make_graphs(SOME, segmented=segmented)
    assert_right(model, batch_of([1, 2], [6, 9], [3, 2]))


@pytest.mark.gpu
def test_a_replay_does_not_wait_for_the_device() -> None:
    model = make_model(config=SOME, device="cuda")
    static = model.graphs.fit(1, 8)
    values = torch.randn(6, 16, dtype=torch.float64, device="cuda")
    with model.cache.request([1], [np.arange(4)], weights_version=0) as plan:
        metadata = plan.metadata([2], static.capacity)
        torch.cuda.set_sync_debug_mode("error")
        try:
            first, second = (model.graphs.replay(static, values, metadata, plan.wait) for _ in range(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second) and first.isfinite().all()
