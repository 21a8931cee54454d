"""The workers of a sweep on a Ray cluster: an actor a device, each with a process for its points."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recexp.config import SweepConfig
from recexp.experiments.workers import START_SECONDS, Worker


class RemoteWorker:
    """A ``Worker`` where Ray placed it. RuntimeError when its machine is lost or its device is not to be had."""

    def __init__(self, pretended: bool, packed: bytes, seconds: float, num_threads: int) -> None:
        import ray

        self._ray: Any = ray
        actor: Any = ray.remote(num_gpus=1, num_cpus=0, max_restarts=0)(_Actor)
        self._actor = actor.remote(pretended, packed, seconds, num_threads)
        self._limit = seconds + 2 * START_SECONDS  # somebody else may take the device first

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``Worker.run``."""
        try:
            answer: dict[str, Any] = self._ray.get(self._actor.run.remote(values), timeout=self._limit)
            return answer
        except self._ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(f"a device of the cluster is not to be had within {self._limit:g} s") from error
        except self._ray.exceptions.RayActorError as error:
            raise RuntimeError(f"a device of the cluster is lost: {error}") from error

    def close(self) -> None:
        """End the actor, which ends its process and lets go of its device."""
        self._ray.kill(self._actor)


class _Actor(Worker):
    def __init__(self, pretended: bool, *arguments: Any) -> None:
        import ray

        (index,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        super().__init__(f"cpu:{index}" if pretended else "cuda:0", *arguments)  # the only one that it sees


@contextmanager
def ray_workers(sweep: SweepConfig, names: list[str], *arguments: Any) -> Iterator[list[RemoteWorker]]:
    """A worker for every free GPU of the cluster at sweep.address, or of one that runs on this machine until the end.

    Pretended devices (cpu:0, cpu:1) are GPUs to Ray and the CPU to the points. RuntimeError without the extra
    ``cluster``, without a cluster at the address, or without a free GPU in it.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # every listener on the loopback address
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise RuntimeError("sweep.engine ray needs the extra: pip install 'recexp[cluster]'") from error
    count = len(names)  # of CPUs too: Ray starts a process for each at once, and actors take those
    local: dict[str, Any] = {} if sweep.address else {"num_gpus": count, "num_cpus": count, "include_dashboard": False}
    try:
        ray.init(sweep.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ValueError, OSError, ray.exceptions.RayError) as error:
        raise RuntimeError(
            f"no Ray cluster to be had at sweep.address {sweep.address}: {error}; an address is host:port or auto, and "
            "a cluster that wants a token is reached with RAY_AUTH_MODE=token"
        ) from error
    try:
        if sweep.address:
            known, count = (int(each().get("GPU", 0)) for each in (ray.cluster_resources, ray.available_resources))
            if not count:  # an actor that gets none would wait without end
                way = "wait for others to be done" if known else "start its nodes with --num-gpus"
                raise RuntimeError(f"the cluster at {sweep.address} has {known} GPUs and none free; {way}")
        cuda = sweep.devices == ["auto"] and (sweep.address or names[0].startswith("cuda"))
        yield [RemoteWorker(not cuda, *arguments) for _ in range(count)]
    finally:
        ray.shutdown()
