"""Embedding stores: tables whose rows an engine keeps (torch, fbgemm, nve), all behind ``EmbeddingStore``."""

from recexp.cache.embeddings.bulk_load import load_key_values, load_safetensors
from recexp.cache.embeddings.fbgemm_store import FbgemmStore
from recexp.cache.embeddings.nve_store import NveStore
from recexp.cache.embeddings.store import EmbeddingStore, StoreStats, engines, lookup_features
from recexp.cache.embeddings.torch_store import TorchStore

for _store in (TorchStore, FbgemmStore, NveStore):  # `store` is a module
    engines.add(_store.engine, _store)
engines.fix()

__all__ = ["EmbeddingStore", "StoreStats", "engines", "load_key_values", "load_safetensors", "lookup_features"]
