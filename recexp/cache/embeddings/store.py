"""What every embedding engine offers, and all that does not depend on the engine: checks, known keys, versions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from recexp import devices
from recexp.cache.embeddings.kernels import AVAILABLE, guard_keys
from recexp.registry import Registry

_versions = itertools.count()


@dataclass(frozen=True)
class StoreStats:
    """num_keys: looked up so far. device_bytes: of rows on the store's device; host_bytes: of others in host memory.
    hit_rate: share of keys that were in the engine's cache; None where the engine does not tell or has none."""

    num_known: int
    num_keys: int
    device_bytes: int
    host_bytes: int
    hit_rate: float | None


class EmbeddingStore:
    """num_rows rows of dim numbers; a key, 0 to num_rows − 1, is known once its row was inserted or updated.

    An unknown key has a row of zeros, or is an error with unknown="error". cache_ratio: share of the rows with a place
    in the engine's cache; 1 where it has none. Features, and models, share a table by sharing its store. Every change
    gives ``version`` a number that no store had before; no other thread may use the store meanwhile.

    keys are int64 [N], contiguous; rows [N, dim], contiguous, finite, of the store's dtype and range; both on the
    store's device. Anything else is a ValueError, the same from every engine, and changes nothing.
    """

    engine: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16)
    cached_on: ClassVar[tuple[str, ...]] = ()  # device types where the engine has a cache

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        unknown: Literal["zero", "error"] = "zero",
        cache_ratio: float = 1.0,
    ) -> None:
        device = devices.resolve(str(device))
        kind = device.type
        if reason := self.missing(kind):
            raise ValueError(f"there is no embedding engine {self.engine!r} for {kind}: {reason}")
        if dtype not in self.dtypes:
            raise ValueError(f"engine {self.engine!r} has no tables of {dtype}; use {', '.join(map(str, self.dtypes))}")
        cached = cache_ratio == 1 or (0 < cache_ratio < 1 and kind in self.cached_on)
        sizes = all(isinstance(size, Integral) and size > 0 for size in (num_rows, dim))
        if not sizes or unknown not in ("zero", "error") or not cached:
            rule = "sizes are whole, from 1 on, unknown is zero or error, cache_ratio is below 1 only beside a cache"
            raise ValueError(f"{num_rows=}, {dim=}, {unknown=}, {cache_ratio=}: {rule}")
        self.num_rows, self.dim, self.dtype, self.unknown = int(num_rows), int(dim), dtype, unknown
        self.cache_ratio, self.row_bytes, self.largest = cache_ratio, self.dim * dtype.itemsize, torch.finfo(dtype).max
        with torch.inference_mode(False):  # tensors made in that mode could only be changed in it
            self.known = torch.zeros(self.num_rows, dtype=torch.bool, device=device)
            on_gpu = kind == "cuda" and AVAILABLE
            self.told = torch.zeros(1, dtype=torch.int64).pin_memory() if on_gpu else None  # set where a key is refused
            self.device, self.num_keys, self.version = self.known.device, 0, next(_versions)
            self.table = self._allocate()

    @classmethod
    def missing(cls, device_type: str) -> str | None:
        """Why there is no such engine for this type of device, and how to get it; None if there is."""
        return None

    def lookup(self, keys: Tensor, *, checked: bool = False) -> Tensor:
        """Rows [N, dim] in the order of keys. checked: ``check_keys`` has passed them, best before they left the CPU;
        on a GPU checking waits for the device."""
        self._check_form(keys)
        if not len(keys):
            return self._zeros(0)
        if checked:
            rows = self._gather(keys)
        elif self.told is None:
            self.check_keys(keys)
            rows = self._gather(keys)
        else:  # a GPU has all of it to do before the host waits, once, and the engine gets nothing out of range
            rows = self._gather(guard_keys(keys, self.known, self.unknown == "error", self.told))
            torch.cuda.current_stream(self.device).synchronize()
            if self.told.item():
                self.told.zero_()
                self.check_keys(keys)  # says which
        self.num_keys += len(keys)
        return rows

    def update(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows of keys, known or not; of a key that occurs twice the last row counts."""
        self._check_rows(keys, rows)
        self._write(keys, rows)

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """``update`` of the unknown keys only; known ones keep their rows."""
        self._check_rows(keys, rows)
        new = ~self.known[keys]
        self._write(keys[new], rows[new])

    def erase(self, keys: Tensor) -> None:
        """Make keys unknown; those that are stay so."""
        self._check_form(keys)
        self._check_ends(_ends(keys))
        if len(keys := keys[self.known[keys]].unique()):
            self._change(keys, False, self._erase, keys)

    def clear(self) -> None:
        """Make every key unknown."""
        self._change(slice(None), False, self._clear)

    def stats(self) -> StoreStats:
        """What the store holds and was asked for; waits for the device."""
        return StoreStats(int(self.known.sum()), self.num_keys, *self._bytes(), self._hit_rate())

    def check_keys(self, keys: Tensor) -> None:
        """Raise ValueError for keys that ``lookup`` refuses; they may lie on the CPU, where checking waits for nothing
        (unless unknown keys are an error)."""
        self._check_form(keys, from_host=True)
        self._check_ends(_ends(keys))
        if self.unknown == "error" and not bool((known := self.known[keys.to(self.device)]).all()):
            key = int(keys[int((~known).nonzero()[0])])
            raise ValueError(f"key {key} is unknown: insert it first, or make the store with unknown='zero'")

    def _check_form(self, keys: Tensor, from_host: bool = False) -> None:
        is_tensor = isinstance(keys, Tensor)
        if not is_tensor or keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_contiguous():
            what = f"{keys.dtype} {list(keys.shape)}, {keys.layout}" if is_tensor else type(keys).__name__
            raise ValueError(f"keys are {what}: must be a contiguous 1-D tensor of torch.int64")
        if keys.device != self.device and not (from_host and keys.device.type == "cpu"):
            raise ValueError(f"keys lie on {keys.device}, the store on {self.device}: move them there")

    def _check_ends(self, ends: Tensor) -> None:
        low, high = ends.tolist()
        if low < 0 or high >= self.num_rows:
            wrong = low if low < 0 else high
            raise ValueError(f"key {wrong} is out of range: num_rows is {self.num_rows}, keys are 0 to num_rows - 1")

    def _check_rows(self, keys: Tensor, rows: Tensor) -> None:
        self._check_form(keys)
        wanted = (self.dtype, (len(keys), self.dim), self.device)
        found = (rows.dtype, tuple(rows.shape), rows.device) if isinstance(rows, Tensor) else type(rows).__name__
        if found != wanted or rows.layout != torch.strided or not rows.is_contiguous():
            raise ValueError(f"rows are {found}: must be contiguous, {wanted} for these keys")
        self._check_ends(_ends(keys))
        if not bool((fits := (rows.abs() <= self.largest).all(1)).all()):
            key = int(keys[int((~fits).nonzero()[0])])
            raise ValueError(f"the row of key {key} holds NaN or infinity, or more than ±{self.largest:g}")

    def _write(self, keys: Tensor, rows: Tensor) -> None:
        rows = rows.detach()  # else the table would remember where they came from
        distinct, which = keys.unique(return_inverse=True)
        if len(distinct) < len(keys):
            order = torch.arange(len(keys), device=self.device)
            keys, rows = distinct, rows[torch.zeros_like(distinct).scatter_reduce_(0, which, order, "amax")]
        if len(keys):
            self._change(keys, True, self._scatter, keys, rows)

    def _change(self, keys: Tensor | slice, known: bool, engine: Callable[..., None], *given: Tensor) -> None:
        try:
            engine(*given)
            self.known[keys] = known
        finally:  # whoever stopped it: rows may be others already
            self.version = next(_versions)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, self.dim, dtype=self.dtype, device=self.device)

    # What an engine does, here with a tensor on the device. Keys are in range, at least one, and distinct except in
    # _gather; unknown rows are zeros.
    def _allocate(self) -> Any:
        return self._zeros(self.num_rows)

    def _gather(self, keys: Tensor) -> Tensor:
        return self.table.index_select(0, keys)

    def _scatter(self, keys: Tensor, rows: Tensor) -> None:
        self.table.index_copy_(0, keys, rows)

    def _erase(self, keys: Tensor) -> None:
        self._scatter(keys, self._zeros(len(keys)))

    def _clear(self) -> None:
        self.table.zero_()

    def _bytes(self) -> tuple[int, int]:
        """Of rows on the device, and elsewhere in host memory."""
        return self.table.nbytes, 0

    def _hit_rate(self) -> float | None:
        return None


def _ends(keys: Tensor) -> Tensor:
    """Smallest and largest key, int64 [2]: one kernel, and one copy to look at both. Of no keys 0, always in range."""
    if not len(keys):
        return keys.new_zeros(2)
    torch.aminmax(keys, out=tuple((ends := keys.new_empty(2)).unbind()))
    return ends


engines: Registry[type[EmbeddingStore]] = Registry("embedding engine")


def lookup_features(
    stores: Mapping[str, EmbeddingStore], ids: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Rows [N, dim] on device of each feature's ids (int32 or int64 [N], best on the CPU, where they are checked).

    A store is asked once for all of its features, and once for every key.
    """
    for name in stores:
        if ids[name].dim() != 1 or ids[name].dtype not in (torch.int32, torch.int64):
            what = f"{ids[name].dtype} {list(ids[name].shape)}"
            raise ValueError(f"ids of {name!r} are {what}: must be a 1-D tensor of torch.int32 or torch.int64")
    rows: dict[str, Tensor] = {}
    for store in dict.fromkeys(stores.values()):
        names = [name for name in stores if stores[name] is store]
        keys, which = torch.cat([ids[name] for name in names]).cpu().long().unique(return_inverse=True)
        store.check_keys(keys)
        found = store.lookup(_send(keys, store.device), checked=True).to(device, non_blocking=True)
        spread = found.index_select(0, _send(which, device))
        rows |= zip(names, spread.split([len(ids[name]) for name in names]), strict=True)
    return rows


def _send(ids: Tensor, device: torch.device) -> Tensor:
    pinned = ids.pin_memory() if (ids.device.type, device.type) == ("cpu", "cuda") else ids
    return pinned.to(device, non_blocking=True)
