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
# # CUDA graphs: who waits for whom
#
# A small batch keeps a GPU busy for less time than it takes the host to launch its kernels. A CUDA graph launches all
# of them at once, with the addresses and sizes of its capture, so a request is copied into static buffers of a *bucket*
# (users, tokens) that it fits in. How much does that win, at which batch size does it stop winning, and what does it
# cost: capture time, memory, and rows that belong to nobody?
#
# The requests: users whose longest history is cached on the device but for its newest pairs, and new candidates. Modes:
# *eager*; *graph*, one a bucket; *segmented*, a graph a layer, between which a copy from the host could be waited for;
# *static*, the same buffers used eagerly, which is all there is without CUDA. Weights are random: neither times nor
# rounding depend on training.

# %% tags=["parameters"]
config = "../configs/experiments/cuda_graphs.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import pandas as pd
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions
from recexp.experiments import cuda_graphs, graph_figures, plots
from recexp.experiments.kv_cache import request_log
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment

experiment = load_experiment(config, overrides)
device = devices.resolve(experiment.device)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
name = devices.describe_device(device)
display(Markdown(f"Measured on **{name}**, torch {torch.__version__}."))

# %% [markdown]
# ## Capture and latency
#
# For every model: make its cache, capture every bucket in both ways, largest first, and time the same requests. A graph
# must give the logits of the static buffers bit for bit, else its point has no time; how far those are from eager ones,
# operation by operation, is in `03_numerical_diff`. Timed are the copies of a request,
# the layers and the head; embedding lookup and planning on the host are the same for all modes.

# %%
frames, reports, launched, pools = [], [], [], []
for backbone in experiment.models:
    model = cuda_graphs.make_model(backbone, experiment, device)
    modes = cuda_graphs.capture(model, experiment)
    latency, launches = cuda_graphs.latencies(model, backbone, modes, experiment, quiet)
    reports += [graphs.report().assign(backbone=backbone, mode=mode) for mode, graphs in modes.items()]
    frames.append(latency)
    launched.append(launches)
    del modes
    model.graphs = None
    if device.type == "cuda" and backbone == next(iter(experiment.models)):
        pools.append(cuda_graphs.memory_alone(model, experiment))
    del model
latency, report, launches = (pd.concat(f, ignore_index=True) for f in (frames, reports, launched))
for frame, title in ((latency, "measurements"), (report, "capture"), (launches, "launches")):
    run.save(frame, title)

# %%
for backbone, frame in latency.groupby("backbone", sort=False):
    shown = frame.drop(columns=["num_tokens", "num_candidates"])
    display(run.figure(plots.plot_latency(shown, "batch_size", f"{backbone}, cached"), f"latency_{backbone}"))
numbers = ["p10_ms", "p50_ms", "p90_ms", "host_p50_ms"]
latency[["backbone", "batch_size", "mode", "status", *numbers, "count", "error"]].round(3)

# %% [markdown]
# ## Launches, and the time a device idles
#
# The profiler adds up the time of all kernels and copies of a call; what is left of the median is time in which the
# device waits for the next launch.

# %%
if len(launches):
    display(run.figure(graph_figures.plot_launches(launches, f"Busy and idle, tier device, {name}"), "launches"))
launches.round(3)

# %% [markdown]
# ## What capture costs
#
# Launches in each graph, the time of its warm-up and capture, and the memory by which the pool grew. All buckets share
# one pool and run one at a time, so that after the largest one hardly anything is added; beside it, what every bucket
# takes in a pool of its own. The keys and values that capture writes go to pages set aside for it.

# %%
if pools:
    first = report[(report["backbone"] == next(iter(experiment.models))) & (report["mode"] == "graph")]
    run.save(pools[0], "pools")
    display(run.figure(graph_figures.plot_memory(first, pools[0], f"Memory of the buckets, {name}"), "memory"))
report.head(12).round(3)

# %% [markdown]
# ## Padding
#
# Rows of nobody are computed too. How many there are depends on how densely the buckets lie; here for the lengths of a
# real request log, each request computed whole.

# %%
if experiment.data:
    interactions = load_interactions(experiment.data, quiet)
    longest = max(model.max_history_tokens for model in experiment.models.values())
    log = request_log(interactions, experiment.data.max_candidates, None)
    lengths = [min(2 * int(batch.num_pairs.sum()), longest) + int(batch.num_candidates.sum()) for batch in log]
    padding = graph_figures.padding(lengths, experiment.data.max_candidates, experiment.replay.bucket_counts)
    run.save(padding, "padding")
    title = f"Padding of {len(lengths):,} requests of {interactions.name}, {min(lengths)} to {max(lengths)} tokens"
    display(run.figure(graph_figures.plot_padding(padding, title), "padding"))

# %% [markdown]
# ## In short

# %%
Markdown(" ".join(graph_figures.sentences(latency, report)))

# %%
_ = run.finish()
