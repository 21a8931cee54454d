"""The commands ``recexp serving …``."""

import signal
from pathlib import Path
from typing import Annotated

import typer

DEFAULTS = Path(__file__).with_name("serving.yaml")
app = typer.Typer(no_args_is_help=True, help="Serving through Triton Inference Server.")


@app.command("build")
def build_command(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    repository: Annotated[Path, typer.Argument(help="Folder to be made.")],
    config: Annotated[Path, typer.Option(help="Of kind serving.")] = DEFAULTS,
    overrides: Annotated[list[str], typer.Option("--set", help="A value: --set num_pages=4097", metavar="A=B")] = [],  # noqa: B006
) -> None:
    """Write a Triton model repository for a checkpoint."""
    from recexp.config import load_config
    from recexp.serving.builder import build

    print(f"{repository}: {', '.join(build(model, repository, load_config(config, overrides)))}")


@app.command("start")
def start_command(repository: Path) -> None:
    """Serve a repository on this machine's loopback address, until Ctrl-C or SIGTERM."""
    from recexp.serving.server import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with serve(repository) as server:
        print(server.http, server.grpc, server.metrics, flush=True)
        raise RuntimeError(f"the server ended by itself, with {server.process.wait()}:\n{server.errors()}")


@app.command("probe")
def probe_command(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT or grpc://HOST:PORT")],
    model: str = "ranking",
    reload: Annotated[bool, typer.Option("--reload", help="Load the model anew if it does not answer.")] = False,
) -> None:
    """Ask a served model for a real answer; exit code 1 if it has none."""
    from recexp.serving.client import Client

    with Client(url, timeout_s=30) as client:
        if problem := client.probe(model, reload):
            raise RuntimeError(f"{model} did not answer: {problem}")


@app.command("load")
def load_command(
    url: Annotated[str, typer.Argument(help="grpc://HOST:PORT")],
    rate: Annotated[float, typer.Option(help="Requests a second.")],
    seconds: Annotated[float, typer.Option(help="No request leaves later.")] = 10.0,
    data: Annotated[Path | None, typer.Option(help="Of kind data; MovieLens-100K unless given.")] = None,
    models: Annotated[list[str], typer.Option("--model", help="Several: users are routed by id.")] = ["ranking"],  # noqa: B006
    cache: bool = True,
    out: Annotated[Path, typer.Option(help="Folder of requests.csv and latency.png.")] = Path("results/load"),
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="You may load that machine.")] = False,
) -> None:
    """Send a data set's request log at a rate, whatever the server does; latencies count from when each was due."""
    from recexp.config import DataConfig, load_config
    from recexp.data import load_interactions
    from recexp.experiments.kv_cache import request_log
    from recexp.serving.load import load, plot_load, summarise

    chosen = load_config(data) if data else DataConfig()
    log = request_log(load_interactions(chosen), chosen.max_candidates, None)
    frame = load(url, log, rate, models=models, cache=cache, max_seconds=seconds, allow_remote=allow_remote)
    out.mkdir(parents=True, exist_ok=True)
    frame.drop(columns="logits").to_csv(out / "requests.csv", index=False)
    plot_load(frame, f"{url}, {', '.join(models)}, {rate:g} requests a second").savefig(out / "latency.png", dpi=150)
    print("\n".join(f"{name:15} {value:.4g}" for name, value in summarise(frame).items()))
    print(frame["status"].value_counts().to_string(), f"{out}: requests.csv, latency.png", sep="\n")
    if not (frame["status"] == "ok").any():
        raise RuntimeError("no request was answered")
