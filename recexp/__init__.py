"""recexp: a research kit for the inference side of generative recommenders.

``from recexp import load_config, RankingModel, SequenceBatch`` is the public door. The names are resolved on first use,
so that ``import recexp.layers`` needs nothing but torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recexp.batch import SequenceBatch
    from recexp.config import load_config
    from recexp.model import RankingModel

__version__ = "0.1.0"
__all__ = ["RankingModel", "SequenceBatch", "__version__", "load_config"]

_HOMES = {"load_config": "recexp.config", "RankingModel": "recexp.model", "SequenceBatch": "recexp.batch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recexp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
