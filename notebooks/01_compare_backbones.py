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
# # HSTU against Transformer on the same requests
#
# Rankers of equal size are trained on one data set (MovieLens-100K unless changed). How well do they rank, what does an
# answer cost with and without a cache, and how large are they? A layer of your own joins them: the cell below defines
# one. Where their numbers differ between dtypes and paths is the subject of `03_numerical_diff`.
#
# Everything is set in one configuration file. `recexp run configs/experiments/compare_backbones.yaml` executes this
# notebook into a run folder with tables, figures and an HTML report; *Run All* in JupyterLab does the same without the
# report. `compare_backbones_sizes.yaml` compares three sizes of both.

# %% tags=["parameters"]
config = "../configs/experiments/compare_backbones.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %% [markdown]
# ## Your own backbone
#
# Change the layer below, or write another one: its constructor takes the model's configuration, its call the tokens of
# all users, one behind the other. One rule holds for every backbone: a history token sees itself and what came before
# it, a candidate sees the whole history and itself. A model in the configuration file whose `backbone` is the
# registered name is checked against the rule, trained, measured and compared in every plot. `recexp run` finds this
# cell by its tag.
#
# The example keeps running sums in place of keys and values (the simple attention-free Transformer of Zhai et al.,
# arXiv 2105.14103), so there is nothing to put into a paged cache, and it says so.

# %% tags=["backbone"]
import torch
from torch import nn

from recexp.layers import register_backbone
from recexp.layers.jagged import row_users, to_jagged, to_padded


@register_backbone("attention_free")
class AttentionFree(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(config.hidden_size), nn.Dropout(config.dropout)
        self.qkv, self.proj = (nn.Linear(config.hidden_size, n * config.hidden_size) for n in (3, 1))

    def forward(self, x, seq_offsets, num_candidates, max_seqlen=None, kv=None):  # x: [T, D]
        if kv is not None:
            raise ValueError("attention_free keeps running sums, not keys and values: it has no paged cache")
        user, lengths = row_users(len(x), seq_offsets), seq_offsets.diff()  # [T], [B]
        position = torch.arange(len(x), device=x.device) - seq_offsets[user]
        is_candidate = (position >= (lengths - num_candidates)[user])[:, None]
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        own = torch.cat([k.exp() * v, k.exp()], dim=-1)  # what a token adds to the sums: [T, 2 D]
        padded = to_padded(own.masked_fill(is_candidate, 0.0), seq_offsets, max_seqlen or int(lengths.max()))
        seen = to_jagged(padded.cumsum(1), seq_offsets, len(x)) + own.masked_fill(~is_candidate, 0.0)
        top, bottom = seen.chunk(2, dim=-1)
        return x + self.proj(self.dropout(q.sigmoid() * top / bottom))


# %% [markdown]
# ## The experiment

# %%
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.experiments import backbone_figures, backbones, plots
from recexp.experiments.latency import latencies
from recexp.experiments.quality import quality, quality_plot
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.train import train

experiment = load_experiment(config, overrides)
for name, model in experiment.models.items():
    backbones.check_rule(name, model)
device = devices.resolve(experiment.device)
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
display(Markdown(f"Measured on **{devices.describe_device(device)}**, torch {torch.__version__}."))

# %% [markdown]
# ## The data and the task
#
# A request is a user's history, item and rating in turn, and then up to ten candidates. The model gives every candidate
# one logit a task. History tokens see what came before them; a candidate sees the whole history and itself, and no
# other candidate. A user's last ratings are the test; the ones before them choose the settings (validation).

# %%
interactions = load_interactions(experiment.data, quiet)
splits = make_splits(experiment.data, interactions)
picture = backbone_figures.plot_data(
    interactions.lengths,
    interactions.action_values[interactions.action_ids],
    backbones.example_tokens(interactions, splits.test),
    interactions.name,
)
run.figure(picture, "data")

# %% [markdown]
# ## Training
#
# One random window a user and epoch; the loss is taken at every item token, whose row cannot see its own rating. A
# checkpoint of the very same configuration and data is reused, except for a backbone of your own.

# %%
trained = {
    name: train(model, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet)
    for name, model in experiment.models.items()
}
models = {name: result.model for name, result in trained.items()}
run.figure(backbone_figures.plot_training({name: result.history for name, result in trained.items()}), "training")

# %% [markdown]
# ## Quality
#
# On the same test rows: the backbones, and plain models as a yardstick. The plain ones were fitted on everything before
# the test candidates; the sequence models have the validation ratings in their histories, but were not trained on them.
# Random NDCG@10 is high here because most requests have ten candidates or fewer, so read it against its own bar.

# %%
scores = quality(models, experiment.data.tasks, interactions, splits, experiment.training.seed)
run.save(scores, "quality")
for number, task in enumerate(experiment.data.tasks, 1):
    display(run.figure(quality_plot(scores, task.name, f"{interactions.name}, {task.name}"), f"quality_task{number}"))
scores.pivot_table(index=["task", "model"], columns="metric", values="value", sort=False).round(4)

# %% [markdown]
# ## Latency
#
# Ids in, logits out, on real requests of equal length, four ways:
#
# * *eager, tier none*: `predict`, without a cache;
# * *graph, tier miss*: `predict_cached` through a CUDA graph, nothing cached yet;
# * *eager, tier device*: `predict_cached` of users whose history is cached on the device but for its newest pairs;
# * *graph, tier device*: the same through a CUDA graph.
#
# A CPU has no graphs: there the graph's buffers are used eagerly, mode *static*, on device hits only, since the one
# backend that can read their lengths there compares every row with every key of the batch. Each point is checked
# against float64 first; a point that fails the check has no time, and what a layer refuses is a cross. Batches take
# turns, so that no cache of the processor holds the inputs.

# %%
latency = latencies(models, interactions, experiment, quiet)
run.save(latency)
for x, other in (("batch_size", "history_pairs"), ("history_pairs", "batch_size")):
    if latency[x].nunique() > 1:  # one value makes no line
        points = latency[latency[other] == latency[other].max()].drop(columns=["num_tokens", "num_candidates"])
        title = f"Latency, {experiment.replay.new_pairs} new pairs where cached"
        picture = plots.plot_latency(points, x, title, panels=True)
        display(run.figure(picture, f"latency_{x.split('_')[0]}"))
numbers = ["p10_ms", "p50_ms", "p90_ms", "host_p50_ms", "count", "peak_memory_bytes", "tflops", "tflops_share", "error"]
point = ["backbone", "backend", "mode", "tier", "batch_size", "history_pairs", "status"]
plots.table(latency[[*point, *numbers, "reason"]])

# %% [markdown]
# ## Size
#
# The two have the same number of parameters: the Transformer's feed-forward part is narrow enough to make it so. FLOPs
# are those of the linear layers and of attention to what is visible, for one request without a cache.

# %%
size = backbones.sizes(models, latency, experiment.measure)
run.save(size, "sizes")
display(run.figure(backbone_figures.plot_sizes(size, f"What each model costs, {experiment.replay.dtype}"), "sizes"))
plots.table(size)

# %% [markdown]
# ## Quality against latency against memory
#
# The largest point above: what an answer costs along every path, and what the weights and the cached histories of a
# thousand users take (a layer without a cache keeps nothing, and computes every request whole). Up and to the left is
# better.

# %%
tradeoffs = backbones.tradeoffs(models, scores, latency, size)
run.save(tradeoffs, "tradeoffs")
title = f"{interactions.name}, {experiment.data.tasks[0].name}, {devices.describe_device(device)}"
display(run.figure(backbone_figures.plot_tradeoffs(tradeoffs, title), "tradeoffs"))
plots.table(tradeoffs)

# %% [markdown]
# ## In short

# %%
table, sentences = backbones.summarise(scores, latency, size)
run.save(table.reset_index(), "summary")
display(table.style.format(precision=3, na_rep="–"), Markdown(" ".join(sentences)))

# %%
_ = run.finish()
