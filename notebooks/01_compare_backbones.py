# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # HSTU against Transformer on the same requests
#
# Two rankers of equal size are trained on one data set (MovieLens-100K unless changed). How well do they rank, what
# does an answer cost, how large are they, and where do their numbers differ between float64, float32 and bfloat16?
#
# Everything is set in one configuration file. `recexp run configs/experiments/compare_backbones.yaml` executes this
# notebook into a run folder with tables, figures and an HTML report; *Run All* in JupyterLab does the same without the
# report.

# %% tags=["parameters"]
config = "../configs/experiments/compare_backbones.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.experiments import backbones, plots
from recexp.experiments.quality import quality, quality_plot
from recexp.experiments.record import start_run
from recexp.experiments.run import load_experiment
from recexp.train import train

experiment = load_experiment(config, overrides)
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
picture = plots.plot_data(
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
# checkpoint of the very same configuration and data is reused.

# %%
trained = {
    name: train(model, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet)
    for name, model in experiment.models.items()
}
models = {name: result.model for name, result in trained.items()}
run.figure(plots.plot_training({name: result.history for name, result in trained.items()}), "training")

# %% [markdown]
# ## Quality
#
# On the same test rows: both backbones, and plain models as a yardstick. The plain ones were fitted on everything
# before the test candidates; the sequence models have the validation ratings in their histories, but were not trained
# on them.
# Random NDCG@10 is high here because most requests have ten candidates or fewer, so read it against its own bar.

# %%
scores = quality(models, experiment.data.tasks, interactions, splits, experiment.training.seed)
run.save(scores, "quality")
for number, task in enumerate(experiment.data.tasks, 1):
    display(run.figure(quality_plot(scores, task.name, f"{interactions.name}, {task.name}"), f"quality_task{number}"))
scores.pivot_table(index=["task", "model"], columns="metric", values="value", sort=False).round(4)

# %% [markdown]
# ## Size
#
# The two have the same number of parameters: the Transformer's feed-forward part is narrow enough to make it so. FLOPs
# are those of the matrix products of one request.

# %%
size = backbones.sizes(models, interactions, experiment.measure)
run.save(size, "sizes")
run.figure(plots.plot_sizes(size, "What each model costs"), "sizes")

# %% [markdown]
# ## Latency
#
# `predict`, ids in and logits out, on real requests of equal length. Each point is checked against float64 first; a
# point that fails the check has no time. Batches take turns, so that no cache holds the inputs.

# %%
latency = backbones.latencies(models, interactions, experiment.measure, quiet)
run.save(latency)
largest = latency[latency["batch_size"] == latency["batch_size"].max()]
longest = latency[latency["history_pairs"] == latency["history_pairs"].max()]
display(run.figure(plots.plot_latency(longest, "batch_size", "Latency against batch size"), "latency_batch"))
display(run.figure(plots.plot_latency(largest, "history_pairs", "Latency against history length"), "latency_history"))
numbers = ["p10_ms", "p50_ms", "p90_ms", "tflops_share"]
columns = ["backbone", "batch_size", "history_pairs", "status", *numbers, "count", "error"]
latency[columns].style.format(precision=3, na_rep="–", subset=numbers).format("{:.1e}", subset="error")

# %% [markdown]
# ## Where the numbers differ
#
# Each dtype against the float64 reference with the same weights: the logits, the order of every user's candidates, and
# the test AUC; then layer by layer and operation by operation.

# %%
some = splits.test.select(slice(0, experiment.measure.precision_requests))
precision, differences = backbones.precision(
    models, experiment.measure.dtypes, interactions, some, experiment.data.tasks
)
run.save(precision, "precision")
run.save(differences, "differences")
precision.style.format("{:.1e}", subset=["relative error of logits", "AUC change"]).format(
    precision=4, subset=["Kendall tau", "top-3 overlap"]
)

# %%
for (name, dtype), frame in differences.groupby(["model", "dtype"], sort=False):
    if dtype != "float64":
        title = f"{name}: {dtype} on {device.type} against the float64 reference, ‖a − r‖ / ‖r‖"
        display(run.figure(plots.plot_error_heatmap(frame, title), f"differences_{name}_{dtype}"))

# %% [markdown]
# ## In short

# %%
table, sentences = backbones.summarise(scores, latency, size)
run.save(table.reset_index(), "summary")
display(table.style.format(precision=3, na_rep="–"), Markdown(" ".join(sentences)))

# %%
_ = run.finish()
