"""RankingModel: what a user of the package calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recexp import RankingModel, SequenceBatch
from recexp.config import ModelConfig
from recexp.layers import register_backbone

BACKBONES = ["hstu", "transformer"]


def config(backbone: str = "hstu", **changes: object) -> ModelConfig:
    values = {"backbone": backbone, "num_items": 200, "max_history_pairs": 12, "num_tasks": 3}
    return ModelConfig.model_validate(values | {"attention_backend": "reference"} | changes)


def batch(candidates: list[list[int]] | None = None) -> SequenceBatch:
    items = [list(range(5)), [], list(range(30)), [9]]
    actions = [[i % 6 for i in row] for row in items]
    return SequenceBatch.from_lists([0, 1, 2, 3], items, actions, candidates or [[7, 8, 150], [3, 199], [5], []])


SHAPES = [{}, {"hidden_size": 10, "num_heads": 3, "head_dim": 7}, {"hidden_size": 65, "num_heads": 1, "head_dim": 9}]
SHAPES += [{"hidden_size": 50, "ffn_size": 37, "embedding_size": 7, "mlp_size": 9, "head_sizes": [9]}]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.get("hidden_size", 64)))
@pytest.mark.parametrize("backbone", BACKBONES)
def test_candidate_independence_of_the_logits(backbone: str, shape: dict[str, object]) -> None:
    """On the reference path in float64: permuting is bit-exact, removing moves no other logit by more than 1e-12."""
    model = RankingModel(config(backbone, **shape), dtype=torch.float64)
    many = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:60]
    logits = model.predict(batch([many.tolist(), [3, 199], [5], []]))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    permuted = model.predict(batch([many[order].tolist(), [199, 3], [5], []]))
    assert torch.equal(permuted[:60], logits[:60][order]) and torch.equal(permuted[60:62], logits[60:62].flip(0))
    fewer = model.predict(batch([many[:17].tolist(), [3], [5], [8]]))
    assert torch.allclose(fewer[:17], logits[:17], rtol=0, atol=1e-12)
    assert torch.allclose(fewer[17], logits[60], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_padded_model_is_the_reference_model(backbone: str) -> None:
    reference = RankingModel(config(backbone), dtype=torch.float64).predict(batch())
    padded = RankingModel(config(backbone, attention_backend="padded"), dtype=torch.float64).predict(batch())
    assert (padded - reference).norm() / reference.norm() < 1e-12
    assert reference.shape == (6, 3)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_an_item_of_the_history_gets_the_logits_of_a_first_candidate(backbone: str) -> None:
    """So training on every item leaks no label: the row of item i is what a candidate would get behind i pairs."""
    model = RankingModel(config(backbone), dtype=torch.float64).eval()
    items, actions = [4, 8, 15, 16], [1, 2, 3, 4]
    every = model(SequenceBatch.from_lists([0], [items], [actions], [[23, 42]]), rows="items")
    assert every.shape == (6, 3)
    for i, item in enumerate([*items, 23]):
        alone = model.predict(SequenceBatch.from_lists([0], [items[:i]], [actions[:i]], [[item]]))
        assert (every[i] - alone[0]).norm() / alone.norm() < 1e-12


def test_long_histories_are_cut_to_their_window() -> None:
    """30 pairs, at most 12, hop 3: the window starts at pair 18."""
    model = RankingModel(config(window_hop=3), dtype=torch.float64)
    items = list(range(30))
    long = SequenceBatch.from_lists([0], [items], [[1] * 30], [[7]])
    cut = SequenceBatch.from_lists([0], [items[18:]], [[1] * 12], [[7]])
    assert torch.equal(model.predict(long), model.predict(cut))


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    a, b = RankingModel(config(seed=3)), RankingModel(config(seed=3))
    other = RankingModel(config(seed=4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.sequence.item_embedding.weight, other.sequence.item_embedding.weight)


def test_predict_has_no_dropout_and_gives_the_mode_back() -> None:
    model = RankingModel(config(dropout=0.5, item_id_dropout=0.5)).train()
    assert torch.equal(model.predict(batch()), model.predict(batch()))
    assert model.training
    assert not torch.equal(model(batch()), model(batch()))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("items", [[0], [200], []], "item_ids of row 1 holds 200; num_items is 200: ids are 0 to 199"),
        ("items", [[0], [], [-1]], "item_ids of row 2 holds -1"),
        ("actions", [[6], [], []], "action_ids of row 0 holds 6; num_actions is 6"),
        ("candidates", [[1], [], [2, 999]], "candidate_ids of row 2 holds 999"),
        ("candidates", [[1], [0] * 257, []], "row 1 has 257 candidates; the model's max_candidates is 256"),
        ("user_ids", [0, 1, 50], "context feature 'user_id' of row 2 holds 50; context.user_id is 50"),
    ],
)
def test_ids_outside_the_tables_are_named(field: str, value: list[list[int]], message: str) -> None:
    rows: dict[str, list[list[int]]] = {"items": [[], [], []], "candidates": [[1], [], []]}
    rows[field] = value
    rows["actions"] = value if field == "actions" else [[1] * len(row) for row in rows["items"]]
    rows["items"] = [[0] * len(row) for row in value] if field == "actions" else rows["items"]
    users = rows.pop("user_ids", [0, 1, 2])
    with pytest.raises(ValueError, match=message):
        RankingModel(config(context={"user_id": 50})).predict(SequenceBatch.from_lists(users, **rows))


def test_unknown_rows_are_refused_and_any_feature_name_is_taken() -> None:
    with pytest.raises(ValueError, match="rows 'all'; known: candidates, items"):
        RankingModel(config())(batch(), rows="all")  # type: ignore[arg-type]
    assert RankingModel(config(context={"keys": 5, "type": 3})).sequence.features == ["keys", "type"]


def test_unknown_names_and_absent_devices() -> None:
    with pytest.raises(ValueError, match="unknown backbone 'hsut'; did you mean 'hstu'"):
        RankingModel(config("hsut"))
    with pytest.raises(ValueError, match="unknown attention backend 'pad'"):
        RankingModel(config(attention_backend="pad"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda' asked for, and this machine has 0 CUDA devices"):
            RankingModel(config(), device="cuda")


def test_a_third_backbone_is_one_function_and_one_line() -> None:
    class GatedLinear(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.gate, self.value = nn.Linear(size, size), nn.Linear(size, size)

        def forward(self, x: Tensor, *lengths: object) -> Tensor:
            return x + self.gate(x).sigmoid() * self.value(x)

    register_backbone("gated")(lambda c: GatedLinear(c.hidden_size))
    model = RankingModel(config("gated"))
    assert model.predict(batch()).shape == (6, 3)
    assert isinstance(model.backbone.layers[0], GatedLinear)
