"""``sparse``: ids → embedded tokens, on the sequence stage alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recexp.batch import SequenceBatch
from recexp.layers.sequence import token_layout
from recexp.serving.models.common import Model, join, read_batch


class TritonPythonModel(Model):
    def read(self, request: Any) -> SequenceBatch:
        return read_batch(request, self.model)

    def answer(self, given: Sequence[SequenceBatch]) -> list[dict[str, Tensor]]:
        config, batch = self.model.config, join(given)
        self.model.check(batch)
        batch = batch.windowed(config.max_history_pairs, config.window_hop or 1)
        layout = token_layout(batch, len(config.context))
        with torch.inference_mode():
            values = self.model.sequence(batch.to(self.model.device), layout).values
        lengths = torch.from_numpy(layout.seq_offsets).diff().split([one.batch_size for one in given])
        parts = values.split([int(part.sum()) for part in lengths])
        return [{"VALUES": part, "SEQ_LENGTHS": one} for part, one in zip(parts, lengths, strict=True)]
