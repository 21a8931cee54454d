import dataclasses

import numpy as np
import pytest

from recexp.config import DataConfig
from recexp.data import Interactions, leave_last
from recexp.data.baselines import baseline_scores
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import candidate_rows, labels, make_batch

EXPECTED = {  # AUC and mean per-user AUC of "rating >= 4" on the test rows
    "item mean": (0.738, 0.697),
    "ridge bias model": (0.778, 0.698),
    "ALS on its residuals": (0.788, 0.708),
}


@pytest.fixture(scope="module")
def scores(ml100k):
    splits = leave_last(ml100k)
    return baseline_scores(ml100k, splits.test_start, splits.test)


@pytest.mark.parametrize("name", EXPECTED)
def test_movielens_100k(ml100k, scores, name):
    requests = leave_last(ml100k).test
    _, actions = make_batch(ml100k, requests)
    liked = labels(actions, DataConfig().tasks)[:, 0]
    metrics = ranking_metrics(scores[name], liked, requests.candidate_users)
    assert (metrics["auc"], metrics["gauc"]) == pytest.approx(EXPECTED[name], abs=0.004)
    assert metrics["gauc_users"] == 766


def test_scores_know_nothing_of_the_candidates_actions(ml100k, scores):
    splits = leave_last(ml100k)
    actions = ml100k.action_ids.copy()
    rows = candidate_rows(ml100k, splits.test)
    actions[rows] = 6 - actions[rows]
    blind = baseline_scores(dataclasses.replace(ml100k, action_ids=actions), splits.test_start, splits.test)
    for name, values in scores.items():
        np.testing.assert_array_equal(blind[name], values)


def test_new_users_new_items_and_repeated_pairs():
    users, items = [0] * 8 + [1] * 8, [0, 1, 0, 1, 0, 1, 2, 3] * 2
    interactions = Interactions.from_events("log", users, items, [1, 2] * 8, range(16), [np.nan, 1.0, 2.0])
    requests = leave_last(interactions).test
    scores = baseline_scores(interactions, np.array([6, 0]), requests)  # items 2 and 3, and user 1, are new
    for values in scores.values():
        assert values.shape == requests.candidate_users.shape
        assert np.isfinite(values).all()
    np.testing.assert_allclose(scores["item mean"], 1.5)  # the global mean


def test_bias_model_is_the_ridge_solution(ml100k, scores):
    """Normal equations of the centred problem, solved densely."""
    splits = leave_last(ml100k)
    fit = np.arange(100_000) - ml100k.offsets[ml100k.user_rows] < splits.test_start[ml100k.user_rows]
    users, items = ml100k.user_rows[fit], 943 + ml100k.item_ids[fit]
    gram = np.zeros((943 + 1682, 943 + 1682))
    np.add.at(gram, (users, items), 1.0)
    counts = np.concatenate([np.bincount(users, minlength=943), np.bincount(items, minlength=2625)[943:]]).astype(float)
    gram += gram.T + np.diag(counts)
    ratings = ml100k.action_ids[fit].astype(float)
    right = np.bincount(users, ratings, 2625) + np.bincount(items, ratings, 2625) - counts * ratings.mean()
    gram -= np.outer(counts, counts) / len(ratings)  # a free intercept
    weights = np.linalg.solve(gram + 5 * np.eye(2625), right)
    intercept = ratings.mean() - counts @ weights / len(ratings)
    rows = candidate_rows(ml100k, splits.test)
    wanted = intercept + weights[ml100k.user_rows[rows]] + weights[943 + ml100k.item_ids[rows]]
    found = scores["ridge bias model"]
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-5
