"""Which device an experiment runs on, what to call it, and what each SM can do."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

HALF = (torch.bfloat16, torch.float16)
UNVERIFIED = "unverified on hardware"


@dataclass(frozen=True)
class KernelLimits:
    """What a backend's kernels take on one SM. head_dims None: any up to 256. page_sizes None: any multiple of
    page_step, (): no paged cache, and no_pages says why."""

    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    page_step: int = 1
    weightings: tuple[str, ...] = ("silu", "softmax")
    no_pages: str = ""
    note: str = UNVERIFIED

    def refuses(self, weighting: str, dtype: torch.dtype, head_dim: int, page_size: int | None) -> str | None:
        """Why a call is refused, or None."""
        if weighting not in self.weightings:
            return f"it computes {', '.join(self.weightings)} weighting only"
        if dtype not in self.dtypes:
            return f"it computes in {', '.join(str(t).removeprefix('torch.') for t in self.dtypes)}, not {dtype}"
        if head_dim > 256 or (self.head_dims and head_dim not in self.head_dims):
            return f"head_dim {head_dim} is not {self.head_dims or '256 or less'}"
        if page_size is None:
            return None
        if self.page_sizes == ():
            return self.no_pages
        if page_size % self.page_step or (self.page_sizes and page_size not in self.page_sizes):
            return f"page_size {page_size} is not {self.page_sizes or f'a multiple of {self.page_step}'}"
        return None


@dataclass(frozen=True)
class DeviceProfile:
    """An SM: cards that have it, the page size to begin with, and the limits of backends whose kernels depend on it."""

    sm: int
    cards: str
    page_size: int = 32
    note: str = UNVERIFIED
    backends: Mapping[str, KernelLimits] = field(default_factory=dict)

    def refuses(
        self, backend: str, weighting: str, dtype: torch.dtype, head_dim: int, page_size: int | None
    ) -> str | None:
        """Why a backend that depends on the SM refuses a call there, were it installed; None if it does not."""
        if backend not in self.backends:
            return f"it has no kernel for SM{self.sm}"
        return self.backends[backend].refuses(weighting, dtype, head_dim, page_size)


TRITON = KernelLimits(dtypes=(*HALF, torch.float32))
TRITON_SM90 = replace(TRITON, note="run on an H200")
RUN = "run on an H200 with Triton 3.6; newer releases compile only"
GLUON = KernelLimits(head_dims=(64, 128, 256), page_step=8, note=RUN)
FBGEMM = KernelLimits(head_dims=(32, 64, 128, 256), page_sizes=(32, 64), weightings=("silu",))
FBGEMM_SM90 = replace(FBGEMM, page_sizes=(), no_pages="there its wrapper drops the paged cache without a word")
WARM = f"{UNVERIFIED}; compiles at the first call, so warm up before capture; its error text says pages of 512"
FBGEMM_SM100 = replace(FBGEMM, head_dims=(64, 128, 256), page_sizes=(128,), note=WARM)
FBGEMM_SM120 = replace(FBGEMM, note=f"{UNVERIFIED}; head_dim 256 without pages exceeds shared memory")
SM_DEPENDENT = ("gluon", "triton", "fbgemm")  # backends that profiles speak of; others take any device

PROFILES = {
    profile.sm: profile
    for profile in (
        DeviceProfile(80, "A100, A30", backends=dict(triton=TRITON, fbgemm=FBGEMM)),
        DeviceProfile(86, "A10, A40, RTX 30", backends=dict(triton=TRITON, fbgemm=FBGEMM)),
        DeviceProfile(89, "L4, L20, L40, RTX 40", backends=dict(triton=TRITON, fbgemm=FBGEMM)),
        DeviceProfile(
            90, "H100, H200", 32, "run on an H200", dict(gluon=GLUON, triton=TRITON_SM90, fbgemm=FBGEMM_SM90)
        ),
        DeviceProfile(100, "B200, GB200", 128, backends=dict(triton=TRITON, fbgemm=FBGEMM_SM100)),
        DeviceProfile(103, "B300, GB300", 128, backends=dict(triton=TRITON)),
        DeviceProfile(120, "RTX 50, RTX PRO 6000", backends=dict(triton=TRITON, fbgemm=FBGEMM_SM120)),
    )
}


def profile_of(sm: int | str) -> DeviceProfile:
    """The profile of an SM, given as 100 or "sm100". An unknown one gets what every SM of its age can do, and a note.

    Raises ValueError for a text that names no SM.
    """
    digits = str(sm).lower().removeprefix("sm_").removeprefix("sm")
    if not digits.isdecimal():
        raise ValueError(f"{sm!r} is no SM; write sm100, sm90, … (known: {', '.join(f'sm{n}' for n in PROFILES)})")
    number = int(digits)
    some = {"triton": TRITON} if number >= 80 else {}
    note = f"SM{number} is not known here: assumed is what every SM {'from 80 on' if some else 'below 80'} can do"
    return PROFILES.get(number) or DeviceProfile(number, "unknown", note=f"{note}; {UNVERIFIED}", backends=some)


def sm_of(device: torch.device) -> int:
    """The SM of a CUDA device: 90 of an H100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def resolve(device: str) -> torch.device:
    """A torch device from "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises ValueError for a name that is none of these and for a CUDA device that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise ValueError(f"device {device!r} asked for, and this machine has {count} CUDA devices; use auto or cpu")
    return resolved


def describe_device(device: torch.device) -> str:
    """A device's name for titles and tables: the card and its SM, or the CPU and the threads used."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} (SM{sm_of(device)})"
    threads = torch.get_num_threads()
    return f"CPU ({cpu_name()}, {threads} thread{'s' if threads > 1 else ''})"


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def all_devices() -> list[torch.device]:
    """The CPU and every CUDA device of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]
