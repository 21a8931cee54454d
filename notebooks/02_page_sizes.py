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
# # Which page size?
#
# A paged KV cache gives a user whole pages. Small pages waste few slots of each user's last one, but attention looks up
# more of them and a copy to the host has more pieces; large pages do the opposite. And a backend's kernel may only take
# some sizes. Here a layer does its paged work, page size by page size, on this device: what does a size cost?
#
# A point is a batch of users whose history lies in pages, but for its newest tokens, and new candidates. Timed is what
# a layer does with pages: **append** the keys and values of the new tokens, then **attend** from new tokens and
# candidates over the user's pages. Where to append is the same for all layers, and found before. Calls take turns on
# inputs that no cache of the device holds, and on a GPU on pages strewn over the table, as they are after a while of
# serving. Where the backend can be captured, a call is a CUDA graph of these two. A point is timed only if it agrees
# with the reference in float64.

# %% tags=["parameters"]
config = "../configs/experiments/page_sizes.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import json

from IPython.display import Markdown, display

from recexp.experiments import page_figures, plots
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.experiments.sweep import run_sweep

experiment = load_experiment(config, overrides)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
points = run_sweep(experiment.sweep, run.path, quiet)
run.save(points)
timed = points[points["status"] == "ok"]
name = " and ".join(points["device"].dropna().unique())
how = f"{', '.join(timed['dtype'].unique())}, {', '.join(timed['mode'].unique())}, tier device"
shape = "{num_heads} heads of {head_dim}, {new_tokens} new tokens a user".format(**points.iloc[0])
counts = ", ".join(f"{count} {status}" for status, count in points["status"].value_counts().items())
start = json.loads((run.path / "start.json").read_text())  # of the machine where the run began
versions = start["environment"]["versions"]
display(Markdown(f"Measured on **{name}**, torch {versions['torch']}: {shape}. Points: {counts}."))

# %% [markdown]
# ## The map
#
# A row is a batch size and a cached length, in which page sizes compete; users' lengths spread by an eighth around it.
# The framed cell has the lowest median; the colour says how many times as slow the others are. Hatched cells have no
# time, and why stands below; white ones were not asked for.

# %%
for backbone, frame in points.groupby("backbone", sort=False):
    title = f"{backbone}: median ms of append and attention, one layer, {shape}\n{name}, {how}"
    display(run.figure(page_figures.plot_pages(frame, title), f"map_{backbone}"))

# %% [markdown]
# ## With spread
#
# The longest cached length of the map, with p10 to p90. Where these overlap, a difference between two medians says
# nothing.

# %%
lines = points.drop(columns=["num_pages", "num_tokens", "num_candidates", "device_id", "mode"])
lines = lines[lines["cached_tokens"] == lines["cached_tokens"].max()]
for backbone, frame in lines.groupby("backbone", sort=False):
    picture = plots.plot_latency(frame, "page_size", f"{backbone}: append and attention, {how}")
    display(run.figure(picture, f"latency_{backbone}"))

# %% [markdown]
# ## What pages cost beside time
#
# *Wasted slots* are the unused ones of users' last pages. *Allocation* is the host's time to give a batch whose cached
# tokens have pages those for its new tokens. *To the host and back* is a user's history through the host tier, gathered
# into one piece on the way; on a GPU over the bus and pinned memory, on a CPU a plain copy within its memory.

# %%
if len(timed):
    display(run.figure(page_figures.plot_costs(points, f"What pages cost, {name}, {shape}"), "costs"))

# %% [markdown]
# ## The best page size of every row
#
# *within noise*: the sizes whose p10 does not lie above the p90 of the best one. Take the smallest of them, unless
# copies to the host matter.

# %%
best = page_figures.best_pages(points)
run.save(best, "best")
best.round(4)

# %% [markdown]
# ## How near to the machine's ceilings
#
# Share of a large matrix product's TFLOP/s and of a large copy's GB/s, taken in the same process, at the best size of
# each backend and batch.

# %%
shares = timed.groupby(["backbone", "backend", "batch_size", "cached_tokens"])[["tflops_share", "gbps_share"]].max()
shares.round(3)

# %% [markdown]
# ## In short

# %%
Markdown(page_figures.sentence(points))

# %%
_ = run.finish()
