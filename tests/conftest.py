"""Options and skips that hold for every test."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "Agg")  # no window, here and in the processes that tests start
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: then they run on the CPU
settings.register_profile("recexp", deadline=None, derandomize=True)  # the same examples in every run
settings.load_profile("recexp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not config.getoption("--run-slow"):
        skips["slow"] = pytest.mark.skip(reason="takes long: --run-slow runs it")
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    import recexp.experiments.page_sizes  # noqa: F401  whose kind of points is no test's
    from recexp.experiments.sweep import points
    from recexp.layers import attention_backends, backbones

    for registry in (points, attention_backends, backbones):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """exported(backbone, page_size) -> a folder with model/ (a checkpoint) and model.pt2, page_size 0: without a cache.

    A package takes some 15 s to compile: each is made once in a session, by the command.
    """
    from typer.testing import CliRunner

    from recexp.cli import app
    from recexp.config import ModelConfig
    from recexp.model import RankingModel

    sizes = dict(num_items=50, max_history_pairs=10, hidden_size=32, num_heads=2, head_dim=16, max_candidates=12)
    sizes |= dict(context={"user_id": 40, "age": 7}, mlp_size=16, embedding_size=8, head_sizes=[16])

    @cache
    def make(backbone: str, page_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{backbone}_{page_size}")
        values = {"backbone": backbone} | ({} if page_size else {"num_heads": 1})  # of sizes of 1 compilers think more
        RankingModel(ModelConfig.model_validate({**sizes, **values})).save(folder / "model")
        command = ["export", str(folder / "model"), "--out", str(folder / "model.pt2"), "--max-users", "32"]
        done = CliRunner().invoke(app, [*command, "--page-size", str(page_size)], catch_exceptions=False)
        assert "attends by backend 'gather': 'padded' reads lengths on the host" in done.output
        assert f"wrote {folder / 'model.pt2'} (" in done.output
        return folder

    return make
