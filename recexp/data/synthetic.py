"""Made-up interactions: lengths and popularity as a cache or kernel feels them, and actions that a model can learn."""

from __future__ import annotations

import numpy as np

from recexp.config import SyntheticConfig
from recexp.data.interactions import Interactions

NUM_LATENTS = 4


def make_synthetic(config: SyntheticConfig) -> Interactions:
    """Interactions from a seed; the same configuration gives the same arrays.

    History lengths: inverse distribution function through ``length_quantiles``, linear between them. Items: Zipf, drawn
    with replacement, ids unrelated to popularity. Actions 1 … num_actions - 1 in equal shares: levels of half the
    product of user and item latents + item quality + noise of deviation 1/2; earlier actions tell about later ones.
    Users start within a year; gaps are exponential with a mean of ten minutes, and at least a second.
    """
    rng = np.random.default_rng(config.seed)
    levels = np.linspace(0, 1, len(config.length_quantiles))
    lengths = np.rint(np.interp(rng.random(config.num_users), levels, config.length_quantiles)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    users = np.repeat(np.arange(config.num_users), lengths)

    weights = np.arange(1, config.num_items + 1) ** -config.zipf_exponent
    popularity_rank = rng.choice(config.num_items, size=len(users), p=weights / weights.sum())
    items = rng.permutation(config.num_items)[popularity_rank]

    user_latents = rng.standard_normal((config.num_users, NUM_LATENTS))
    item_latents = rng.standard_normal((config.num_items, NUM_LATENTS))
    score = (user_latents[users] * item_latents[items]).sum(1) / 2 + rng.standard_normal(config.num_items)[items]
    score += rng.standard_normal(len(users)) / 2
    bounds = np.quantile(score, np.linspace(0, 1, config.num_actions)[1:-1])
    actions = 1 + np.searchsorted(bounds, score)

    elapsed = np.cumsum(1 + rng.exponential(600, len(users)).astype(np.int64))
    starts = 1_000_000_000 + rng.integers(0, 365 * 86_400, config.num_users)
    timestamps = elapsed + (starts - elapsed[offsets[:-1]])[users]
    values = np.array([np.nan, *range(1, config.num_actions)])
    keys = np.arange(config.num_users), np.arange(config.num_items)
    return Interactions("synthetic", offsets, items, actions, timestamps, *keys, values)
