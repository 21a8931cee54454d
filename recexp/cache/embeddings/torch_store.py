"""Engine ``torch``: the whole table as one tensor on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from recexp.cache.embeddings.store import EmbeddingStore


class TorchStore(EmbeddingStore):
    engine = "torch"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def _allocate(self) -> None:
        self.table = torch.zeros(self.num_rows, self.dim, dtype=self.dtype, device=self.device)

    def _gather(self, keys: Tensor) -> Tensor:
        return self.table.index_select(0, keys)

    def _scatter(self, keys: Tensor, rows: Tensor) -> None:
        self.table.index_copy_(0, keys, rows)

    def _clear(self) -> None:
        self.table.zero_()

    def _bytes(self) -> tuple[int, int]:
        return self.table.nbytes, 0
