"""The configuration of serving: the cache of ``ranking``, the instances, and the limits of the server."""

from typing import Annotated, Literal

from pydantic import Field

from recexp.config.base import Count, Dtype, Positive, Strict

Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Whole = Annotated[int, Field(ge=0, strict=True)]


class ServingConfig(Strict):
    """What ``recexp serving build`` writes beside the checkpoint. Times are of the server, not of the network."""

    kind: Literal["serving"] = "serving"
    devices: Annotated[list[Device], Field(min_length=1)] = ["cpu"]  # one ranking model with its own cache on each
    dtype: Dtype = "float32"
    num_threads: Count = 1  # of an instance on a CPU
    page_size: Count = 32
    num_pages: Annotated[int, Field(ge=2, strict=True)] = 1025  # of every device; one is the scratch page
    host_pages: Whole = 0  # 0: no host tier
    num_instances: Count = 1  # of sparse and of dense, on every device; on a CPU they share one copy of the weights
    max_batch: Count = 8  # requests that the server may join
    queue_delay_us: Whole = 0  # how long the first of them waits for others
    max_queue: Count = 64  # requests that wait for a model; more are refused
    timeout_ms: Count = 1000  # a request that waited longer is refused
    latency_buckets_ms: Annotated[list[Positive], Field(min_length=1)] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


class LoadConfig(Strict):
    """The load of ``serving``: after a warm-up every rate gets the next requests of the log, on every path the same."""

    num_warm: Count = 2000  # requests answered one by one before
    rates: Annotated[list[Positive], Field(min_length=1)] = [50, 100, 200, 300, 400]  # requests a second
    seconds: Positive = 4.0  # of each rate
