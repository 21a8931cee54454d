"""``dense``: embedded tokens → logits of the candidates, on the layers and the head."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recexp.batch import TokenBatch, check_offsets, offsets
from recexp.serving.models.common import Model, as_input


class TritonPythonModel(Model):
    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self.weight = self.model.sequence.position_embedding.weight  # for its device and dtype
        del self.model.sequence

    def read(self, request: Any) -> list[Tensor]:
        """Values [T, D], tokens of each user [B], candidates of each user [B]."""
        given = [as_input(request, name) for name in ("VALUES", "SEQ_LENGTHS", "NUM_CANDIDATES")]
        check_offsets(len(given[0]), offsets(given[1]), given[2], None)
        if not given[0].isfinite().all():
            raise ValueError("VALUES holds NaN or infinity; embeddings are finite")
        return given

    def answer(self, given: Sequence[list[Tensor]]) -> list[dict[str, Tensor]]:
        values, lengths, num_candidates = (torch.cat(parts) for parts in zip(*given, strict=True))
        users = zip(lengths.cumsum(0).tolist(), num_candidates.tolist(), strict=True)
        rows = torch.tensor([row for end, count in users for row in range(end - count, end)], dtype=torch.int64)
        x, device = values.to(self.weight), self.weight.device
        seq_offsets, num_candidates = offsets(lengths, torch.int32).to(device), num_candidates.int().to(device)
        with torch.inference_mode():
            x = self.model.backbone(TokenBatch(x, seq_offsets, num_candidates, max(lengths.tolist(), default=0)))
            logits = self.model.head(x[rows.to(device)])
        return [{"LOGITS": part} for part in logits.split([int(one[2].sum()) for one in given])]
