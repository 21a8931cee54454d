import numpy as np
import pytest

from recexp.config import DataConfig, SyntheticConfig
from recexp.data import leave_last, load_interactions, make_synthetic
from recexp.data.baselines import baseline_scores
from recexp.data.metrics import ranking_metrics
from recexp.data.requests import labels, make_batch

LARGE = SyntheticConfig(num_users=3_000, num_items=400)


@pytest.fixture(scope="module")
def large():
    return make_synthetic(LARGE)


def test_seed_decides():
    first, same, other = (make_synthetic(SyntheticConfig(seed=seed)).fingerprint for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert load_interactions(DataConfig(dataset="synthetic", synthetic=SyntheticConfig(seed=1))).fingerprint == first


def test_lengths_follow_the_quantiles(large):
    quantiles = np.quantile(large.lengths, np.linspace(0, 1, 5))
    np.testing.assert_allclose(quantiles, LARGE.length_quantiles, rtol=0.08)
    assert large.lengths.min() >= 10
    assert large.lengths.max() <= 300
    one = make_synthetic(SyntheticConfig(num_users=5, length_quantiles=[7]))
    assert one.lengths.tolist() == [7] * 5


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_items_follow_zipf(exponent):
    interactions = make_synthetic(LARGE.model_copy(update={"zipf_exponent": exponent}))
    counts = np.sort(np.bincount(interactions.item_ids, minlength=400))[::-1]
    slope = np.polyfit(np.log(np.arange(5, 100)), np.log(counts[4:99]), 1)[0]
    assert -slope == pytest.approx(exponent, abs=0.05)
    assert interactions.num_items == 400


def test_times_rise_within_each_user_and_overlap_between_users(large):
    same_user = np.diff(large.user_rows) == 0
    assert (np.diff(large.timestamps)[same_user] > 0).all()
    assert large.timestamps[large.offsets[:-1]].max() < large.timestamps[large.offsets[:-1]].min() + 365 * 86_400


def test_actions_have_equal_shares(large):
    shares = np.bincount(large.action_ids, minlength=6) / len(large.action_ids)
    np.testing.assert_allclose(shares, [0, 0.2, 0.2, 0.2, 0.2, 0.2], atol=1e-3)
    assert set(make_synthetic(SyntheticConfig(num_actions=2)).action_ids.tolist()) == {1}


def test_earlier_actions_tell_about_later_ones(large):
    splits = leave_last(large)
    _, actions = make_batch(large, splits.test)
    liked = labels(actions, DataConfig().tasks)[:, 0]
    auc = {
        name: ranking_metrics(scores, liked, splits.test.candidate_users)["auc"]
        for name, scores in baseline_scores(large, splits.test_start, splits.test).items()
    }
    assert auc["item mean"] > 0.7  # quality of the item
    assert auc["ALS on its residuals"] > auc["ridge bias model"] + 0.05  # the user's taste, from earlier actions
