import math

import numpy as np
import pytest
from sklearn.metrics import ndcg_score, roc_auc_score

from recexp.config import DataConfig
from recexp.data import leave_last
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import labels, make_batch


@pytest.mark.parametrize("levels", [3, 1_000_000])
@pytest.mark.parametrize("k", [3, 10])
def test_against_scikit_learn_user_by_user(levels, k):
    rng = np.random.default_rng(0)
    users = rng.integers(0, 60, 500)
    scores, truth = rng.integers(0, levels, 500) / levels, rng.integers(0, 2, 500)
    gauc, ndcg = [], []
    for user in np.unique(users):
        s, y = scores[users == user], truth[users == user]
        if 0 < y.sum() < len(y):
            gauc.append(roc_auc_score(y, s))
        if y.sum():
            ndcg.append(ndcg_score([y], [s], k=k) if len(y) > 1 else 1.0)
    found = ranking_metrics(scores, truth, users, k=k)
    assert found["auc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert found["gauc"] == pytest.approx(np.mean(gauc), abs=1e-12)
    assert found["ndcg"] == pytest.approx(np.mean(ndcg), abs=1e-12)
    assert (found["gauc_users"], found["ndcg_users"]) == (len(gauc), len(ndcg))
    assert (found["num_rows"], found["num_positives"]) == (500, truth.sum())


def test_order_of_rows_does_not_matter():
    rng = np.random.default_rng(1)
    users, scores, truth = rng.integers(0, 9, 80), rng.integers(0, 5, 80), rng.integers(0, 2, 80)
    order = rng.permutation(80)
    assert ranking_metrics(scores[order], truth[order], users[order]) == pytest.approx(
        ranking_metrics(scores, truth, users), abs=1e-12
    )


def test_undefined_is_nan_and_counted():
    found = ranking_metrics([0.1, 0.2, 0.3], [1, 1, 1], [0, 0, 1])
    assert math.isnan(found["auc"])
    assert math.isnan(found["gauc"])
    assert (found["gauc_users"], found["ndcg"], found["ndcg_users"]) == (0, 1.0, 2)
    found = ranking_metrics([0.1, 0.2], [0, 0], [0, 0])
    assert math.isnan(found["ndcg"])
    assert found["ndcg_users"] == 0
    found = ranking_metrics([], [], [])
    assert math.isnan(found["auc"])
    assert found["num_rows"] == 0


def test_users_with_one_label_are_left_out_of_the_mean():
    found = ranking_metrics([0.9, 0.1, 0.9, 0.1], [1, 0, 0, 0], [0, 0, 1, 1])
    assert (found["gauc"], found["gauc_users"]) == (1.0, 1)
    assert found["auc"] == pytest.approx(2.5 / 3)


def test_bad_input():
    with pytest.raises(ValueError, match=r"scores \(2,\), labels \(3,\) and users \(2,\) must be three \[N\]"):
        ranking_metrics([0.1, 0.2], [0, 1, 1], [0, 0])
    with pytest.raises(ValueError, match="label 4 is neither 0 nor 1"):
        ranking_metrics([0.1, 0.2], [0, 4], [0, 0])
    with pytest.raises(ValueError, match="1 of 2 scores are not finite, the first in row 1"):
        ranking_metrics([0.1, math.nan], [0, 1], [0, 0])


def test_random_order_of_movielens_100k_already_has_a_high_ndcg(ml100k):
    requests = leave_last(ml100k).test
    _, actions = make_batch(ml100k, requests)
    liked = labels(actions, DataConfig().tasks)[:, 0]
    found = ranking_metrics(np.random.default_rng(0).random(len(liked)), liked, requests.candidate_users)
    assert found["ndcg"] == pytest.approx(0.79, abs=0.01)
    assert found["auc"] == pytest.approx(0.5, abs=0.02)
