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
# # A model without its Python
#
# A *package* is a model compiled by AOTInductor into one file: sequence stage, backbone and head, with the weights
# inside. Any number of users and tokens goes in; it checks nothing, so the loader does. A package with a KV cache takes
# the tables and the metadata as inputs and appends to the tables in place; pages are still given and evicted outside.
#
# The same requests four ways: *eager*, as everywhere else in this kit; *compiled* by `torch.compile`; a *package*; and
# a package over the cache, where all but the newest pairs is found (tier device; eager beside it). Are the numbers the
# same, what does an answer cost, and what does a package cost before the first answer? Weights and ids are random:
# neither times nor rounding depend on training.

# %% tags=["parameters"]
config = "../configs/experiments/export.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import pandas as pd
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.experiments import export, plots
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment

experiment = load_experiment(config, overrides)
device = devices.resolve(experiment.device)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
name = devices.describe_device(device)
display(Markdown(f"Measured on **{name}**, torch {torch.__version__}."))

# %% [markdown]
# ## Compile
#
# Where an attention backend cannot go into a package, export says so before it starts, and which one it takes instead:
# one for which no length is a number of Python, since such a number becomes a constant when a model is exported.

# %%
measured = [export.measure_model(model, experiment, device) for model in experiment.models]
points, artefacts = (pd.concat(frames, ignore_index=True) for frames in zip(*measured, strict=True))
run.save(points)
run.save(artefacts, "artefacts")
plots.table(artefacts)

# %% [markdown]
# Compiling is paid once, on the machine that has a compiler; loading is paid by every process that serves. A package
# belongs to the PyTorch and to the kind of device that compiled it, and is refused by any other.

# %% [markdown]
# ## Are the numbers the same?
#
# Each way against the model's float64 reference, ‖a − r‖ / ‖r‖. A way that is further off than its dtype allows is
# *wrong* and has no time.

# %%
points.pivot_table(index=["backbone", "batch_size"], columns=["mode", "tier"], values="error", sort=False)

# %% [markdown]
# ## What an answer costs
#
# From ids on the host to logits on the device, planning, checks and cache included. On a CPU a package attends by
# `gather`, which pads users to the longest one, a length read anew at every call; on CUDA it calls the Triton kernel.

# %%
for pairs, rows in points.groupby("history_pairs"):
    title = f"{pairs} pairs, {experiment.measure.num_candidates} candidates a user, {experiment.replay.dtype}, {name}"
    display(run.figure(export.plot_ways(rows, title), f"latency_{pairs}"))
plots.table(points[["backbone", "backend", "mode", "tier", "batch_size", "p10_ms", "p50_ms", "p90_ms", "error"]])

# %% [markdown]
# ## In short

# %%
Markdown(" ".join(export.sentences(points, artefacts)))

# %%
run.finish()
