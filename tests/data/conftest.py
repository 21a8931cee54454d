from pathlib import Path

import pytest

from recexp.config import cache_dir
from recexp.data import fetch_ml100k, load_movielens
from recexp.data.interactions import Interactions


@pytest.fixture(scope="session")
def ml100k_file() -> Path:
    """The real file, in the cache of this machine: fetched by the first test that asks for it."""
    return fetch_ml100k(cache_dir() / "data", quiet=True)


@pytest.fixture(scope="session")
def ml100k(ml100k_file: Path) -> Interactions:
    return load_movielens(ml100k_file, name="ml-100k")
