"""One attention for both backbones: the rule who sees whom, the registry of backends, and ``attend``.

For query i and key j of one user, positions counted in the whole sequence (cached prefix included), h history tokens:

    visible(i, j) = (j <= i) and (j < h or j == i)

History is causal; a candidate sees the whole history and itself, never another candidate. Over the visible keys

    silu:    out_i = sum_j SiLU(alpha * q_i·k_j) / scaling_seqlen * v_j          (HSTU, arXiv 2402.17152)
    softmax: out_i = sum_j softmax_j(alpha * q_i·k_j) * v_j                      (Transformer)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recexp.batch import check_offsets, describe
from recexp.devices import profile_of, sm_of
from recexp.metadata import KVMetadata
from recexp.registry import Registry

Weighting = Literal["silu", "softmax"]
KV = tuple[Tensor, KVMetadata]  # table [num_pages, 2, page_size, H, d] and what is where in it


@dataclass(frozen=True)
class AttentionRequest:
    """What a backend is asked for, known before any tensor is touched. ``page_size`` is None without a cache."""

    weighting: Weighting
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    head_dim: int
    page_size: int | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """What a backend gets: arguments as in ``attend``, already checked; scaling_seqlen is 1 where none was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    seq_offsets: Tensor
    num_candidates: Tensor
    weighting: Weighting
    alpha: float
    scaling_seqlen: float = 1.0
    max_seqlen: int | None = None
    kv: KV | None = None

    @property
    def page_size(self) -> int | None:
        return None if self.kv is None else self.kv[0].shape[2]

    @property
    def request(self) -> AttentionRequest:
        needs_grad = torch.is_grad_enabled() and (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad)
        q = self.q
        return AttentionRequest(self.weighting, q.device, q.dtype, q.shape[1], q.shape[2], self.page_size, needs_grad)


AttentionFunction = Callable[[AttentionCall], Tensor]  # -> [T, H, d]


@dataclass(frozen=True)
class AttentionBackend:
    """A registered backend: its function, and why it refuses a request (None: it does not)."""

    name: str
    run: AttentionFunction
    refuses: Callable[[AttentionRequest], str | None]
    capturable: bool  # reads every length on the device, and 0 for rows of nobody: a CUDA graph serves other lengths
    trainable: bool  # has gradients


backends: Registry[AttentionBackend] = Registry("attention backend")


def register_attention_backend(
    name: str,
    *,
    refuses: Callable[[AttentionRequest], str | None] = lambda request: None,
    capturable: bool = False,
    trainable: bool = False,
) -> Callable[[AttentionFunction], AttentionFunction]:
    """Decorator that makes a function available as ``attend(..., backend=name)``."""

    def register(run: AttentionFunction) -> AttentionFunction:
        backends.add(name, AttentionBackend(name, run, refuses, capturable, trainable))
        return run

    return register


def refusal(backend: str, request: AttentionRequest) -> str | None:
    """Why ``backend`` cannot serve ``request``, or None. Raises ValueError for an unknown backend."""
    entry = backends[backend]
    if request.requires_grad and not entry.trainable:
        return "it has no gradients"
    return entry.refuses(request)


def kernel_refusal(backend: str, request: AttentionRequest) -> str | None:
    """Why a backend that depends on the SM refuses, by what recexp.devices knows of the request's device."""
    if request.device.type != "cuda":
        return f"it runs on CUDA devices, not on {request.device.type}"
    profile = profile_of(sm_of(request.device))
    return profile.refuses(backend, request.weighting, request.dtype, request.head_dim, request.page_size)


def choose(backend: str, request: AttentionRequest) -> str:
    """The name of the backend that serves a request: ``backend``, or auto's choice. ValueError: it refuses."""
    if backend == "auto":
        from recexp.layers.backends.auto import select  # knows the backends, which know this module

        return select(request)[0]
    if reason := refusal(backend, request):
        raise ValueError(f"attention backend {backend!r} refuses {request}: {reason}")
    return backend


def attend(
    q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor, num_candidates: Tensor, *, weighting: Weighting,
    alpha: float, scaling_seqlen: float | None = None, max_seqlen: int | None = None, backend: str = "reference",
    kv: KV | None = None,
) -> Tensor:  # fmt: skip
    """Attention of jagged users by the rule above.

    q, k, v: [T, H, d], any row stride; a user's rows are its (new) history, then its candidates. A capturable backend
    takes rows behind the last user's, which become 0.
    seq_offsets: int32 [B+1]; num_candidates: int32 [B]. scaling_seqlen: N of SiLU weighting, positive.
    max_seqlen: the longest user's rows or more, a host integer that saves a synchronisation.
    kv: a table and its KVMetadata, the new history already appended; attend only reads. Then the history's keys and
    values come from the table, and only the candidates' rows of k and v are used.
    backend: a registered name, or "auto" (see backends.auto).
    Returns [T, H, d]. ValueError: shapes or lengths that disagree, an unknown backend, or one that refuses.
    """
    if q.ndim != 3 or k.shape != q.shape or v.shape != q.shape or not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must be alike and [T, H, d]; got {describe(q)}, {describe(k)}, {describe(v)}")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v are {q.dtype}; attention takes floating-point tensors")
    if len(devices := {str(x.device) for x in (q, k, v, seq_offsets, num_candidates)}) > 1:
        raise ValueError(
            f"q, k, v, seq_offsets and num_candidates are on {', '.join(sorted(devices))}; send them to one"
        )
    if weighting not in ("silu", "softmax"):
        raise ValueError(f"weighting {weighting!r}; known: silu, softmax")
    if weighting == "silu" and not (scaling_seqlen and scaling_seqlen > 0):
        raise ValueError(
            f"scaling_seqlen {scaling_seqlen!r}; SiLU weighting divides by it: pass the configured positive number"
        )
    if kv is not None:
        table = kv[0]
        if table.ndim != 5 or table.shape[1] != 2 or table.shape[3:] != q.shape[1:] or table.dtype != q.dtype:
            raise ValueError(
                f"the table is {describe(table)}; q of {describe(q)} needs {q.dtype} "
                f"[num_pages, 2, page_size, {q.shape[1]}, {q.shape[2]}]"
            )
    n = 1.0 if scaling_seqlen is None else float(scaling_seqlen)
    call = AttentionCall(q, k, v, seq_offsets, num_candidates, weighting, alpha, n, max_seqlen, kv)
    entry = backends[choose(backend, call.request)]
    check_offsets(q.shape[0], seq_offsets, num_candidates, max_seqlen, padding=entry.capturable)
    return entry.run(call)


class Attention(nn.Module):
    """``attend`` with its settings, as a module without parameters, so that hooks see its inputs and output."""

    def __init__(self, weighting: Weighting, alpha: float, scaling_seqlen: float, backend: str) -> None:
        super().__init__()
        self.weighting, self.alpha, self.scaling_seqlen, self.backend = weighting, alpha, scaling_seqlen, backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor, num_candidates: Tensor, **lengths: Any
    ) -> Tensor:
        return attend(
            q, k, v, seq_offsets, num_candidates, weighting=self.weighting, alpha=self.alpha,
            scaling_seqlen=self.scaling_seqlen, backend=self.backend, **lengths,
        )  # fmt: skip
