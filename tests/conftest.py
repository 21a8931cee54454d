"""Options and skips that hold for every test."""

import os

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
