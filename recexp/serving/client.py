"""A client of a served model: requests as a SequenceBatch over HTTP or gRPC, and a health probe."""

import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recexp.batch import SequenceBatch
from recexp.serving.builder import IDS

try:
    from tritonclient.utils import InferenceServerException
except ImportError as error:
    raise ValueError("recexp serving needs tritonclient: pip install 'recexp[serving]'") from error


@dataclass(frozen=True)
class Answer:
    """logits: [sum(num_candidates), num_tasks]. tiers, tokens_reused: of each user, from ranking models only."""

    logits: NDArray[Any]
    tiers: list[str]
    tokens_reused: list[int]

    @classmethod
    def of(cls, result: Any) -> "Answer":
        tiers, reused = result.as_numpy("TIER"), result.as_numpy("TOKENS_REUSED")
        found = [] if tiers is None else [tier.decode() for tier in tiers[0]]
        return cls(result.as_numpy("LOGITS")[0], found, [] if reused is None else reused[0].tolist())


class Client:
    """A connection to `http://host:port` or `grpc://host:port`; of one thread. Needs tritonclient[http,grpc].

    Errors of the server arrive as tritonclient's InferenceServerException, whose text is the server's sentence.
    """

    def __init__(self, url: str, timeout_s: float = 60) -> None:
        protocol, _, address = url.partition("://")
        if protocol not in ("http", "grpc") or not address:
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT or grpc://HOST:PORT")
        self.module = import_module(f"tritonclient.{protocol}")
        limits = {"connection_timeout": timeout_s, "network_timeout": timeout_s} if protocol == "http" else {}
        self.triton = self.module.InferenceServerClient(address, **limits)
        self.limits, self.as_dict = ({}, {}) if limits else ({"client_timeout": timeout_s}, {"as_json": True})

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.triton.close()

    def drain(self, timeout_s: float = 60) -> None:
        """Unload all models, the ensemble first: what was accepted is answered, what comes now is refused. For before a
        server is told to end, because then Triton closes gRPC streams that still wait for their answers."""
        deadline, left, asked = time.monotonic() + timeout_s, {""}, set[str]()
        with suppress(InferenceServerException, OSError):  # a server that has not begun, or ends by itself
            while left and time.monotonic() < deadline:
                models = self.triton.get_model_repository_index(**self.as_dict)
                models = models["models"] if self.as_dict else models
                left = {m["name"] for m in models if m.get("state") in ("READY", "UNLOADING")}
                for name in ({"ensemble"} & left or left) - asked:
                    self.triton.unload_model(name)
                    asked.add(name)
                time.sleep(0.05)

    def predict(self, batch: SequenceBatch, model: str = "ranking", cache: bool = True) -> Answer:
        """The logits of a batch, and where its histories were. cache=False: computed without the model's cache."""
        return Answer.of(self.triton.infer(model, **self.request(batch, cache)))

    def request(self, batch: SequenceBatch, cache: bool = True) -> dict[str, Any]:
        """Arguments of tritonclient's `infer` and `async_infer`."""
        tensors = {name.upper(): getattr(batch, name) for name in IDS}
        tensors |= {f"CONTEXT_{name}": ids for name, ids in batch.context_ids.items()}
        inputs = []
        for name, tensor in tensors.items():
            values = tensor.cpu().numpy().astype(np.int64)[None]
            inputs.append(self.module.InferInput(name, values.shape, "INT64").set_data_from_numpy(values))
        return {"inputs": inputs, "parameters": {} if cache else {"cache": False}, **self.limits}

    def probe(self, model: str = "ranking", reload: bool = False) -> str | None:
        """Ask for a real answer, since a server says READY of a model whose process is dead; None, or what is wrong.

        reload: load a model that does not answer anew, with an empty cache. The probe itself leaves the cache as it is.
        """
        failures, problem = (InferenceServerException, OSError), None
        try:
            names = [tensor["name"] for tensor in self.triton.get_model_metadata(model, **self.as_dict)["inputs"]]
            context = {name.removeprefix("CONTEXT_"): [0] for name in names if name.startswith("CONTEXT_")}
            answer = self.predict(SequenceBatch.from_lists([0], [[]], [[]], [[0]], context), model, cache=False)
            if not np.isfinite(answer.logits).all():
                problem = "its logits are no numbers"
        except failures as error:
            problem = str(error)
        if problem and reload:
            try:
                self.triton.unload_model(model, unload_dependents=True)  # of an ensemble: its models too
                self.triton.load_model(model)
                problem += "; it is loaded anew"
            except failures as error:
                problem += f"; nor can it be loaded anew: {error}"
        return problem
