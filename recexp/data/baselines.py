"""What plain models reach on the same rows: the numbers that a sequence model has to beat.

All predict the action's value (the rating) by least squares and rank by it, for every task alike. For the test they are
fitted on the validation rows too, which a sequence model only sees as history. Settings were chosen on MovieLens-100K,
leave-last, by validation AUC after a fit on the training part.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.extmath import randomized_svd

from recexp.data.interactions import Floats, Interactions, Ints
from recexp.data.requests import Requests, candidate_rows

MEAN_PRIOR = 5.0  # observations of the global mean added to each item
BIAS_RIDGE = 5.0
ALS_RANK, ALS_RIDGE, ALS_SWEEPS = 8, 10.0, 10


def baseline_scores(interactions: Interactions, fit_end: Ints, requests: Requests) -> dict[str, Floats]:
    """Scores [sum(num_candidates)] per baseline, fitted on each user's first fit_end [U] interactions.

    For ``splits.test`` pass ``splits.test_start``, for ``splits.validation`` pass ``splits.train_end``.
    """
    shape = (len(interactions.user_keys), interactions.num_items)
    fit = candidate_rows(interactions, Requests(np.arange(shape[0]), np.zeros_like(fit_end), fit_end))
    values = interactions.action_values[interactions.action_ids[fit]]
    users, items = interactions.user_rows[fit], interactions.item_ids[fit]
    rows = candidate_rows(interactions, requests)
    new_users, new_items = interactions.user_rows[rows], interactions.item_ids[rows]

    counts = np.bincount(items, minlength=shape[1])
    means = (np.bincount(items, values, shape[1]) + MEAN_PRIOR * values.mean()) / (counts + MEAN_PRIOR)
    ridge = Ridge(alpha=BIAS_RIDGE, solver="sparse_cg", tol=1e-6)
    bias = make_pipeline(OneHotEncoder(handle_unknown="ignore"), ridge).fit(np.column_stack([users, items]), values)
    bias_scores = bias.predict(np.column_stack([new_users, new_items]))
    residuals = values - bias.predict(np.column_stack([users, items]))
    indptr = np.concatenate([[0], np.cumsum(fit_end)])
    user_factors, item_factors = als(sparse.csr_matrix((residuals, items, indptr), shape))  # repeated pairs stay apart
    return {
        "item mean": means[new_items],
        "ridge bias model": bias_scores,
        "ALS on its residuals": bias_scores + (user_factors[new_users] * item_factors[new_items]).sum(1),
    }


def als(residuals: sparse.csr_matrix) -> tuple[Floats, Floats]:
    """Factors [U, rank] and [num_items, rank] of the stored entries, by alternating least squares (Zhou et al., 2008).

    The start, the singular vectors with zeros elsewhere, is always the same and beat random ones on validation.
    """
    _, values, vectors = randomized_svd(residuals, ALS_RANK, random_state=0)
    item_factors = vectors.T * np.sqrt(values)
    by_item = residuals.T.tocsr()
    for _ in range(ALS_SWEEPS):
        user_factors = _solve(residuals, item_factors)
        item_factors = _solve(by_item, user_factors)
    return user_factors, item_factors


def _solve(observed: sparse.csr_matrix, factors: Floats) -> Floats:
    """Ridge regression of each row's stored entries on the factors of their columns; zeros for an empty row."""
    solved = np.zeros((observed.shape[0], factors.shape[1]))
    for row in np.flatnonzero(np.diff(observed.indptr)):
        entries = slice(observed.indptr[row], observed.indptr[row + 1])
        x = factors[observed.indices[entries]]
        solved[row] = np.linalg.solve(x.T @ x + ALS_RIDGE * np.eye(x.shape[1]), x.T @ observed.data[entries])
    return solved
