"""Engine ``nve``: NV-Embedding-Cache (pynve), where it is installed; written against v26.05 and v26.06.

Unverified on hardware. It checks nothing, reserves key −1 and leaves the output row of a key that it does not hold as
it was: the base class keeps such keys away, and the hierarchical layer looks unknown ones up in a row of zeros.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from recexp import devices
from recexp.cache.embeddings.store import EmbeddingStore

GET = "build NVIDIA/nv-embedding-cache as its README says (it is on no package index)"
LAYERS = {"host": "HostLayer", "linear_uvm": "LinearUVM", "hierarchical": "Hierarchical"}


class NveStore(EmbeddingStore):
    """layer: on a CPU "host" (no cache); on a GPU, with a cache there, "linear_uvm" (the table in host memory) or
    "hierarchical" (a parameter server that holds the known rows only)."""

    engine = "nve"
    cached_on = ("cuda",)

    def __init__(self, num_rows: int, dim: int, *, layer: str | None = None, **options: Any) -> None:
        on_cpu = devices.resolve(str(options.get("device", "cpu"))).type == "cpu"
        self.kind = layer or ("host" if on_cpu else "linear_uvm")
        if self.kind not in LAYERS or (self.kind == "host") != on_cpu:
            raise ValueError(f"layer is {layer!r}: must be host on a CPU, linear_uvm or hierarchical on a GPU")
        super().__init__(num_rows, dim, **options)

    @classmethod
    def missing(cls, device_type: str) -> str | None:
        try:
            layers = import_module("pynve.torch.nve_layers")
        except (ImportError, OSError) as error:
            return f"{error}; {GET}"
        old = device_type == "cpu" and not hasattr(layers, "LayerType")
        return f"this pynve has no HostLayer, which came with v26.06; {GET}" if old else None

    def _allocate(self) -> Any:
        layers, nve = import_module("pynve.torch.nve_layers"), import_module("pynve.nve")
        rows, tree = self.num_rows + 1, self.kind == "hierarchical"  # the last row stays zeros
        if tree:
            servers = import_module("pynve.torch.nve_ps")
            server = getattr(servers, "NVEParameterServer", None) or servers.NVLocalParameterServer
            self.storage = server(0, self.dim, self.dtype)  # 0: it grows and evicts nothing
        else:
            self.storage = nve.HostMemBlock(self.dim, rows, layers.torch_type_to_nve_type(self.dtype))
        kinds = getattr(layers, "LayerType", None)  # v26.05: CacheType, and a name for each kind of storage
        storage = "storage" if kinds else "remote_interface" if tree else "memblock"
        self.cache_bytes = 0 if self.kind == "host" else max(int(self.cache_ratio * rows), 1) * self.row_bytes
        sizes = {"gpu_cache_size": self.cache_bytes, "optimize_for_training": False, storage: self.storage}
        kind = getattr(kinds or layers.CacheType, LAYERS[self.kind])
        self.layer = layers.NVEmbedding(rows, self.dim, self.dtype, kind, device=self.device, **sizes)
        self._clear()
        return self.layer

    def _gather(self, keys: Tensor) -> Tensor:
        return self.layer(torch.where(self.known[keys], keys, self.num_rows) if self.kind == "hierarchical" else keys)

    def _scatter(self, keys: Tensor, rows: Tensor) -> None:
        if self.kind == "hierarchical":
            self.storage.erase(keys.cpu())
            self.storage.insert(keys.cpu(), rows.cpu())
        self.layer.update(keys, rows)  # also what a cache holds

    def _erase(self, keys: Tensor) -> None:
        if self.kind == "hierarchical":
            self.storage.erase(keys.cpu())  # a cache may hold them on, and is not asked before they are set again
        else:
            super()._erase(keys)

    def _clear(self) -> None:
        first = 0
        if self.kind == "hierarchical":
            self.layer.clear()
            first = self.num_rows
        for keys in torch.arange(first, self.num_rows + 1, device=self.device).split(65_536):
            self._scatter(keys, self._zeros(len(keys)))

    def _bytes(self) -> tuple[int, int]:
        table = self.row_bytes * (1 + int(self.known.sum()) if self.kind == "hierarchical" else self.num_rows + 1)
        return (table, 0) if self.kind == "host" else (self.cache_bytes, table)
