"""Which device an experiment runs on, and what to call it."""

from __future__ import annotations

import platform

import torch


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
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise ValueError(f"device {device!r} asked for, and this machine has {count} CUDA devices; use auto or cpu")
    return resolved


def describe_device(device: torch.device) -> str:
    """A device's name for titles and tables: the card and its SM, or the CPU and the threads used."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (SM{major}{minor})"
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
