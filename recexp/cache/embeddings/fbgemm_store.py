"""Engine ``fbgemm``: FBGEMM's table-batched embeddings for inference (IntNBitTableBatchedEmbeddingBagsCodegen).

On a GPU with cache_ratio 1 the table lies on the device; below that in host memory, with FBGEMM's LRU cache on the
device. Unverified on hardware there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from recexp.cache.embeddings.store import EmbeddingStore

TBE = "fbgemm_gpu.split_table_batched_embeddings_ops_"


class FbgemmStore(EmbeddingStore):
    """precision: rows are kept as integers with a scale and an offset each (float16, 4 bytes a row)."""

    engine = "fbgemm"
    cached_on = ("cuda",)

    def __init__(
        self, num_rows: int, dim: int, *, precision: Literal["int8", "int4"] | None = None, **options: Any
    ) -> None:
        self.bits, dtype = {None: 0, "int8": 8, "int4": 4}.get(precision), options.get("dtype", torch.float32)
        if self.bits is None or (self.bits and (dim * self.bits % 16 or dtype != torch.float32)):
            rule = "must be None, int8 (float32 rows of even width) or int4 (a width that is a multiple of 4)"
            raise ValueError(f"{precision=}, {dim=}, {dtype=}: {rule}")
        if num_rows >= 2**31:
            raise ValueError(f"num_rows is {num_rows}; fbgemm has keys of 32 bits, 2147483647 rows: use engine torch")
        super().__init__(num_rows, dim, **options)
        if self.bits:
            self.largest = torch.finfo(torch.float16).max  # a row's scale and offset are float16

    @classmethod
    def missing(cls, device_type: str) -> str | None:
        try:
            variant = getattr(import_module("fbgemm_gpu"), "__variant__", "")
        except (ImportError, OSError) as error:
            return f"{error}; install recexp with its extra cpu or gpu"
        return "fbgemm-gpu-cpu is installed; install recexp[gpu]" if (device_type, variant) == ("cuda", "cpu") else None

    def _allocate(self) -> Tensor:
        common, inference = import_module(TBE + "common"), import_module(TBE + "inference")
        sparse, places = import_module("fbgemm_gpu.split_embedding_configs").SparseType, common.EmbeddingLocation
        given = sparse.FP32 if self.dtype == torch.float32 else sparse.FP16
        kept = {0: given, 8: sparse.INT8, 4: sparse.INT4}[self.bits or 0]
        self.caching, on_cpu = self.cache_ratio < 1, self.device.type == "cpu"
        place = places.MANAGED_CACHING if self.caching else places.HOST if on_cpu else places.DEVICE
        self.tbe = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
            [("", self.num_rows, self.dim, kept, place)],
            pooling_mode=common.PoolingMode.NONE,
            bounds_check_mode=common.BoundsCheckMode.NONE,  # the base class has checked
            output_dtype=given, device=self.device, uvm_host_mapped=True,
            cache_load_factor=self.cache_ratio, gather_uvm_cache_stats=self.caching,
        )  # fmt: skip
        self.tbe.initialize_weights()  # zeros
        ((raw, _),) = self.tbe.split_embedding_weights(split_scale_shifts=False)  # uint8 [num_rows, bytes, aligned]
        return raw[:, : self.dim * self.bits // 8 + 4] if self.bits else raw[:, : self.row_bytes].view(self.dtype)

    def _gather(self, keys: Tensor) -> Tensor:
        return self.tbe(keys.int(), torch.arange(len(keys) + 1, dtype=torch.int32, device=self.device))

    def _scatter(self, keys: Tensor, rows: Tensor) -> None:
        if self.bits:
            fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows.cpu(), self.bits)
            rows = torch.cat([fused[:, -4:], fused[:, :-4]], 1).to(self.device)  # in tables scale and offset come first
        super()._scatter(keys, rows)
        self.tbe.reset_cache_states()

    def _clear(self) -> None:
        super()._clear()
        self.tbe.reset_cache_states()

    def _bytes(self) -> tuple[int, int]:
        table = self.num_rows * self.table.stride(0) * self.table.itemsize
        return (self.tbe.lxu_cache_weights.nbytes, table) if self.caching else (table, 0)

    def _hit_rate(self) -> float | None:
        _, _, distinct, misses, *_ = self.tbe.get_uvm_cache_stats().tolist() if self.caching else (0, 0, 0, 0)
        return 1 - misses / distinct if distinct else None
