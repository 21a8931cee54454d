"""token_layout against the definition of a request, token by token, at every cached prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recexp.batch import SequenceBatch
from recexp.config import ModelConfig
from recexp.layers.sequence import SequenceStage, token_layout


def make_batch(pairs: list[int], candidates: list[int]) -> SequenceBatch:
    """Every id of the batch is another one, so that a wrong source shows."""
    ids = iter(range(10_000))
    rows = [[[next(ids) for _ in range(n)] for n in lengths] for lengths in (pairs, pairs, candidates)]
    users = list(range(len(pairs)))
    return SequenceBatch.from_lists(users, *rows, context={"degree": [next(ids) for _ in users]})


def tokens_by_definition(batch: SequenceBatch, user: int, num_context: int) -> list[tuple[str, int, int]]:
    """(kind, id, position index) of every token of one user, as a request is defined."""
    start, n = int(batch.num_pairs[:user].sum()), int(batch.num_pairs[user])
    first, c = int(batch.num_candidates[:user].sum()), int(batch.num_candidates[user])
    history = [("context", int(batch.context_ids["degree"][user]))] * num_context
    for i in range(start, start + n):
        history += [("item", int(batch.item_ids[i])), ("action", int(batch.action_ids[i]))]
    tokens = [(kind, token, position) for position, (kind, token) in enumerate(history)]
    return tokens + [("item", int(batch.candidate_ids[i]), len(history)) for i in range(first, first + c)]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[int], int, list[int]]:
    size = draw(st.integers(1, 4))
    pairs = [draw(st.integers(0, 5)) for _ in range(size)]
    num_context = draw(st.integers(0, 1))
    cached = [draw(st.integers(0, num_context + 2 * n)) for n in pairs]
    return pairs, [draw(st.integers(0, 4)) for _ in range(size)], num_context, cached


@settings(max_examples=200, deadline=None)
@given(requests())
def test_layout_is_the_definition_less_the_cached_prefix(request: tuple[list[int], list[int], int, list[int]]) -> None:
    pairs, candidates, num_context, cached = request
    batch = make_batch(pairs, candidates)
    layout = token_layout(batch, num_context, np.array(cached))
    sources = [("context", int(batch.context_ids["degree"][i])) for i in layout.context_index] if num_context else []
    sources += [("item", int(i)) for i in torch.cat([batch.item_ids, batch.candidate_ids])[layout.item_index]]
    sources += [("action", int(i)) for i in batch.action_ids[layout.action_index]]
    found = [(*sources[row], int(position)) for row, position in zip(layout.order, layout.positions, strict=True)]
    expected = [tokens_by_definition(batch, user, num_context)[cut:] for user, cut in enumerate(cached)]
    assert found == [token for user in expected for token in user]
    assert layout.seq_offsets.tolist() == [0, *np.cumsum([len(user) for user in expected])]
    assert layout.max_seqlen == max(len(user) for user in expected)
    assert layout.is_item.tolist() == [kind == "item" for kind, _, _ in found]
    assert layout.is_candidate.sum() == sum(candidates) and layout.num_candidates.tolist() == candidates


def test_cached_prefix_longer_than_the_history_is_refused() -> None:
    with pytest.raises(ValueError, match="cached prefix of row 1 is 5 tokens; its history has 4"):
        token_layout(make_batch([3, 2], [1, 1]), 0, np.array([0, 5]))


@pytest.mark.parametrize("mlp", [{}, {"embedding_size": 6, "mlp_size": 10}], ids=["plain", "projected"])
def test_embeddings_projections_and_positions(mlp: dict[str, int]) -> None:
    """values = projected embedding * sqrt(D) + P[min(position, h)], for every token."""
    config = ModelConfig(
        num_items=100, num_actions=100, context={"degree": 100}, hidden_size=16, max_history_pairs=5, **mlp
    )
    stage = SequenceStage(config).double()
    batch = make_batch([2, 0, 3], [2, 1, 0])
    tokens = stage(batch, token_layout(batch, 1))
    tables = {
        "item": stage.item_embedding,
        "action": stage.action_embedding,
        "context": stage.context_embedding[0],
    }
    project = {"item": stage.item_mlp, "context": stage.context_mlp, "action": torch.nn.Identity()}
    rows = []
    for user in range(3):
        for kind, token, position in tokens_by_definition(batch, user, 1):
            x = project[kind](tables[kind].weight[token][None])[0]
            rows.append(x * 4.0 + stage.position_embedding.weight[position])
    assert torch.allclose(tokens.values, torch.stack(rows), rtol=1e-12, atol=1e-14)
    assert tokens.seq_offsets.dtype == tokens.num_candidates.dtype == torch.int32
    assert tokens.max_seqlen == 7


def test_a_missing_context_feature_is_named_and_user_id_is_always_there() -> None:
    config = ModelConfig(num_items=100, num_actions=100, context={"user_id": 5, "age": 3}, max_history_pairs=5)
    batch = make_batch([1], [1])
    with pytest.raises(ValueError, match=r"the batch has no context_ids\['age'\]"):
        SequenceStage(config)(batch, token_layout(batch, 2))
    only_user = config.model_copy(update={"context": {"user_id": 5}})
    assert SequenceStage(only_user)(batch, token_layout(batch, 1)).values.shape == (4, 64)
