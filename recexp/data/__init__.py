"""From published files (or a seed) to users' histories to ranking requests."""

from __future__ import annotations

from recexp.config import DataConfig, cache_dir
from recexp.data.fetch import fetch_ml100k
from recexp.data.interactions import Interactions
from recexp.data.movielens import load_movielens
from recexp.data.requests import Splits, global_time, leave_last
from recexp.data.synthetic import make_synthetic


def load_interactions(config: DataConfig, quiet: bool = False) -> Interactions:
    """The data set that ``config`` names; MovieLens-100K is fetched into the cache the first time."""
    if config.dataset == "synthetic":
        return make_synthetic(config.synthetic)
    if config.dataset == "ml-100k":
        return load_movielens(config.folder or fetch_ml100k(cache_dir() / "data", quiet=quiet), name="ml-100k")
    assert config.folder is not None  # DataConfig sees to it
    return load_movielens(config.folder)


def make_splits(config: DataConfig, interactions: Interactions) -> Splits:
    """Training, validation and test by the protocol that ``config`` names."""
    protocol = {"leave_last": leave_last, "global_time": global_time}[config.protocol]
    return protocol(interactions, config.max_candidates)
