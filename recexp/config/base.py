"""What all configurations share: number types with their limits, the refusal of unknown keys, the cache folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from recexp.registry import nearest

Count = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
Counts = Annotated[list[Count], Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def cache_dir() -> Path:
    """Where data and trained checkpoints are kept: $RECEXP_CACHE, else $XDG_CACHE_HOME/recexp, else ~/.cache/recexp."""
    if home := os.environ.get("RECEXP_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recexp"


class Strict(BaseModel):
    """Base of all configurations: frozen, defaults validated, unknown keys refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}; {nearest(str(key), list(cls.model_fields))}")
        return values

    def to_yaml(self) -> str:
        """The configuration with every default written out; ``load_config`` reads it back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)
