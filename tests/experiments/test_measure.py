import itertools
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recexp import RankingModel, SequenceBatch
from recexp.config import ModelConfig
from recexp.experiments import measure as measuring
from recexp.experiments.measure import (
    Ceilings,
    Latency,
    achieved,
    ceilings,
    measure,
    measure_undisturbed,
    request_flops,
)


def test_measures_what_a_call_takes() -> None:
    latency = measure(lambda: time.sleep(0.02), [()], device="cpu", min_runs=5, max_runs=5, max_seconds=0.1)
    assert 20 <= latency.p10_ms <= latency.p50_ms <= latency.p90_ms
    assert latency.p10_ms < 200
    assert latency.host_p50_ms == latency.p50_ms  # on a CPU there is one clock
    assert latency.peak_memory_bytes is None


def test_median_and_spread_are_those_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    durations = iter([9e-3] + [1e-3] * 10 + [0.001 * n for n in range(1, 12)])  # one first call, two blocks, then 1..11

    def call() -> None:
        clock[0] += next(durations)

    latency = measure(call, [()], device="cpu", min_runs=11, max_runs=11)
    assert (latency.p10_ms, latency.p50_ms, latency.p90_ms) == pytest.approx((2, 6, 10))
    assert latency.count == 11


def test_inputs_rotate_and_each_runs_before_the_clock_starts() -> None:
    seen: list[int] = []
    measure(seen.append, [(0,), (1,), (2,)], device="cpu", min_runs=6, max_runs=6, max_seconds=0.05)
    assert seen[:3] == [0, 1, 2]
    assert all((b - a) % 3 == 1 for a, b in itertools.pairwise(seen))


def test_warm_up_goes_on_until_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        calls[0] += 1
        clock[0] += 1e-3 * max(1, 40 - calls[0])  # gets faster for 40 calls

    latency = measure(call, [()], device="cpu", min_runs=5, max_runs=5, max_seconds=10)
    assert latency.p50_ms == pytest.approx(1)


def test_time_limit_holds_after_the_fewest_runs() -> None:
    begin = time.perf_counter()
    latency = measure(lambda: time.sleep(0.03), [()], device="cpu", min_runs=3, max_runs=1000, max_seconds=0.05)
    assert latency.count == 3
    assert time.perf_counter() - begin < 15  # all runs would take 30


@pytest.mark.parametrize(
    ("inputs", "runs", "message"),
    [([], (1, 2), "at least one tuple"), ([()], (0, 2), "min_runs=0"), ([()], (3, 2), "max_runs=2")],
)
def test_refuses(inputs: list[tuple[()]], runs: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(lambda: None, inputs, device="cpu", min_runs=runs[0], max_runs=runs[1])


def test_ceilings_are_measured_once_and_bound_what_is_achieved() -> None:
    ceiling = ceilings(torch.device("cpu"), torch.float32)
    assert ceilings(torch.device("cpu"), torch.float32) is ceiling
    assert 0.001 < ceiling.tflops < 100
    assert 0.5 < ceiling.gbps < 2000


def test_achieved_rates_and_shares() -> None:
    latency = Latency(1.0, 2.0, 3.0, 10, 2.0, None)  # 2 ms
    rates = achieved(latency, Ceilings(tflops=4.0, gbps=100.0), flops=2e9, num_bytes=1e8)
    assert rates == pytest.approx({"tflops": 1.0, "tflops_share": 0.25, "gbps": 50.0, "gbps_share": 0.5})
    assert achieved(latency, Ceilings(4.0, 100.0), num_bytes=1e8).keys() == {"gbps", "gbps_share"}


@pytest.mark.parametrize(("backbone", "outputs"), [("hstu", 5 * 64), ("transformer", 4 * 64 + 2 * 32)])
def test_flops_of_a_request_by_hand(backbone: str, outputs: int) -> None:
    """A layer of width D = Hd: projections 2·T·D·outputs, attention 4·D a visible pair; head 2·c·(D·64 + 64·t)."""
    config = ModelConfig(backbone=backbone, num_items=9, num_layers=1, ffn_size=32, max_history_pairs=8)
    model = RankingModel(config)
    visible = 2 * 12 + (1 + 2) + 3 * (14 + 1)  # two new tokens behind 12 cached ones, three candidates
    expected = 2 * 5 * 64 * outputs + 4 * 64 * visible + 2 * 3 * (64 * 64 + 64 * 2)
    assert request_flops(model, 12, 2, 3) == expected
    batch = SequenceBatch.from_lists([0], [[]], [[]], [[5]])  # one token: nothing is masked, so PyTorch counts the same
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict(batch)
    assert request_flops(model, 0, 0, 1) == counter.get_total_flops()


@pytest.mark.gpu
def test_gpu_times_the_device_and_counts_memory() -> None:
    inputs = [(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16),) for _ in range(3)]
    latency = measure(lambda x: x @ x, inputs, device="cuda", max_seconds=0.5)
    assert latency.peak_memory_bytes is not None
    assert latency.peak_memory_bytes >= 4 * 4096 * 4096 * 2  # three inputs and a result
    ceiling = ceilings(torch.device("cuda"), torch.bfloat16)
    share = achieved(latency, ceiling, flops=2 * 4096**3)["tflops_share"]
    assert 0.3 < share < 1.2
    assert latency.host_p50_ms > 0.9 * latency.p10_ms  # awaited, not only queued


def test_a_disturbed_measurement_is_taken_again_and_the_steadiest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def latency(p10: float, p90: float) -> Latency:
        return Latency(p10, p10, p90, 5, p10, None)

    for results, kept, left in (
        ([latency(1, 3), latency(1, 1.2), latency(1, 9)], 1.2, 1),
        ([latency(1, 3), latency(1, 2), latency(1, 9)], 2, 0),
        ([latency(1, 1.4), latency(1, 1.1)], 1.4, 1),
    ):
        queue = list(results)
        monkeypatch.setattr("recexp.experiments.measure.measure", lambda *args, queue=queue, **options: queue.pop(0))
        assert measure_undisturbed(print, [()], device="cpu").p90_ms == kept and len(queue) == left
