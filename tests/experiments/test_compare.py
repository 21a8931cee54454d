import math

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import nn

from recexp.experiments.compare import difference, equal, ranking_difference, trace, trace_differences


def test_difference_by_hand() -> None:
    r = torch.tensor([[3.0, 4.0], [0.0, 12.0]], dtype=torch.float64)  # norm 13
    a = r + torch.tensor([[0.0, 0.3], [0.0, -0.4]], dtype=torch.float64)  # norm of the change 0.5
    found = difference(a, r, atol=0.0, rtol=0.05)
    assert found.max_abs == pytest.approx(0.4)
    assert found.relative == pytest.approx(0.5 / 13)
    assert found.worst_index == (1, 1)
    assert (found.worst_tested, found.worst_reference) == pytest.approx((11.6, 12.0))
    assert found.fraction_outside == 0.25  # 0.3 > 0.05 * 4; 0.4 < 0.05 * 12


@pytest.mark.parametrize(
    ("a", "r", "same"),
    [
        ([math.nan, 1.0], [1.0, 1.0], False),
        ([math.nan, 1.0], [math.nan, 1.0], False),
        ([1.0, 1.0], [math.nan, 1.0], False),
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([1e30, 1.0], [math.inf, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1e-30], [0.0, 0.0], False),
        ([], [], True),
    ],
)
def test_values_that_are_no_numbers(a: list[float], r: list[float], same: bool) -> None:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    found = difference(x, y, atol=0.0, rtol=1e-6)
    assert (found.relative == 0) is same
    assert (found.fraction_outside == 0) is same
    assert equal(x, y, torch.float64) is same


def test_shapes_that_differ_are_refused_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\[3, 1\].*\[3\]"):
        difference(torch.ones(3, 1), torch.ones(3))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equal_has_one_limit_a_dtype(dtype: torch.dtype, limit: float) -> None:
    r = torch.ones(100, dtype=torch.float64)
    assert equal(r * (1 + 0.9 * limit), r, dtype)
    assert not equal(r * (1 + 1.1 * limit), r, dtype)


def test_low_precision_is_judged_by_the_plain_path() -> None:
    r = torch.linspace(1, 2, 1000, dtype=torch.float64)
    plain = r.to(torch.bfloat16)
    off = plain.double() - r
    assert equal(r + 1.9 * off, r, torch.bfloat16, plain)
    assert not equal(r + 2.1 * off, r, torch.bfloat16, plain)
    assert not equal(plain * math.nan, r, torch.bfloat16, plain * math.nan)  # a broken yardstick excuses nothing
    for yardstick, reference in ((None, r), (plain, r.float())):
        with pytest.raises(ValueError, match="give plain and a float64 r"):
            equal(plain, reference, torch.bfloat16, yardstick)
    with pytest.raises(ValueError, match=r"no rule for torch\.int8"):
        equal(plain, r, torch.int8)


def test_ranking_by_hand() -> None:
    r = [4.0, 3.0, 2.0, 1.0, 9.0, 1.0, 2.0]
    a = [3.0, 4.0, 2.0, 1.0, 5.0, 2.0, 1.0]  # user 0: one of six pairs swapped; user 2: reversed; user 1: one candidate
    found = ranking_difference(a, r, [4, 1, 2, 0], k=1)
    assert found["Kendall tau"] == pytest.approx((4 / 6 - 1) / 2)
    assert (found["pairs"], found["pairs moved, %"]) == (7, pytest.approx(100 * 2 / 7))
    assert found["top-1 replaced, %"] == 100
    found = ranking_difference(torch.tensor(a), np.array(r), torch.tensor([4, 1, 2, 0]), k=2)
    assert found["top-2 replaced, %"] == 0  # only user 0 counts: the pair has both its candidates in any top 2


def test_ties() -> None:
    lost = ranking_difference([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [3])
    assert lost["Kendall tau"] == 0 and lost["pairs moved, %"] == 100
    kept = ranking_difference([1.0, 1.0], [5.0, 5.0], [2])
    assert kept["Kendall tau"] == 1 and kept["pairs"] == 0  # the reference puts them in no order
    broken = ranking_difference([1.0, 2.0, 9.0], [5.0, 5.0, 6.0], [3])
    assert (broken["pairs"], broken["pairs moved, %"]) == (2, 0)
    nobody = ranking_difference([1.0], [1.0], [1])
    assert all(math.isnan(nobody[name]) for name in ("Kendall tau", "pairs moved, %", "top-3 replaced, %"))


@pytest.mark.parametrize("ties", [False, True])
def test_kendall_tau_is_scipys(ties: bool) -> None:
    make = np.random.default_rng(0)
    for length in (2, 3, 10):
        x, y = make.permutation(length) // (1 + ties), make.permutation(length) // (1 + ties)
        if np.ptp(x) and np.ptp(y):
            assert ranking_difference(x, y, [length])["Kendall tau"] == pytest.approx(kendalltau(x, y).statistic)


@pytest.mark.parametrize(
    ("a", "counts", "k", "message"),
    [
        ([1.0, 2.0], [3], 1, "3 candidates"),
        ([1.0, math.nan], [2], 1, "1 of the tested"),
        ([1.0, 2.0], [2], 0, "k must"),
    ],
)
def test_ranking_refuses(a: list[float], counts: list[int], k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranking_difference(a, [1.0, 2.0], counts, k)


class Layer(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.input_norm, self.proj, self.dropout = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1)
        self.extra = nn.Linear(4, 4) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.proj(self.input_norm(x)))
        return x if self.extra is None else self.extra(x)


class Model(nn.Module):
    def __init__(self, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Layer(False), Layer(last)])

    def predict(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.embedding(ids + 1)
        for layer in self.layers:
            x = layer(x)
        return x.sum(-1)


def test_differences_name_the_first_operation_that_differs() -> None:
    reference, tested = Model().double(), Model().double()
    with torch.no_grad():
        tested.layers[1].proj.bias[2] += 1
    a, r = (trace(model.eval(), lambda model=model: model.predict(torch.arange(5))) for model in (tested, reference))
    frame = trace_differences(a, r)
    operations = list(zip(frame["layer"], frame["operation"], strict=True))
    layer = ["input_norm", "proj", "output"]
    assert operations == [
        ("embedding", "output"),
        ("embedding", "output (2)"),
        *(("0", name) for name in layer),
        *(("1", name) for name in layer),
        ("model", "output"),
    ]
    assert (frame["relative"] > 0).tolist() == [False] * 6 + [True] * 3
    proj = frame[(frame["layer"] == "1") & (frame["operation"] == "proj")].iloc[0]
    assert proj["max_abs"] == pytest.approx(1)
    assert proj["worst_index"][1] == 2
    assert not any(module._forward_hooks for module in tested.modules())


def test_operations_of_one_side_are_rows_with_a_reason() -> None:
    models = Model(last=True).eval(), Model().eval()
    frame = trace_differences(*(trace(model, lambda model=model: model.predict(torch.arange(5))) for model in models))
    extra = frame[frame["operation"] == "extra"].iloc[0]
    assert extra["reason"] == "only in the tested model"
    assert math.isnan(extra["relative"])
    shapes = trace_differences({("0", "proj"): torch.ones(2)}, {("0", "proj"): torch.ones(3)})
    assert shapes["reason"].tolist() == ["shape [2] against [3]"]


def test_trace_leaves_no_hook_when_the_call_fails() -> None:
    model = Model()
    with pytest.raises(IndexError):
        trace(model, lambda: model.predict(torch.tensor([99])))
    assert not any(module._forward_hooks for module in model.modules())
