"""Engine ``torch``: the whole table as one tensor on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from recexp.cache.embeddings.kernels import AVAILABLE, gather_rows
from recexp.cache.embeddings.store import EmbeddingStore

MANY = 32_768  # keys from which on a kernel's time on a GPU counts for more than a Triton launch's on the host


class TorchStore(EmbeddingStore):
    engine = "torch"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def _gather(self, keys: Tensor) -> Tensor:
        if len(keys) >= MANY and AVAILABLE and self.row_bytes % 16 == 0 and keys.is_cuda:
            return gather_rows(self.table, keys)
        return super()._gather(keys)
