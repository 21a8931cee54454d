"""``dense``: embedded tokens → logits of the candidates, on the layers and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recexp.batch import TokenBatch, offsets
from recexp.serving.models.common import Model, as_input


class TritonPythonModel(Model):
    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self.weight = self.model.sequence.position_embedding.weight  # for its device and dtype
        del self.model.sequence

    def read(self, request: Any) -> list[Tensor]:
        """Values [T, D], tokens of each user [B], candidates of each user [B]."""
        values, lengths, num_candidates = (
            as_input(request, name) for name in ("VALUES", "SEQ_LENGTHS", "NUM_CANDIDATES")
        )
        longest = int(lengths.max()) if len(lengths) else 0
        TokenBatch(values, offsets(lengths), num_candidates, longest)  # raises for lengths that do not fit
        return [values, lengths, num_candidates]

    def answer(self, given: Sequence[list[Tensor]]) -> list[dict[str, Tensor]]:
        values, lengths, num_candidates = (torch.cat(parts) for parts in zip(*given, strict=True))
        ends, longest = lengths.cumsum(0), int(lengths.max()) if len(lengths) else 0
        users = zip(ends.tolist(), num_candidates.tolist(), strict=True)
        rows = torch.tensor([row for end, count in users for row in range(end - count, end)], dtype=torch.int64)
        device, dtype = self.weight.device, self.weight.dtype
        seq_offsets, num_candidates = offsets(lengths, torch.int32).to(device), num_candidates.int().to(device)
        with torch.inference_mode():
            x = self.model.backbone(TokenBatch(values.to(device, dtype), seq_offsets, num_candidates, longest))
            logits = self.model.head(x[rows.to(device)])
        return [{"LOGITS": part} for part in logits.split([int(one[2].sum()) for one in given])]
