"""Instances on one host share one copy of the embeddings: the page cache's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from recexp import SequenceBatch
from recexp.config import ServingConfig
from recexp.serving.builder import build
from recexp.serving.client import Client
from recexp.serving.server import serve

from .conftest import make_model
from .test_lifecycle import children

NUM_ITEMS, NUM_INSTANCES = 400_000, 3  # a table of 400,000 x 16 x 4 bytes: 25.6 MB


def memory(pid: int, file: Path | None) -> dict[str, int]:
    """Bytes by /proc/PID/smaps: of the mappings of a file, or of all that no file backs."""
    found: dict[str, int] = {}
    counts = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            parts = line.split(maxsplit=5)
            name = parts[5] if len(parts) > 5 else ""
            counts = name == str(file) if file else name in ("", "[heap]")
        elif counts and line.endswith(" kB"):
            name, value, _ = line.split()
            found[name.rstrip(":")] = found.get(name.rstrip(":"), 0) + 1024 * int(value)
    return found


def test_three_instances_hold_one_copy(triton, tmp_path: Path) -> None:
    model = make_model("hstu", num_items=NUM_ITEMS, max_candidates=NUM_ITEMS, context={}).float()
    table = model.sequence.item_embedding.weight.nbytes
    config = ServingConfig(num_instances=NUM_INSTANCES, max_batch=1)
    build(model.save(tmp_path / "checkpoint").parent, tmp_path / "models", config)
    weights = tmp_path / "models" / "sparse" / "checkpoint" / "model.safetensors"
    every_page = list(range(0, NUM_ITEMS, 32))  # 32 rows of 64 bytes are half a page of memory
    with serve(tmp_path / "models", ["sparse", "dense"]) as server, Client(server.grpc) as client:
        commands = children(server.process.pid)
        sparse = [pid for pid, command in commands.items() if "/sparse/1/" in command]
        dense = [pid for pid, command in commands.items() if "/dense/1/" in command]
        assert len(sparse) == len(dense) == NUM_INSTANCES
        batch = SequenceBatch.from_lists([0], [[]], [[]], [every_page])
        for _ in range(4 * NUM_INSTANCES):  # until every instance has read the whole table
            values = client.triton.infer("sparse", **client.request(batch)).as_numpy("VALUES")[0]
            mapped = [memory(pid, weights) for pid in sparse]
            if min(one["Rss"] for one in mapped) > 0.95 * table:
                break
        expected = model.sequence.item_embedding.weight[every_page] * model.sequence.scale
        expected = expected + model.sequence.position_embedding.weight[0]
        assert torch.allclose(torch.tensor(values), expected.detach(), rtol=1e-6)
        assert all(one["Rss"] > 0.95 * table for one in mapped)  # each sees all of it
        assert sum(one["Pss"] for one in mapped) < 1.1 * weights.stat().st_size  # together they hold it once
        assert all(one["Private_Dirty"] == 0 for one in mapped)
        own = [max(memory(pid, None)["Rss"] for pid in some) for some in (sparse, dense)]
        assert own[0] - own[1] < 0.5 * table  # and none has a copy beside the mapping
