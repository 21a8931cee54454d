"""What the models share: the checkpoint, tensors by DLPack, requests joined, and errors that reach the client."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from recexp import checkpoint
from recexp.batch import SequenceBatch
from recexp.config import ServingConfig, load_config
from recexp.model import RankingModel
from recexp.serving.builder import CHECKPOINT, IDS, SERVING, context_inputs

LENGTHS, LONGEST = ("NUM_PAIRS", "NUM_CANDIDATES", "SEQ_LENGTHS"), 2**31 - 1  # so that their sums fit in 64 bits


class Model:
    """An instance. A subclass reads a request, raising for a bad one, and answers several at once with the outputs of
    each; an answer that raises leaves no trace."""

    read: Callable[[Any], Any]
    answer: Callable[[Sequence[Any]], list[dict[str, Any]]]

    def initialize(self, args: Mapping[str, str]) -> None:
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            raise pb_utils.TritonModelException(f"numpy {np.__version__}: the Python backend needs numpy below 2")
        folder = Path(args["model_repository"]).parent / CHECKPOINT
        self.serving: ServingConfig = load_config(folder / SERVING)
        on_cpu = args["model_instance_kind"] == "CPU"
        if on_cpu:
            torch.set_num_threads(self.serving.num_threads)
        self.model = load_shared(folder, "cpu" if on_cpu else f"cuda:{args['model_instance_device_id']}", self.serving)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Responses in the order of the requests. What a request does wrong is its own error and nobody else's."""
        start, given, done = time.perf_counter(), {}, {}
        for row, request in enumerate(requests):
            try:
                given[row] = self.read(request)
            except Exception as error:
                done[row] = self.respond(start, error)
        groups = self.groups(given)
        while groups:
            rows = groups.pop(0)
            try:
                outcomes: list[Any] = self.answer([given[row] for row in rows])
            except Exception as error:
                if len(rows) > 1:  # one of them is at fault
                    groups = [[row] for row in rows] + groups
                    continue
                outcomes = [error]
            done |= {row: self.respond(start, one) for row, one in zip(rows, outcomes, strict=True)}
        return [done[row] for row in range(len(requests))]

    def groups(self, given: Mapping[int, Any]) -> list[list[int]]:
        """Which requests are answered together, in order."""
        return [list(given)] if given else []

    def respond(self, start: float, outcome: Mapping[str, Any] | Exception) -> Any:
        """Outputs, or an error: a ValueError's own sentence, and of anything else no more than its name."""
        if not isinstance(outcome, Exception):
            return pb_utils.InferenceResponse([as_output(*pair) for pair in outcome.items()])
        code, text = pb_utils.TritonError.INVALID_ARG, str(outcome)
        if not isinstance(outcome, ValueError):
            pb_utils.Logger.log_error("".join(traceback.format_exception(outcome)))
            code, text = pb_utils.TritonError.INTERNAL, f"{type(outcome).__name__}; the server's log has the details"
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


def load_shared(folder: Path, device: str, serving: ServingConfig) -> RankingModel:
    """The checkpoint's model. On a CPU its weights stay in the mapped file, if that has their dtype: the page cache
    holds them once, however many instances read them."""
    model = RankingModel.load(folder, device, getattr(torch, serving.dtype)).eval().requires_grad_(False)
    if device == "cpu":
        stored = load_file(folder / checkpoint.WEIGHTS)
        same = {name: stored[name] for name, own in model.state_dict().items() if stored[name].dtype == own.dtype}
        model.load_state_dict(same, strict=False, assign=True)
    context = {name: [0] for name in model.config.context}
    model.predict(SequenceBatch.from_lists([0], [[0]], [[0]], [[0]], context))  # what loads on first use loads now
    return model


def as_input(request: Any, name: str) -> Tensor:
    """The tensor of one request without its leading dimension, which is 1."""
    tensor = from_dlpack(pb_utils.get_input_tensor_by_name(request, name).to_dlpack())
    if tensor.shape[0] != 1:
        shape = list(tensor.shape)
        raise ValueError(f"{name} has shape {shape}: write [1, …], users one behind the other, as NUM_PAIRS tells them")
    if name in LENGTHS and tensor.numel() and int(tensor.max()) > LONGEST:
        raise ValueError(f"{name} holds {int(tensor.max())}; no length is above {LONGEST}")
    return tensor[0]


def as_output(name: str, value: Tensor | list[str]) -> Any:
    if isinstance(value, list):
        return pb_utils.Tensor(name, np.array([value], dtype=np.object_))
    value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return pb_utils.Tensor.from_dlpack(name, value[None].contiguous())


def read_batch(request: Any, model: RankingModel) -> SequenceBatch:
    context = {feature: as_input(request, name) for name, feature in context_inputs(model.config).items()}
    return SequenceBatch(**{name: as_input(request, name.upper()) for name in IDS}, context_ids=context)


def join(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """The users of several requests in one batch, in order."""
    context = {name: torch.cat([batch.context_ids[name] for batch in batches]) for name in batches[0].context_ids}
    return SequenceBatch(**{n: torch.cat([getattr(b, n) for b in batches]) for n in IDS}, context_ids=context)
