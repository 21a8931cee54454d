# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where the numbers differ, and who would notice
#
# The same weights and the same requests give other numbers in another dtype, through another attention backend, behind
# a cache, in other pages, in a graph, on another machine. How large is each difference, where does it begin, does it
# grow with depth, and does a user of the model see it?
#
# Everything is compared with a **truth**: float64, the plain attention, no cache. Relative differences are
# ‖a − r‖ / ‖r‖ over all elements. Two paths count as **equal** when they differ by at most 1e-12 in float64 and 1e-5 in
# float32; in bfloat16, float16 and TF32, when the error against the truth is at most twice that of the plain path in
# the same dtype.

# %% tags=["parameters"]
config = "../configs/experiments/numerical_diff.yaml"
overrides = []
run_dir = ""
results = "../results"
quiet = False

# %%
import warnings

import pandas as pd
import torch
from IPython.display import Markdown, display

from recexp import devices
from recexp.data import load_interactions, make_splits
from recexp.experiments import difference_figures as figures
from recexp.experiments import numerical_diff, plots
from recexp.experiments.record import start_run, to_frame
from recexp.experiments.run import find_above, load_experiment
from recexp.train import train

warnings.filterwarnings("ignore", "flex_attention called without")  # on a CPU it is slow, and that is known
experiment = load_experiment(config, overrides)
device, setting = devices.resolve(experiment.device), experiment.difference
run = start_run(experiment.name, experiment, results, run_dir=run_dir or None, quiet=quiet)
where = devices.describe_device(device)
dtypes = [dtype for dtype in setting.dtypes if dtype != "tf32" or device.type == "cuda"]
display(Markdown(f"Measured on **{where}**, torch {torch.__version__}."))

# %% [markdown]
# ## Models and requests
#
# Trained rankers, and the test requests with the longest histories. Where there is a cache, half of every history is in
# it before the call.

# %%
interactions = load_interactions(experiment.data, quiet)
splits = make_splits(experiment.data, interactions)
models, probes = {}, {}
for name, model in experiment.models.items():
    found = train(model, experiment.data, experiment.training, interactions, splits, device=str(device), quiet=quiet)
    models[name] = found.model
    probes[name] = numerical_diff.make_probe(interactions, splits.test, model, setting.num_requests)
Markdown(f"{setting.num_requests} requests, {len(probes[name].is_new):,} tokens.")

# %% [markdown]
# ## Every way against its counterpart
#
# Each dtype against the truth; each attention backend and the fused layers against the plain attention; cached against
# uncached; each page size against the smallest; static buffers and graphs against eager. All in every dtype. A way that
# breaks the rule is a row with status *wrong*; one that the device or a backend cannot do is *refused*, with the
# reason.

# %%
compared = [numerical_diff.compare_ways(name, model, probes[name], setting, quiet) for name, model in models.items()]
rows = to_frame(row for found, _ in compared for row in found)
differences = pd.concat([found for _, found in compared], ignore_index=True)
run.save(rows)
run.save(differences, "differences")
display(run.figure(figures.plot_verdicts(differences, f"Logits on {where}: how much of the limit is used"), "verdicts"))
display(Markdown(figures.say_ways(rows, differences)))
refused = rows[rows["status"] == "refused"]
refused.groupby(["backend", "reason"])["dtype"].agg(lambda dtypes: ", ".join(dict.fromkeys(dtypes))).reset_index()

# %% [markdown]
# ## Layer by layer, operation by operation
#
# The dtypes against the truth. An operation's difference is what it adds and what came in with its inputs.

# %%
by_dtype = differences[(differences["kind"] == "dtype") & (differences["layer"] != "backbone")]
for name, frame in by_dtype.groupby("model", sort=False):
    layer = frame["layer"].where(~frame["layer"].str.isdigit(), "layer " + frame["layer"])
    frame = frame.assign(layer=frame["dtype"] + ", " + layer)
    title = f"{name} against float64 on {where}, ‖a − r‖ / ‖r‖"
    display(run.figure(plots.plot_error_heatmap(frame, title), f"operations_{name}"))

# %% [markdown]
# The same in numbers, for the dtype that is farthest off: the largest difference, the worst element with its index and
# both values, and the share of elements outside the tolerances of `torch.testing`.

# %%
farthest = by_dtype.loc[by_dtype[by_dtype["layer"] == "model"]["error"].idxmax(), "dtype"]
columns = ["model", "layer", "operation", "max_abs", "relative", "worst_index", "worst_tested", "worst_reference"]
shown = by_dtype[by_dtype["dtype"] == farthest]
plots.table(shown[[*columns, "fraction_outside"]])

# %% [markdown]
# ## The worst element, alone
#
# The operation with the largest relative difference, and of it the worst element. The next cell repeats that operation
# on just the inputs that decide the element: once as it is in that dtype, once with the same inputs and unrounded
# weights in float64. What is left between the two is made in the operation; the rest came in with its inputs.

# %%
inside = shown[shown["layer"].str.isdigit() & (shown["operation"] != "output")]
worst = inside.loc[inside["relative"].idxmax()]
low, exact, inputs, index = numerical_diff.isolate(
    models[worst["model"]], farthest, probes[worst["model"]], worst["layer"], worst["operation"], worst["worst_index"]
)
shapes = ", ".join(str(list(x.shape)) for x in inputs)
Markdown(f"{worst['model']}, layer {worst['layer']}, {worst['operation']}: `{low}` of {shapes}, element {index}")

# %%
unrounded = [x.double() if x.is_floating_point() else x for x in inputs]
with torch.inference_mode():
    alone = {farthest: float(low(*inputs)[index]), "float64": float(exact(*unrounded)[index])}
in_run = {farthest: worst["worst_tested"], "float64": worst["worst_reference"]}
own, whole = (abs(values[farthest] - values["float64"]) for values in (alone, in_run))
said_worst = (
    f"Alone, {worst['operation']} is off by {own:.1e}, in the run by {whole:.1e}: "
    f"what is not its own came in with its inputs ({worst['model']}, {farthest})."
)
display(pd.DataFrame({"in the run": in_run, "alone, on the same inputs": alone}), Markdown(said_worst))

# %% [markdown]
# ## Does it grow with depth?
#
# A deeper model of each kind, its weights drawn from the seed and not trained, so that they are the same on every
# machine. The line is the error of the residual stream behind each layer.

# %%
grown = {
    name: numerical_diff.growth(name, model, probes[name], dtypes, setting.depth) for name, model in models.items()
}
growth = pd.concat([frame for frame, _, _ in grown.values()], ignore_index=True)
run.save(growth, "growth")
stream = growth[growth["layer"].str.isdigit() & (growth["operation"] == "output") & (growth["dtype"] != "float64")]
display(run.figure(figures.plot_growth(stream, f"Error against depth on {where}, untrained weights"), "growth"))
for name, frame in growth[(growth["dtype"] == farthest) & (growth["layer"] != "backbone")].groupby("model", sort=False):
    title = f"{name}, {setting.depth} layers, {farthest} against float64 on {where}, ‖a − r‖ / ‖r‖"
    display(run.figure(plots.plot_error_heatmap(frame, title), f"depth_{name}"))
Markdown(figures.say_growth(stream))

# %% [markdown]
# ## What a user sees
#
# All test requests through the trained models: how many pairs of a request's candidates change places or become tied,
# how many places of its top are given to others, and what becomes of the metrics (first task).

# %%
some = splits.test.select(slice(0, experiment.measure.precision_requests))
asked = dtypes, interactions, some, experiment.data.tasks[0], setting.top_k
rankings = pd.concat([numerical_diff.rankings(model, *asked).assign(model=name) for name, model in models.items()])
run.save(rankings, "rankings")
title = f"{len(some):,} requests of {interactions.name} on {where}, against float64"
display(run.figure(figures.plot_rankings(rankings, title), "rankings"))
display(Markdown(figures.say_rankings(rankings)))
plots.table(rankings)

# %% [markdown]
# ## Against saved runs
#
# `traces.safetensors` keeps a sample of every operation of the deeper models in every dtype. A run of another machine
# (or another commit) is compared with this one by naming its folder: `--set difference.saved=[results/gallery/…]`.

# %%
traces = {key: trace for _, found, _ in grown.values() for key, trace in found.items()}
numerical_diff.save_traces(run.path, traces, {name: digest for name, (_, _, digest) in grown.items()})
said_saved = []
for number, saved in enumerate(setting.saved, 1):
    folder = find_above(run.path, saved / "traces.safetensors").parent
    frame = numerical_diff.compare_saved(run.path, folder)
    run.save(frame, f"saved_{number}")
    said_saved.append(figures.say_saved(frame, saved.name))
    shown = frame[(frame["dtype"] == farthest) & (frame["layer"] != "backbone")]
    for name, part in shown.groupby("model", sort=False):
        title = f"{name}, {setting.depth} layers, {farthest} on {where} against {saved.name}, ‖a − r‖ / ‖r‖"
        display(run.figure(plots.plot_error_heatmap(part, title), f"saved_{number}_{name}"))
Markdown(" ".join(said_saved) or "No saved run was named.")

# %% [markdown]
# ## In short

# %%
said = [figures.say_ways(rows, differences), said_worst, figures.say_growth(stream), figures.say_rankings(rankings)]
display(Markdown(" ".join([*said, *said_saved])))

# %%
_ = run.finish()
