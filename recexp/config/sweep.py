"""The configuration of a sweep: which points, on which devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from recexp.config.base import Name, Positive, Strict


class SweepConfig(Strict):
    """Points of one kind: ``base``, varied by the product of every list of ``grid`` and every group of ``zipped``.

    Keys are dotted paths into a point (``model.head_dim``). ``where`` holds pandas query expressions that a point must
    meet; a dotted key stands in backticks there.
    """

    point: Name  # a kind that register_point knows
    modules: list[str] = []  # your own, imported for what they register
    base: dict[str, JsonValue] = {}
    grid: dict[str, list[JsonValue]] = {}
    zipped: list[dict[str, list[JsonValue]]] = []  # the lists of a group go together
    where: list[str] = []
    engine: Literal["processes", "ray"] = "processes"
    devices: Annotated[list[str], Field(min_length=1)] = [
        "auto"
    ]  # auto: every CUDA device, else the CPU; cpu:0, cpu:1, … pretend to be several
    seconds_per_point: Annotated[Positive, Field(le=1e7)] = 300.0
    address: str | None = None  # of a Ray cluster; None: one is started on this machine

    @model_validator(mode="after")
    def _possible(self) -> SweepConfig:
        for group in self.zipped:
            lengths = {key: len(values) for key, values in group.items()}
            if len({*lengths.values()}) > 1:
                raise ValueError(f"lists of a zipped group must be equally long, got {lengths}")
        keys = [*self.grid, *(key for group in self.zipped for key in group)]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"{', '.join(twice)} varies twice; keep it in grid or in one zipped group")
        if self.engine == "ray" and any(name.startswith("cuda") for name in self.devices):
            raise ValueError(f"devices {self.devices}: Ray gives GPUs out; use auto and CUDA_VISIBLE_DEVICES")
        return self
