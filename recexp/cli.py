"""The command line: ``recexp …``. Exit code 2 for bad input, 1 for a failed run, 130 for Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recexp import __version__
from recexp.export.cli import checkpoint_app, export
from recexp.serving.cli import app as serving_app

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Inference experiments on generative recommenders.")
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(export)
app.add_typer(serving_app, name="serving")

Overrides = Annotated[
    list[str], typer.Option("--set", help="Override a value: --set models.hstu.num_layers=4", metavar="A.B=C")
]
Results = Annotated[Path, typer.Option("--results", help="Folder for results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"recexp {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False) -> None:
    pass


@app.command("list")
def list_names(
    configs: Annotated[Path, typer.Option(help="Folder with experiments/*.yaml.")] = Path("configs"),
) -> None:
    """Experiments, backbones and attention backends."""
    from recexp.layers import attention_backends, backbones

    paths = sorted((configs / "experiments").glob("*.yaml"))
    print(
        "experiments:" if paths else f"experiments: none in {configs / 'experiments'}; name their folder by --configs"
    )
    for path in paths:
        print(f"  {path}")
    print("backbones:", ", ".join(backbones))
    print("attention backends:", ", ".join(attention_backends))


@app.command()
def devices(
    assume: Annotated[str, typer.Option(help="An SM, such as sm100: what such a machine would run and refuse.")] = "",
    page_size: Annotated[int, typer.Option(min=0, help="Of the paged cache; 0: the device's own.")] = 0,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """This machine, and what each attention backend says to it (yes, or why not)."""
    import torch

    from recexp.devices import all_devices, describe_device, profile_of
    from recexp.experiments.survey import as_text, survey_backends

    if assume:
        profile = profile_of(assume)
        print(f"SM{profile.sm} ({profile.cards}): {profile.note}. Page size to begin with: {profile.page_size}.")
        size = page_size or profile.page_size
        print(as_text(survey_backends(torch.device("cuda"), head_dim, size, profile)))
        return
    for device in all_devices():
        print(describe_device(device))
        print(as_text(survey_backends(device, head_dim, page_size or 64)), end="\n\n")


@data_app.command()
def fetch(
    dataset: Annotated[str, typer.Argument(help="ml-100k")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A local copy: u.data, ml-100k.inter, or their folder.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Fetch a data set into the cache, its hash checked; once there, nothing is fetched again."""
    from recexp.config import cache_dir
    from recexp.data.fetch import fetch_ml100k

    if dataset != "ml-100k":
        raise ValueError(
            f"data set {dataset!r} cannot be fetched; known: ml-100k (use dataset: movielens for a folder of your own)"
        )
    print(f"ml-100k is in {fetch_ml100k(cache_dir() / 'data', source, quiet)}")


@app.command()
def run(
    config: Path,
    overrides: Overrides = [],  # noqa: B006
    results: Results = Path("results"),
    quiet: Quiet = False,
    engine: Annotated[str, typer.Option(help="Of the sweep: processes or ray (--set sweep.engine=…).")] = "",
    resume: Annotated[Path | None, typer.Option(help="A stopped run, <run>.partial, to go on with.")] = None,
    plan: Annotated[
        bool, typer.Option("--dry-run", help="Print the sweep's points and refusals; run nothing.")
    ] = False,
    assume: Annotated[str, typer.Option(help="With --dry-run: an SM, such as sm100, in place of this machine.")] = "",
) -> None:
    """Execute an experiment's sweep and notebook into RESULTS/<experiment>/<run>/ and make its report."""
    from recexp.experiments.run import dry_run, run_experiment

    overrides = [*overrides, *([f"sweep.engine={engine}"] if engine else [])]
    if plan or assume:
        dry_run(config, overrides, results, assume)
    else:
        run_experiment(config, overrides, results, quiet, resume)


@app.command()
def rerun(saved: Path, results: Results = Path("results"), quiet: Quiet = False) -> None:
    """Repeat a saved run from its own configuration; says what changed in the environment since."""
    from recexp.experiments.run import rerun as run_again

    run_again(saved, results, quiet)


@app.command()
def diff(
    run_a: Path,
    run_b: Path,
    out: Annotated[Path | None, typer.Option(help="Folder for table and figure; unless given, beside RUN_B.")] = None,
) -> None:
    """Compare two saved runs of an experiment, point by point. Exit code 1 for a regression of RUN_B beyond noise."""
    from recexp.experiments.diff import diff as compare

    if not compare(run_a, run_b, out):
        raise typer.Exit(1)


@app.command()
def train(config: Path, overrides: Overrides = [], quiet: Quiet = False) -> None:  # noqa: B006
    """Train every model of an experiment, as running it would; under torchrun on every device of the machine."""
    from recexp.experiments.quality import train_models

    train_models(config, overrides, quiet)


@app.command()
def seeds(
    config: Path,
    overrides: Overrides = [],  # noqa: B006
    number: Annotated[int, typer.Option("--seeds", min=1)] = 3,
    results: Results = Path("results"),
    quiet: Quiet = False,
) -> None:
    """Train every model of an experiment with several seeds and write their quality beside the baselines."""
    from recexp.experiments.quality import seed_table

    seed_table(config, overrides, number, results, quiet)


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app()
    except ValueError as error:
        print(f"recexp: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, OSError) as error:
        print(f"recexp: failed: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
