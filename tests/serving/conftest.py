"""A real Triton server on the loopback address, one a backbone, for all tests that leave it as it was."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from recexp import RankingModel, SequenceBatch
from recexp.config import ModelConfig, ServingConfig
from recexp.serving.builder import build

if TYPE_CHECKING:
    from recexp.serving.client import Client
    from recexp.serving.server import Server

PAGE_SIZE, MAX_PAIRS, MAX_CANDIDATES, NUM_ITEMS = 4, 20, 12, 60


def make_model(backbone: str, **changes: object) -> RankingModel:
    config = {
        "backbone": backbone,
        "num_items": NUM_ITEMS,
        "context": {"user_id": 1000, "age": 3},
        "hidden_size": 16,
        "head_dim": 8,
        "max_history_pairs": MAX_PAIRS,
        "window_hop": 5,
        "max_candidates": MAX_CANDIDATES,
        "embedding_std": 1.0,  # so that every token matters to the logits
    }
    return RankingModel(ModelConfig(**config | changes), dtype=torch.float64)


@contextmanager
def served(model: RankingModel, folder: Path, *names: str, **serving: object) -> Iterator[Server]:
    """A server of the model in float64, pages of PAGE_SIZE tokens."""
    from recexp.serving.server import serve

    config = ServingConfig(dtype="float64", page_size=PAGE_SIZE, **serving)
    build(model.save(folder / "checkpoint").parent, folder / "models", config)
    with serve(folder / "models", names or ("*",)) as server:
        yield server


@pytest.fixture(scope="session")
def triton() -> None:
    """Skips where no server can run."""
    from recexp.serving.server import environment

    try:
        environment()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def servers(triton: None, tmp_path_factory: pytest.TempPathFactory):
    """Name of a backbone → its model and its server, started when first asked for."""
    with ExitStack() as stack:

        @functools.cache
        def get(backbone: str) -> tuple[RankingModel, Server]:
            model, folder = make_model(backbone), tmp_path_factory.mktemp(backbone)
            return model, stack.enter_context(served(model, folder, num_pages=513, timeout_ms=60_000))

        yield get


@pytest.fixture(params=["hstu", "transformer"])
def both(request: pytest.FixtureRequest, servers) -> tuple[RankingModel, Server]:
    return servers(request.param)


@pytest.fixture
def hstu(servers) -> tuple[RankingModel, Server]:
    return servers("hstu")


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, hstu) -> Iterator[Client]:
    from recexp.serving.client import Client

    with Client(getattr(hstu[1], request.param)) as client:
        yield client


def request_of(user: int, pairs: int, candidates: int = 3, seed: int = 0) -> SequenceBatch:
    """A user's request; the same user and seed have the same history, of which this is the beginning."""
    random = torch.Generator().manual_seed(1000 * seed + user)
    items = torch.randint(NUM_ITEMS, (100,), generator=random).tolist()
    actions = torch.randint(6, (100,), generator=random).tolist()
    wanted = torch.randint(NUM_ITEMS, (candidates,), generator=random).tolist()
    return SequenceBatch.from_lists([user], [items[:pairs]], [actions[:pairs]], [wanted], {"age": [user % 3]})


def relative(tested, reference: torch.Tensor) -> float:
    return float((torch.tensor(tested) - reference).norm() / reference.norm())


def read_metrics(server: Server) -> str:
    with urllib.request.urlopen(server.metrics, timeout=10) as answer:
        return answer.read().decode()


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a metric's values over what the labels leave open."""
    lines = re.findall(rf"^{name}{{(.*)}} (\S+)$", read_metrics(server), re.MULTILINE)
    return sum(float(value) for found, value in lines if all(f'{k}="{v}"' in found for k, v in labels.items()))


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still meanwhile: a stall that is as long on a fast machine as on a slow one."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
