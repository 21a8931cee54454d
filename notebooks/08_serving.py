# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Served: latency against the rate of requests
#
# A Python call knows no queue. Here both trained rankers stand behind a Triton Inference Server on this machine, and a
# request log (MovieLens-100K unless changed) arrives over gRPC at a given rate: users return, each time with a longer
# history. How late are the answers, at which rate does a server fall behind, and what does the KV cache change?
#
# Requests leave by the clock, whatever the server does, and latencies count from when a request was due. A client that
# waits for each answer would send less to a slow server, and never see what its users see.

# %% tags=["parameters"]
config = "../configs/experiments/serving.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.experiments import kv_cache
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.serving.rates import plot_rates, rates, sentences
from recexp.serving.server import environment
from recexp.train import train

experiment = load_experiment(config, overrides)
device = devices.resolve(experiment.device)
environment()  # says what to do where no server can run
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
display(Markdown(f"Measured on **{devices.describe_device(device)}**, torch {torch.__version__}."))

# %% [markdown]
# ## The models and the log
#
# Both backbones are served by the same code: the checkpoint decides. A request is one user with up to ten candidates;
# next time these are history.

# %%
interactions = load_interactions(experiment.data, quiet)
splits = make_splits(experiment.data, interactions)
models = {
    name: train(
        model, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet
    ).model
    for name, model in experiment.models.items()
}
log = kv_cache.request_log(interactions, experiment.data.max_candidates, None)
warm = experiment.load.num_warm
Markdown(f"{len(log):,} requests; the first {warm:,} are answered one by one, so that the cache knows who returns.")

# %% [markdown]
# ## Load
#
# Each model gets a server of its own, and each rate the next requests of the log; the uncached path gets the same ones,
# through the same model, asked to compute everything. Generator and server share this machine. Every answer is compared
# with that of the Python call; where they differ, there is no time.

# %%
points = rates(models, log, experiment, quiet)
run.save(points)
columns = ["backbone", "tier", "rate", "answered_per_s", "p50_ms", "p90_ms", "p99_ms", "lost_share"]
points[[*columns, "reused_per_request", "error"]].round(3)

# %% [markdown]
# The median is what most users see; p99 is where a queue shows first. Where the median bends upwards the server takes
# longer than the requests leave it; requests that wait longer than the limit are refused and counted as lost.
#
# What a cache saves is computing, what it costs is bookkeeping on the host, the same for a small model and for a large
# one. Two layers of width 64 on a CPU are little to save: here the cache may well cost more than it brings.

# %%
title = f"{interactions.name} over gRPC, {devices.describe_device(device)}, {experiment.load.seconds:g} s a point"
display(run.figure(plot_rates(points, title), "latency_against_rate"))

# %% [markdown]
# ## In short

# %%
Markdown(" ".join(sentences(points)))

# %%
run.finish()
