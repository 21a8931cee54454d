"""A sweep on one device, and the same on all devices of this host through Ray: wall time, which device ran which point,
whether they disturb each other, and what a point that crashes and one that hangs cost the others.

    python benchmarks/many_devices.py configs/experiments/page_sizes_h200.yaml --out FOLDER

Writes one.csv, many.csv and faults.csv (rows as in results/README.md) and summary.json. With --devices cpu:0 --devices
cpu:1 the devices are pretended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import cloudpickle
import pandas as pd
import torch
import typer

from recexp.config import SweepConfig
from recexp.config.base import Strict
from recexp.experiments.record import environment, row
from recexp.experiments.run import load_experiment
from recexp.experiments.sweep import device_names, register_point, run_sweep

FATES = ["good", "crash", "good", "hang", *["good"] * 8]


class Fate(Strict):
    batch_size: int
    fate: str


@register_point("fate", config=Fate)
def meet(point: Fate, device: torch.device) -> dict[str, Any]:
    """Multiply two matrices, after which this point's fate comes."""
    x = torch.randn(1024, 1024, device=device)
    total = float((x @ x).sum())
    if point.fate == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if point.fate == "hang":
        time.sleep(3600)
    return row("ok" if total == total else "wrong", batch_size=point.batch_size)


def timed(sweep: SweepConfig, folder: Path) -> tuple[pd.DataFrame, float]:
    folder.mkdir(parents=True)
    start = time.perf_counter()
    frame = run_sweep(sweep, folder)
    return frame, time.perf_counter() - start


def main(
    config: Path,
    out: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str], typer.Option("--set")] = [],  # noqa: B006
    devices: Annotated[list[str], typer.Option()] = ["auto"],  # noqa: B006
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    experiment = load_experiment(config, overrides)
    assert experiment.sweep is not None
    sweep = experiment.sweep.model_copy(update={"devices": devices})
    first = device_names(devices)[0]
    small = {key: values[:1] for key, values in sweep.grid.items()}
    compiled = small | {key: sweep.grid[key] for key in ("backbone", "backend", "page_size") if key in sweep.grid}
    timed(sweep.model_copy(update={"grid": compiled}), out / "compile")  # kernels are kept on disk from here on
    one, one_s = timed(sweep.model_copy(update={"devices": [first]}), out / "one")
    many, many_s = timed(sweep.model_copy(update={"engine": "ray"}), out / "many")
    fates = SweepConfig(
        point="fate",
        zipped=[{"batch_size": list(range(1, len(FATES) + 1)), "fate": FATES}],
        engine="ray",
        devices=devices,
        seconds_per_point=20,
    )
    faults, _ = timed(fates, out / "faults")
    ratio = (many["p50_ms"] / one["p50_ms"]).dropna()
    apart = (many["p10_ms"] > one["p90_ms"]) | (many["p90_ms"] < one["p10_ms"])
    summary = {
        "one_device_s": round(one_s, 1),
        "all_devices_s": round(many_s, 1),
        "share": round(many_s / one_s, 3),
        "points": len(many),
        "points_by_device": {name: int(n) for name, n in many["device_id"].value_counts().items()},
        "statuses_equal": bool((many["status"] == one["status"]).all()),
        "p50_ratio": {f"p{q}": round(float(ratio.quantile(q / 100)), 3) for q in (5, 25, 50, 75, 95)},
        "spreads_apart": int(apart.fillna(False).sum()),
        "faults": faults["status"].value_counts().to_dict(),
        "environment": environment(),
    }
    for name, frame in (("one", one), ("many", many), ("faults", faults)):
        frame.to_csv(out / f"{name}.csv", index=False)
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    typer.run(main)
