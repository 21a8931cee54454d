"""Embedding stores: every engine against a dictionary, the same errors from all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import recexp.cache.embeddings.store as store_module
from recexp.cache.embeddings import EmbeddingStore, StoreStats, engines, kernels

ON_GPU: list[tuple[str, dict[str, Any]]] = [
    ("torch", {}),
    ("fbgemm", {}),
    ("fbgemm", {"cache_ratio": 0.25}),
    ("nve", {"layer": "linear_uvm", "cache_ratio": 0.25}),
    ("nve", {"layer": "hierarchical", "cache_ratio": 0.25}),
]
CASES = [(engine, {"device": "cpu"}) for engine in engines]
GPU_CASES = [pytest.param(e, {"device": "cuda"} | o, marks=pytest.mark.gpu) for e, o in ON_GPU]
every_engine = pytest.mark.parametrize(("engine", "options"), [*CASES, *GPU_CASES], ids=str)
NUM_ROWS, DIM = 97, 8
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
KERNEL_DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 5_000  # of each engine: 10,000 with the two that every machine has


def make(engine: str, options: dict[str, Any], num_rows: int = NUM_ROWS, dim: int = DIM, **more: Any) -> EmbeddingStore:
    if reason := engines[engine].missing(torch.device(options.get("device", "cpu")).type):
        pytest.skip(f"engine {engine}: {reason}")
    return engines[engine](num_rows, dim, **(options | more))


def on(store: EmbeddingStore, keys: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(keys, dtype=dtype).to(store.device)


def everything(store: EmbeddingStore) -> np.ndarray:
    return store.lookup(torch.arange(store.num_rows, device=store.device)).cpu().numpy()


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_store_is_a_dictionary(engine: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    store = make(engine, options, dtype=dtype)
    random, known = np.random.default_rng(0), dict[int, np.ndarray]()
    for step in range(STEPS // 2):
        keys = random.integers(NUM_ROWS, size=random.integers(0, 12))
        rows = torch.from_numpy(random.standard_normal((len(keys), DIM))).to(dtype)
        operation = random.choice(["update", "insert", "erase", "clear", "lookup"], p=[0.3, 0.2, 0.2, 0.01, 0.29])
        before = store.version
        if operation == "update":
            store.update(on(store, keys), on(store, rows, dtype))
            known |= zip(keys.tolist(), rows.numpy(), strict=True)  # the last of a key that is there twice
        elif operation == "insert":
            store.insert(on(store, keys), on(store, rows, dtype))
            known = dict(zip(keys.tolist(), rows.numpy(), strict=True)) | known
        elif operation == "erase":
            store.erase(on(store, keys))
            known = {key: row for key, row in known.items() if key not in keys}
        elif operation == "clear":
            store.clear()
            known = {}
        found = store.lookup(on(store, keys))
        zeros = np.zeros(DIM, found.cpu().numpy().dtype)
        wanted = np.array([known.get(key, zeros) for key in keys.tolist()], zeros.dtype).reshape(-1, DIM)
        assert found.shape == (len(keys), DIM) and found.dtype == dtype and found.device == store.device
        assert np.array_equal(found.cpu().numpy(), wanted), (step, operation)
        assert store.version == before or operation != "lookup"
        if step % 100 == 0:
            assert np.array_equal(everything(store), [known.get(key, zeros) for key in range(NUM_ROWS)])
            assert store.stats().num_known == len(known)


@every_engine
def test_values_are_the_tables_bit_for_bit(engine: str, options: dict[str, Any]) -> None:
    """Every pattern of a finite float16, the smallest and −0 included, through every engine."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    bits = bits[bits.view(torch.float16).isfinite()]
    table = bits.view(torch.float16).view(-1, 16)
    store = make(engine, options, len(table), 16, dtype=torch.float16)
    store.update(on(store, range(len(table))), table.to(store.device))
    keys = torch.randint(len(table), (1000,), generator=torch.Generator().manual_seed(0))
    found = store.lookup(keys.to(store.device)).cpu()
    assert torch.equal(found.view(torch.int16), table[keys].view(torch.int16))


def bad_keys(store: EmbeddingStore) -> dict[str, Any]:
    return {
        "int32": on(store, [1, 2], torch.int32),
        "float": on(store, [1, 2], torch.float32),
        "a list": [1, 2],
        "2-D": on(store, [[1, 2]]),
        "a number": on(store, 1),
        "strided": on(store, [1, 2, 3, 4])[::2],
        "sparse": on(store, [1, 2]).to_sparse(),
        "compressed": on(store, [[1, 2]]).to_sparse_csr(),
        "another device": torch.zeros(2, dtype=torch.int64, device="meta"),
        "negative": on(store, [3, -1]),
        "past the end": on(store, [3, NUM_ROWS]),
        "far past the end": on(store, [2**62, 0]),
    }


def bad_rows(store: EmbeddingStore) -> dict[str, Any]:
    rows = torch.ones(2, DIM, device=store.device)
    return {
        "float64": rows.double(),
        "an array": np.ones((2, DIM), np.float32),
        "too few": rows[:1],
        "too narrow": rows[:, 1:].contiguous(),
        "1-D": rows.flatten(),
        "strided": torch.ones(DIM, 2, device=store.device).T,
        "another device": rows.to("meta"),
        "sparse": rows.to_sparse(),
        "NaN": rows * torch.nan,
        "infinite": rows / 0,
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@every_engine
def test_bad_input_is_the_same_clear_error_and_changes_nothing(engine: str, options: dict[str, Any]) -> None:
    store = make(engine, options)
    plain = make("torch", {"device": options["device"]})
    good = torch.ones(2, DIM, device=store.device)
    store.update(on(store, [3, 5]), good)
    before, version = everything(store), store.version
    for name, keys in bad_keys(store).items():
        for call in ("lookup", "check_keys", "erase", "update", "insert"):
            given = (keys, good) if call in ("update", "insert") else (keys,)
            with pytest.raises(ValueError, match="key") as error:
                getattr(store, call)(*given)
            with pytest.raises(ValueError) as reference:
                getattr(plain, call)(*given)
            assert str(error.value) == str(reference.value), (name, call)
    for name, rows in bad_rows(store).items():
        for call in ("update", "insert"):
            with pytest.raises(ValueError, match="row") as error:
                getattr(store, call)(on(store, [3, 5]), rows)
            with pytest.raises(ValueError) as reference:
                getattr(plain, call)(on(store, [3, 5]), rows)
            assert str(error.value) == str(reference.value), name
    assert np.array_equal(everything(store), before) and store.version == version


def test_errors_name_value_limit_and_way_out() -> None:
    store = make("torch", {})
    with pytest.raises(ValueError, match=r"key 97 is out of range: num_rows is 97, keys are 0 to"):
        store.lookup(torch.tensor([97]))
    with pytest.raises(ValueError, match=r"key -1 is out of range"):
        store.lookup(torch.tensor([0, -1, 97]))
    with pytest.raises(ValueError, match=r"torch.int32 \[1\].*must be a contiguous 1-D tensor of torch.int64"):
        store.lookup(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"the row of key 7 holds NaN or infinity, or more than ±3.4"):
        store.update(torch.tensor([6, 7]), torch.tensor([[0.0], [torch.inf]]).repeat(1, DIM))


@every_engine
def test_nothing_to_look_up_or_to_write(engine: str, options: dict[str, Any]) -> None:
    store = make(engine, options)
    none, version = on(store, []), store.version
    store.update(none, torch.ones(0, DIM, device=store.device))
    store.insert(none, torch.ones(0, DIM, device=store.device))
    store.erase(none)
    store.erase(on(store, [4]))  # unknown
    assert store.lookup(none).shape == (0, DIM) and store.version == version


@every_engine
def test_unknown_keys_are_an_error_where_asked_for(engine: str, options: dict[str, Any]) -> None:
    store = make(engine, options, unknown="error")
    store.insert(on(store, [1, 4]), torch.ones(2, DIM, device=store.device))
    assert store.lookup(on(store, [4, 1, 4])).sum() == 3 * DIM
    for keys in ([1, 9], [9]):
        with pytest.raises(ValueError, match="key 9 is unknown: insert it first"):
            store.lookup(on(store, keys))
    store.erase(on(store, [1, 9]))
    with pytest.raises(ValueError, match="key 1 is unknown"):
        store.check_keys(torch.tensor([1]))


class Operations(TorchDispatchMode):
    """The names of those that were dispatched: launches and waits, were it a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A GPU's, that counts who waits for it."""
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def guard_by_kernel(store: EmbeddingStore) -> None:
    """Keys on the CPU are checked as on a GPU, by the kernel under Triton's interpreter."""
    if not kernels.AVAILABLE:
        pytest.skip("Triton is not installed")
    store.told = torch.zeros(1, dtype=torch.int64)


@interpreted
@pytest.mark.parametrize("unknown", ["zero", "error"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_lookup_launches_little_and_waits_once(unknown: str, checked: bool, stream: Mock) -> None:
    """Besides the engine's gather one kernel, and nothing that is computed on the device is copied to the host."""
    store = make("torch", {}, unknown=unknown)
    guard_by_kernel(store)
    keys = on(store, [1, 5, 1])
    store.update(keys, torch.arange(3.0 * DIM).view(3, DIM))
    guard = Mock(wraps=store_module.guard_keys)
    with pytest.MonkeyPatch.context() as patch, Operations() as operations:
        patch.setattr(store_module, "guard_keys", lambda *given: without_dispatch(guard, *given))
        found = store.lookup(keys, checked=checked)
    assert operations.names == ["index_select"] + ([] if checked else ["_local_scalar_dense"])  # told, which is pinned
    assert guard.call_count == stream.synchronize.call_count == (0 if checked else 1)
    assert found[:, 0].tolist() == [2 * DIM, DIM, 2 * DIM]


def without_dispatch(call: Callable[..., Tensor], *given: Any) -> Tensor:
    with _disable_current_modes():
        return call(*given)


@pytest.mark.parametrize("guarded", [False, pytest.param(True, marks=interpreted)], ids=["host", "kernel"])
def test_where_unknown_keys_are_an_error_so_are_those_out_of_range(guarded: bool, stream: Mock) -> None:
    """Whether the keys at the ends of the table, one of which stands in for them, are known or not."""
    for known in ([], [0], [NUM_ROWS - 1], [0, NUM_ROWS - 1], range(NUM_ROWS)):
        store = make("torch", {}, unknown="error")
        if guarded:
            guard_by_kernel(store)
        store.update(on(store, known), torch.ones(len(known), DIM))
        for wrong in (-1, NUM_ROWS, -(2**63), 2**63 - 1):
            with pytest.raises(ValueError, match=f"key {wrong} is out of range"):
                store.lookup(on(store, [*known, wrong]))
        assert store.num_keys == 0


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("unknown", ["zero", "error"])
def test_a_kernel_checks_keys(device: str, unknown: str, request: pytest.FixtureRequest) -> None:
    """It names the same key as the check on the host, wherever in however many that is; and nothing is left of a
    refused lookup, not even of one that the engine failed in."""
    store = make("torch", {"device": device}, unknown=unknown)
    if device == "cpu":
        request.getfixturevalue("stream")
        guard_by_kernel(store)
    assert store.told is not None
    store.update(on(store, range(50)), torch.ones(50, DIM, device=device).cumsum(0))
    for count in (1, 511, 513, 2000):
        keys = torch.arange(count) % 50
        found = store.lookup(on(store, keys))
        assert torch.equal(found[:, 0].cpu(), keys + 1.0)
        wrongs = {-1: "out of range", NUM_ROWS: "out of range", -(2**63): "out of range", 60: "unknown"}
        for wrong, reason in wrongs.items():
            for place in {0, count // 2, count - 1}:
                keys[place] = wrong
                if wrong == 60 and unknown == "zero":
                    assert not store.lookup(on(store, keys))[place].any()
                else:
                    with pytest.raises(ValueError, match=f"key {wrong} is {reason}"):
                        store.lookup(on(store, keys))
                keys[place] = place % 50
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(store, "_gather", raise_out_of_memory)
            store.lookup(on(store, [-1]))
        assert torch.equal(store.lookup(on(store, keys)), found) and not store.told.any()


def raise_out_of_memory(keys: Tensor) -> Tensor:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("engine", ["torch", "fbgemm"])
@pytest.mark.parametrize("change", ["update", "insert", "erase", "clear"])
def test_a_change_stopped_halfway_has_a_version_of_its_own(engine: str, change: str) -> None:
    """Rows may be others already, so nobody may go on with what he made of the old ones; once more mends it."""
    store = make(engine, {})
    store.update(on(store, [1, 2]), torch.ones(2, DIM))
    inner, keys, rows = "_clear" if change == "clear" else "_scatter", on(store, [1, 5]), torch.full((2, DIM), 9.0)
    given = {"clear": (), "erase": (keys,)}.get(change, (keys, rows))
    whole, version = getattr(store, inner), store.version

    def stop(*given: Tensor) -> None:
        whole(*(some[:1] for some in given))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, inner, stop)
        with pytest.raises(KeyboardInterrupt):
            getattr(store, change)(*given)
    assert store.version != version and store.stats().num_known == 2
    getattr(store, change)(*given)
    wanted = {"update": [9, 1, 0, 0, 9], "insert": [1, 1, 0, 0, 9], "erase": [0, 1, 0, 0, 0], "clear": [0] * 5}[change]
    assert everything(store)[1:6, 0].tolist() == wanted


def test_no_two_states_of_any_stores_have_the_same_version() -> None:
    stores = [make("torch", {}), make("torch", {}), make("fbgemm", {})]
    seen = [store.version for store in stores]
    for store in stores:
        for change in (
            lambda s: s.update(on(s, [1]), torch.ones(1, DIM)),
            lambda s: s.erase(on(s, [1])),
            lambda s: s.clear(),
        ):
            change(store)
            seen.append(store.version)
    assert len(set(seen)) == len(seen) == 12


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_quantised_tables(precision: str, bits: int) -> None:
    """No value is off by more than half a step of its row (plus the float16 of scale and offset); a row costs 4 bytes
    more than its bits, and unknown rows are exact zeros."""
    store = make("fbgemm", {}, 50, 64, precision=precision)
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    store.update(torch.arange(40), rows)
    found = store.lookup(torch.arange(50))
    step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    rounding = 2**-10 * rows.abs().amax(1)
    assert ((found[:40] - rows).abs().amax(1) <= step / 2 + 2 * rounding).all()
    assert not torch.equal(found[:40], rows) and not found[40:].any()
    assert store.stats().device_bytes == 50 * (64 * bits // 8 + 4)


def test_rows_beyond_float16_are_refused_by_quantised_tables() -> None:
    """A row's scale and offset are float16: such rows would come back as NaN."""
    store = make("fbgemm", {}, precision="int8")
    row = torch.tensor([[65504.0, -65504.0] + [0.0] * (DIM - 2)])
    store.update(torch.tensor([3]), row)
    assert (store.lookup(torch.tensor([3])) - row).abs().max() <= 65504 / 255 * 2
    with pytest.raises(ValueError, match="the row of key 4 holds NaN or infinity, or more than ±65504"):
        store.update(torch.tensor([3, 4]), torch.cat([row / 2, row * 1.001]))
    assert store.stats().num_known == 1 and store.lookup(torch.tensor([3]))[0, 0] > 65000


@pytest.mark.parametrize("engine", ["torch", "fbgemm"])
def test_stores_take_no_part_in_gradients_or_inference_mode(engine: str) -> None:
    with torch.inference_mode():
        store = make(engine, {})
        store.update(torch.tensor([1]), torch.ones(1, DIM))
    store.update(torch.tensor([2]), torch.ones(1, DIM, requires_grad=True) * 2)
    store.insert(torch.tensor([3]), torch.nn.Parameter(torch.full((1, DIM), 3.0)))
    with torch.inference_mode():
        keys, rows = torch.tensor([1, 4]), torch.full((2, DIM), 4.0)
        store.erase(torch.tensor([1]))
    store.update(keys[1:], rows[1:])
    found = store.lookup(torch.arange(1, 5))
    assert found[:, 0].tolist() == [0, 2, 3, 4] and not found.requires_grad and not store.table.requires_grad


@pytest.mark.parametrize("guarded", [False, pytest.param(True, marks=interpreted)], ids=["host", "kernel"])
def test_an_engine_is_never_asked_for_a_key_out_of_range(
    guarded: bool, stream: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = make("torch", {}), list[int]()
    if guarded:
        guard_by_kernel(store)
    monkeypatch.setattr(store, "_gather", lambda keys: asked.extend(keys.tolist()) or store.table[keys])
    for wrong in (-1, NUM_ROWS, -(2**63), 2**63 - 1):
        with pytest.raises(ValueError, match=f"key {wrong} is out of range"):
            store.lookup(torch.tensor([5, wrong]))
    assert set(asked) <= set(range(NUM_ROWS)) and store.num_keys == 0


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.bfloat16), (24, torch.float16), (2, torch.float64)])
def test_gather_rows(device: str, dim: int, dtype: torch.dtype) -> None:
    """Every bit, NaN or not, for rows whose width is a power of two or not."""
    if not kernels.AVAILABLE:
        pytest.skip("Triton is not installed")
    random = torch.Generator().manual_seed(0)
    table = torch.randint(-(2**62), 2**62, (301, dim * dtype.itemsize // 8), generator=random).view(dtype).to(device)
    for count in (1, 65, 1000):
        keys = torch.randint(301, (count,), generator=random).to(device)
        found = kernels.gather_rows(table, keys)
        assert found.dtype == dtype and found.shape == (count, dim)
        assert torch.equal(found.view(torch.int64), table.index_select(0, keys).view(torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [256, 3])
def test_many_keys_give_the_rows_that_few_give(dim: int) -> None:
    store = make("torch", {"device": "cuda"}, 1000, dim)
    rows = torch.randn(1000, dim, device="cuda")
    store.update(on(store, range(1000)), rows)
    keys = torch.randint(1000, (100_000,), device="cuda")
    assert torch.equal(store.lookup(keys), rows[keys]) and torch.equal(store.lookup(keys[:9]), rows[keys[:9]])


@pytest.mark.parametrize(
    ("engine", "options", "match"),
    [
        ("torch", {"num_rows": 0}, "num_rows=0.*sizes are whole, from 1 on"),
        ("torch", {"num_rows": 2.5}, "num_rows=2.5.*sizes are whole"),
        ("fbgemm", {"dim": 4.0}, "dim=4.0.*sizes are whole"),
        ("torch", {"unknown": "ignore"}, "unknown is zero or error"),
        ("torch", {"cache_ratio": 0.5}, "cache_ratio is below 1 only beside"),
        ("torch", {"dtype": torch.int32}, "no tables of torch.int32; use torch.float64"),
        ("fbgemm", {"dtype": torch.bfloat16}, "no tables of torch.bfloat16; use torch.float32, torch.float16"),
        ("fbgemm", {"precision": "int2"}, "precision='int2'.*must be None, int8 .* or int4"),
        ("fbgemm", {"precision": "int8", "dim": 7}, "even width"),
        ("fbgemm", {"precision": "int4", "dim": 6}, "multiple of 4"),
        ("fbgemm", {"num_rows": 2**31}, "num_rows is 2147483648; fbgemm has keys of 32 bits"),
        ("torch", {"device": "gpu"}, "device 'gpu' is not a device"),
        ("torch", {"device": "cuda:99"}, "device 'cuda:99' asked for, and this machine has"),
        ("nve", {"layer": "linear_uvm"}, "must be host on a CPU"),
    ],
)
def test_impossible_stores(engine: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        engines[engine](**({"num_rows": 4, "dim": 4} | options))


@every_engine
def test_a_store_of_one_row_of_one_number_with_sizes_from_numpy(engine: str, options: dict[str, Any]) -> None:
    store = make(engine, options, np.int64(1), np.int64(1))
    store.update(on(store, [0] * 1000), torch.arange(1000.0, device=store.device).view(1000, 1))
    assert store.lookup(on(store, [0] * 1000)).unique().tolist() == [999]
    assert type(store.stats().device_bytes) is int


@pytest.mark.parametrize("engine", ["torch", "fbgemm"])
def test_the_device_may_be_left_to_the_machine(engine: str) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := engines[engine].missing(kind):
        pytest.skip(f"engine {engine}: {reason}")
    assert engines[engine](4, 4, device="auto").device.type == kind


def test_an_absent_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("fbgemm_gpu", "pynve.torch.nve_layers"):
        monkeypatch.setitem(sys.modules, name, None)
    for engine, way in (("fbgemm", "extra cpu or gpu"), ("nve", "build NVIDIA/nv-embedding-cache")):
        with pytest.raises(ValueError, match=f"no embedding engine '{engine}' for cpu: .*{way}"):
            engines[engine](4, 4)
    assert engines["torch"].missing("cpu") is None
    with pytest.raises(ValueError, match=r"unknown embedding engine 'nv'.*did you mean 'nve'"):
        engines["nv"]


@every_engine
def test_stats(engine: str, options: dict[str, Any]) -> None:
    store = make(engine, options)
    store.update(on(store, [1, 2]), torch.ones(2, DIM, device=store.device))
    store.lookup(on(store, [1, 1, 5]))
    stats = store.stats()
    assert isinstance(stats, StoreStats) and (stats.num_known, stats.num_keys) == (2, 3)
    if store.cache_ratio == 1:
        assert stats.host_bytes == 0 and stats.hit_rate is None
    if engine == "torch":
        assert stats.device_bytes == NUM_ROWS * DIM * 4


@pytest.mark.gpu
def test_the_cache_of_fbgemm_counts_its_hits() -> None:
    store = make("fbgemm", {"device": "cuda", "cache_ratio": 0.25}, 4096, 64)
    store.update(on(store, range(4096)), torch.randn(4096, 64, device="cuda"))
    for _ in range(4):
        store.lookup(on(store, range(100)))
    stats = store.stats()
    assert 0.7 <= stats.hit_rate <= 0.75 and stats.host_bytes >= 4096 * 256 > stats.device_bytes > 0
