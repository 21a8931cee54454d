"""Bulk loads: the rows of the files in every engine, errors for files that are not whole, bounded memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recexp import RankingModel, SequenceBatch
from recexp.cache.embeddings import bulk_load, load_key_values, load_safetensors
from recexp.config import ModelConfig

KEY_VALUE_ROWS, DIM = 23, 8
ENGINES = ["torch", "fbgemm"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_load, "CHUNK_BYTES", 3 * DIM * 4 + 1)  # three float32 rows


def make_model() -> RankingModel:
    return RankingModel(ModelConfig(num_items=17, hidden_size=DIM, num_heads=1, head_dim=8))


def write_pair(folder: Path, suffix: str, keys: np.ndarray, rows: np.ndarray) -> None:
    keys.astype(np.int64).tofile(folder / f"item_emb_keys{suffix}")
    rows.astype(np.float32).tofile(folder / f"item_emb_values{suffix}")


@pytest.fixture
def key_values(tmp_path: Path) -> tuple[Path, dict[int, np.ndarray]]:
    """Two ranks, as peers shard them (key mod 2), an empty third table beside them, and a key that occurs twice."""
    random = np.random.default_rng(0)
    keys = np.append(random.permutation(40)[:KEY_VALUE_ROWS], 0)
    keys[0] = 0
    rows = random.standard_normal((len(keys), DIM)).astype(np.float32)
    for rank in range(2):
        mine = keys % 2 == rank
        write_pair(tmp_path, f".rank_{rank}.world_size_2", keys[mine], rows[mine])
    (tmp_path / "user_emb_keys.rank_0.world_size_1").touch()
    (tmp_path / "user_emb_values.rank_0.world_size_1").touch()
    return tmp_path, dict(zip(keys.tolist(), rows, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("engine", ENGINES)
def test_key_value_files(engine: str, key_values: tuple[Path, dict[int, np.ndarray]], capsys) -> None:
    folder, known = key_values
    store = load_key_values(engine, folder, "item", num_rows=50, dim=DIM)
    assert f"{KEY_VALUE_ROWS + 1}/{KEY_VALUE_ROWS + 1}" in capsys.readouterr().err.replace(".0", "")  # progress
    wanted = np.array([known.get(key, np.zeros(DIM)) for key in range(50)], np.float32)
    assert np.array_equal(store.lookup(torch.arange(50)).numpy(), wanted)
    assert store.stats().num_known == len(known)
    assert load_key_values(engine, folder, "user", num_rows=5, dim=DIM, quiet=True).stats().num_known == 0
    half = load_key_values(engine, folder, "item", num_rows=50, dim=DIM, quiet=True, dtype=torch.float16)
    assert np.array_equal(half.lookup(torch.arange(50)).numpy(), wanted.astype(np.float16))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tables_of_a_checkpoint(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model().to(dtype=dtype)
    path = model.save(tmp_path)
    store = load_safetensors(engine, path, "sequence.item_embedding.weight", num_rows=20, quiet=True)
    wanted = torch.cat([model.sequence.item_embedding.weight.detach(), torch.zeros(3, DIM, dtype=dtype)])
    found = store.lookup(torch.arange(20))
    assert found.dtype == dtype and torch.equal(found, wanted) and store.stats().num_known == 17


def test_files_that_are_not_whole(key_values: tuple[Path, dict[int, np.ndarray]], tmp_path: Path) -> None:
    folder, _ = key_values

    def load(table: str = "item", dim: int = DIM, num_rows: int = 50) -> None:
        load_key_values("torch", folder, table, num_rows=num_rows, dim=dim, quiet=True)

    with pytest.raises(ValueError, match="does not hold table 'context' whole: 0 files of keys"):
        load("context")
    with pytest.raises(ValueError, match=r"item_emb_values.rank_0.* not 36 each; item_emb_values.rank_1"):
        load(dim=9)
    with pytest.raises(ValueError, match=r"key .* is out of range: num_rows is 10"):
        load(num_rows=10)
    values = folder / "item_emb_values.rank_1.world_size_2"
    whole = values.read_bytes()
    values.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{values.name} has {len(whole) - 1} bytes"):
        load()
    with pytest.raises(ValueError, match=r"table 'it\[e\]m\*' whole: 0 files"):  # a name, not a pattern
        load("it[e]m*")
    (folder / "lost_emb_keys").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match="table 'lost' whole: 0 files"):
        load("lost")
    values.unlink()
    with pytest.raises(ValueError, match=f"{values.name} has no bytes"):
        load()
    (folder / "item_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(ValueError, match=r"1 files of keys, of \{2\} ranks"):
        load()


def test_safetensors_files_that_are_not_whole(tmp_path: Path) -> None:
    path, table = make_model().save(tmp_path), "sequence.item_embedding.weight"
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=f"{absent} does not hold '{table}' as a whole.*it has nothing"):
            load_safetensors("torch", absent, table)
    with pytest.raises(ValueError, match=f"does not hold 'items' as a whole.* it has .*{table}"):
        load_safetensors("torch", path, "items")
    with pytest.raises(ValueError, match=r"does not hold 'sequence.item_mlp.bias'"):  # not 2-D
        load_safetensors("torch", path, "sequence.item_mlp.bias")
    with pytest.raises(ValueError, match="does not hold '__metadata__'"):
        load_safetensors("torch", path, "__metadata__")
    with pytest.raises(ValueError, match="num_rows=0"):
        load_safetensors("torch", path, table, num_rows=0)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    lies = json.loads(whole[8 : 8 + length])
    lies[table]["shape"][0] += 1
    wrong = [whole[:cut] for cut in (0, 5, 100, 8 + length + lies[table]["data_offsets"][1] - 1, len(whole) - 1)]
    wrong += [whole[:8] + b"\xff" * length + whole[8 + length :], struct.pack("<Q", 2) + b"[]"]
    wrong += [struct.pack("<Q", len(text := json.dumps(lies).encode())) + text + whole[8 + length :], whole + b"0"]
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="does not hold"):
            load_safetensors("torch", path, table)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_load_leaves_the_model_as_it_was(
    stopped_by: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, table = make_model(), "sequence.item_embedding.weight"
    path = model.save(tmp_path)
    model.use_stores({"item": load_safetensors("torch", path, table, quiet=True)})
    batch = SequenceBatch.from_lists([0], [[1, 2]], [[1, 2]], [[3, 16]])
    before, version = model.predict(batch), model.stores["item"].version
    read, calls = np.fromfile, []

    def stop_at_the_fourth(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise stopped_by
        return read(*args, **options)

    monkeypatch.setattr(np, "fromfile", stop_at_the_fourth)
    with pytest.raises(stopped_by):
        model.use_stores({"item": load_safetensors("torch", path, table, quiet=True)})
    assert model.stores["item"].version == version and torch.equal(model.predict(batch), before)


MEASURE = """
import resource, sys
import torch
from recexp.cache.embeddings import engines, load_key_values
count, dim, engine, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
engines[engine](9, dim)  # what importing an engine takes
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
store = load_key_values(engine, folder, "item", num_rows=count, dim=dim, quiet=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / (count * dim * 4))
assert store.stats().num_known == count
assert store.lookup(torch.tensor([count - 1, 0]))[:, 0].tolist() == [float(count - 1), 0.0]
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_ten_million_rows_take_less_than_a_third_more_memory_than_the_table(engine: str, tmp_path: Path) -> None:
    count, dim = 10_000_000, 128
    np.arange(count).tofile(tmp_path / "item_emb_keys.rank_0.world_size_1")
    with (tmp_path / "item_emb_values.rank_0.world_size_1").open("wb") as file:
        for first in range(0, count, 100_000):
            np.repeat(np.arange(first, first + 100_000, dtype=np.float32), dim).tofile(file)
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(count), str(dim), engine, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 <= float(done.stdout) < 1.3
