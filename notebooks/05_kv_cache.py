# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A request log through the KV cache
#
# Users come back, each time with a longer history. Whoever kept the keys and values of the last visit computes only
# what is new. Here a whole log (MovieLens-100K unless changed) is replayed, request by request in the order of time,
# through caches of different sizes, with both trained rankers: which tier answers a request, what does that save, what
# does it cost, and is the answer still the same?
#
# A request is one user with up to ten candidates; next time these are history. Its **tier** is where the keys and
# values of its history were: on the *device*; on the *host*, to be copied back first; *partial*, when part of what is
# held no longer agrees; or nowhere, a *miss*.

# %% tags=["parameters"]
config = "../configs/experiments/kv_cache.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.experiments import cache_figures, kv_cache, plots
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.train import train

experiment = load_experiment(config, overrides)
device = devices.resolve(experiment.device)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
display(Markdown(f"Measured on **{devices.describe_device(device)}**, torch {torch.__version__}."))

# %% [markdown]
# ## The log and the models
#
# A model keeps a user's newest pairs in a window that moves in hops. Between two moves what is cached stays valid; when
# it moves, every position changes, and no cache can help.

# %%
interactions = load_interactions(experiment.data, quiet)
splits = make_splits(experiment.data, interactions)
models = {
    name: train(
        model, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet
    ).model
    for name, model in experiment.models.items()
}
log = kv_cache.request_log(interactions, experiment.data.max_candidates, experiment.cache.num_requests)
Markdown(f"{len(log):,} requests of {len({int(batch.user_ids[0]) for batch in log}):,} users.")

# %% [markdown]
# ## Replay
#
# Every model answers the log once without a cache, for the reference, and once through each cache, one request at a
# time. Below are the statistics of some requests in the middle: what was reused, copied and wasted.

# %%
requests = kv_cache.replays(models, log, experiment.cache, quiet)
cached = requests[requests["tier"] != "none"]
cached.drop(columns=["tier", "reason", "copy_failed", "norm", "squares"]).iloc[len(log) // 2 :].head(8)

# %% [markdown]
# ## Which tier answers
#
# At a user's first visit there is no history, and at the second none that was kept: *new user*. What more pages or a
# host tier can win is the part marked *evicted*; *window moved* shrinks only with a longer window or longer hops.

# %%
caches = kv_cache.summarise(requests)
run.save(caches, "caches")
first = next(iter(models))
pages = f"pages of {experiment.cache.page_size} tokens"
where = devices.describe_device(device)
title = f"Tier of {len(log):,} requests of {interactions.name}, {first}, {pages}, {where}"
display(run.figure(cache_figures.plot_outcomes(caches[caches["model"] == first], title), "tiers"))
caches[["model", "num_pages", "host_pages", "hit rate", "tokens saved", "MB onloaded", "MB offloaded"]].round(3)

# %% [markdown]
# ## What an answer costs, by tier
#
# The same requests, grouped by tier and by the length of the history. A device or host hit computes the ten pairs that
# are new and the candidates; a miss computes everything and also writes it to the cache; *none* is `predict`, without a
# cache. Shown is the smallest cache with the largest host tier, through which every tier has requests. A point whose
# logits differ from the uncached ones has no time.
#
# What a cache saves is computing; what it costs is bookkeeping on the host, the same for a small model and for a large
# one. Two layers of width 64 are little to save.

# %%
latency = kv_cache.latencies(models, requests, experiment)
run.save(latency)
num_pages, host_pages = min(experiment.cache.num_pages), max(experiment.cache.host_pages)
shown = latency[
    (latency["tier"] == "none") | (latency["num_pages"] == num_pages) & (latency["host_pages"] == host_pages)
]
shown = shown.drop(columns=["page_size", "num_pages", "host_pages", "num_tokens"])
for name in models:
    title = f"Latency by tier through {num_pages} {pages} on the device and {host_pages} on the host"
    picture = plots.plot_latency(shown[shown["backbone"] == name], "history_pairs", title)
    display(run.figure(picture, f"latency_{name}"))

# %% [markdown]
# ## Is the copy from the host hidden?
#
# On a GPU the copies run on a stream of their own, and a layer waits only for its own pages, so that computing hides
# copying. How much a host hit takes beyond a device hit of the same length, beside the time of the copy alone:

# %%
copies = kv_cache.copies(models, latency, experiment)
run.save(copies, "copies")
if len(copies):
    title = f"Tier host against tier device: what of an onload an answer waits for, {devices.describe_device(device)}"
    display(run.figure(cache_figures.plot_copies(copies, title), "copies"))
copies.round(3)

# %% [markdown]
# ## Is the answer still the same?
#
# The largest difference of any logit from the uncached answer, over the whole log, by tier. The two sum in another
# order, so a few rounding steps of float32 are what to expect, and not more.

# %%
differences = cached.pivot_table(index="model", columns="tier", values="difference", aggfunc="max")
run.save(differences.reset_index(), "differences")
differences

# %% [markdown]
# ## In short

# %%
Markdown(" ".join(cache_figures.sentences(caches, latency, copies, str(device.type))))

# %%
run.finish()
