# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which engine keeps the embeddings
#
# The tables of a recommender outgrow everything else in it. Who keeps the rows is therefore a question of its own: a
# tensor on the device (*torch*), FBGEMM's table-batched embeddings (*fbgemm*, also with 8- or 4-bit rows, and on a GPU
# with the table on the host and a cache on the device), or NV-Embedding-Cache (*nve*). All of them stand behind one
# interface, `EmbeddingStore`, which checks what it is asked before an engine is called; unquantised ones give the same
# rows, bit for bit.
#
# A cache helps as far as some keys are asked for more often than others. So every engine gets keys of different skew:
# by Zipf's law, where the key of rank r is asked for in proportion to r to the power −s (s = 0: every key as often),
# and the items of a real log in the order of time (MovieLens-100K unless changed).

# %% tags=["parameters"]
config = "../configs/experiments/embedding_cache.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.data.requests import make_batch
from recexp.experiments import embedding_cache, plots
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.train import train

experiment = load_experiment(config, overrides)
device = devices.resolve(experiment.device)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
where = devices.describe_device(device)
sizes = f"{experiment.embeddings.num_rows:,} rows of {experiment.embeddings.dim} float32"
display(Markdown(f"Measured on **{where}**, torch {torch.__version__}; a table has {sizes}."))

# %% [markdown]
# ## Lookup time against skew
#
# Each point is a lookup of one batch of keys (checked beforehand, as a model's are); four batches take turns. The fewer
# different rows a batch touches, the more of them lie in some faster memory: the engine's cache if it has one, and the
# processor's own caches in any case. On the right, the memory that a table takes, and what quantised rows lose.

# %%
interactions = load_interactions(experiment.data, quiet)
streams = embedding_cache.key_streams(experiment, interactions)
lookups = embedding_cache.lookups(streams, experiment, device, quiet)
run.save(lookups)
picture = embedding_cache.plot_lookups(lookups, streams, f"Tables of {sizes}, {where}")
display(run.figure(picture, "lookups"))
timed = lookups[lookups["status"] == "ok"]
hit_rate = timed["hit_rate"].astype(object).where(timed["hit_rate"].notna(), "unknown")
hit_rate = hit_rate.where(timed["cache_ratio"] < 1, "no cache")
plots.table(timed[["table", "keys", "p50_ms", "p10_ms", "p90_ms", "gbps", "error"]].assign(hit_rate=hit_rate))

# %% [markdown]
# ## What is not here, and why

# %%
absent = lookups.loc[lookups["status"] != "ok", ["table", "status", "reason"]]
plots.table(absent) if len(absent) else Markdown("Nothing: every engine could be had.")

# %% [markdown]
# ## Hits against the size of the cache
#
# The lines need no engine: a cache of that size is filled once, with what the first half of the lookups asked for most,
# and asked with the second half. Markers are what engines with a cache report of themselves; nve tells its hit rate
# to nobody. The log has few different items, so a small part of the table is enough.

# %%
static = embedding_cache.static_hits(streams, experiment)
run.save(static, "static_hits")
display(run.figure(embedding_cache.plot_hits(static, lookups, f"Cache hits, {sizes}, {where}"), "hits"))

# %% [markdown]
# ## Through a trained model
#
# The items of a trained ranker, moved into each table. *logits off by*: largest difference from the model over its own
# table. *distinct keys* are what the store was asked for, once each, for all ids of the batch. Then one row is updated
# while the KV cache holds every user of the batch: the next answer has to show it, and what was cached has to go.

# %%
splits = make_splits(experiment.data, interactions)
name, settings = next(iter(experiment.models.items()))
model = train(
    settings, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet
).model
batch, _ = make_batch(interactions, splits.test.select(slice(0, 16)))
through = embedding_cache.through_model(model, batch, experiment, device)
run.save(through, "through_model")
plots.table(through)

# %% [markdown]
# ## In short

# %%
Markdown(" ".join(embedding_cache.sentences(lookups, static, through)))

# %%
run.finish()
