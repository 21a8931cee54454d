"""Ranking quality of one binary task. What is undefined is NaN, or left out and counted; never a made-up 0.5 or 1."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.metrics import roc_auc_score


def ranking_metrics(scores: ArrayLike, labels: ArrayLike, users: ArrayLike, k: int = 10) -> dict[str, float]:
    """Metrics of N scored candidates; scores [N], labels [N] of 0 and 1, users [N] the user (or request) of each.

    auc: over all candidates. gauc: mean AUC of the gauc_users users with both labels. ndcg: mean NDCG@k, gains 0 and 1,
    of the ndcg_users users with a positive. Equal scores count half in AUC, and in NDCG as the mean over their orders.
    NaN where there is nothing to average. Raises ValueError on other shapes and labels, and on scores not finite.
    """
    scores, labels, users = (np.asarray(a) for a in (scores, labels, users))
    if not scores.shape == labels.shape == users.shape or scores.ndim != 1:
        raise ValueError(f"scores {scores.shape}, labels {labels.shape} and users {users.shape} must be three [N]")
    if len(bad := labels[~np.isin(labels, (0, 1))]):
        raise ValueError(f"label {bad[0]} is neither 0 nor 1; give the labels of one task")
    if len(bad := np.flatnonzero(~np.isfinite(scores))):
        found = f"{len(bad)} of {len(scores)} scores are not finite, the first in row {bad[0]}"
        raise ValueError(f"{found}; they have no order")
    table = pd.DataFrame({"score": scores, "label": labels.astype(np.float64), "user": users})
    per_user = table.groupby("user")
    positives = per_user["label"].sum()
    negatives = per_user.size() - positives

    # Mann-Whitney: the rank sum of the positives, less its least value, over the number of pairs
    rank_sum = (per_user["score"].rank() * table["label"]).groupby(table["user"]).sum()
    both = (positives > 0) & (negatives > 0)
    gauc = ((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))[both]

    gain = table.groupby(["user", "score"])["label"].transform("mean")
    place = per_user["score"].rank(method="first", ascending=False)
    dcg = (gain / np.log2(1 + place)).where(place <= k, 0.0).groupby(table["user"]).sum()
    ideal = np.cumsum(1 / np.log2(np.arange(2, k + 2)))  # of 1, 2, … k positives
    ndcg = dcg[positives > 0] / ideal[np.minimum(positives[positives > 0], k).astype(int) - 1]
    return {
        "auc": float(roc_auc_score(labels, scores)) if 0 < labels.sum() < len(labels) else float("nan"),
        "gauc": float(gauc.mean()),
        "gauc_users": len(gauc),
        "ndcg": float(ndcg.mean()),
        "ndcg_users": len(ndcg),
        "num_rows": len(scores),
        "num_positives": int(labels.sum()),
    }
