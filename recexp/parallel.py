"""Data-parallel training: the processes that torchrun started, a device each, as one group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """This process's device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    count: int = 1

    def mean(self, value: float) -> float:
        """The mean over the processes, in each of them the same, so that all decide alike."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return total.item() / self.count


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """The group that torchrun started, joined by NCCL on GPUs and by Gloo elsewhere; without torchrun, one process.

    Under torchrun every process has the device of its local rank, whichever GPU ``device`` names.
    """
    if not distributed.is_torchelastic_launched():
        yield Processes(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    joined = distributed.is_initialized()  # by a caller, who leaves it too
    if not joined:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(device, distributed.get_rank(), distributed.get_world_size())
    finally:
        if not joined:
            distributed.destroy_process_group()
