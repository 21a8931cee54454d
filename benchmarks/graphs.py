"""CUDA graphs at the shape of the published HSTU latencies: ``python benchmarks/graphs.py``.

8 layers of 1024, bf16, 8 heads of 128, 3968 of 4096 history tokens cached, 128 new ones and 256 candidates. Timed as in
the experiment cuda_graphs: copies of the request, layers, head. Overhead is what the median takes beyond the sum of the
call's kernels and copies, as the profiler timed those.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd
import torch

from recexp.config import load_config
from recexp.devices import describe_device
from recexp.experiments import cuda_graphs

CONFIG = Path(__file__).parents[1] / "configs/experiments/cuda_graphs.yaml"
SETTINGS = ["graphs.batch_sizes=[1, 2, 4, 8, 16]", "measure.max_seconds=0.3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["hstu", "hstu_fused", "transformer"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    options = parser.parse_args()
    experiment = load_config(CONFIG, [*SETTINGS, f"measure.batch_sizes={options.batch_sizes}"])
    device = torch.device("cuda")
    print(describe_device(device), torch.__version__)
    for name in options.models:
        model = cuda_graphs.make_model(name, experiment, device)
        modes = cuda_graphs.capture(model, experiment)
        latency, launches = cuda_graphs.latencies(model, name, modes, experiment, quiet=True)
        for row in latency[latency["status"] != "ok"].to_dict("records"):
            print(name, row["mode"], row["batch_size"], row["status"], row["reason"])
        points = launches.merge(latency[["mode", "batch_size", "host_p50_ms", "error"]], on=["mode", "batch_size"])
        points["overhead"] = points["p50_ms"] / points["busy_ms"] - 1
        eager = points["batch_size"].map(points[points["mode"] == "eager"].set_index("batch_size")["p50_ms"])
        points["times as fast"] = eager / points["p50_ms"]
        print(points.to_string(index=False, float_format="{:.3g}".format))
        for mode, graphs in modes.items():
            report = graphs.report()
            memory = pd.to_numeric(report["memory_bytes"])
            made = {"model": name, "mode": mode, "buckets": len(report), "seconds": report["capture_ms"].sum() / 1e3}
            made |= {
                "pool_bytes": int(memory.sum()),
                "largest_bytes": int(memory[0]),
                "launches": int(report["launches"][0]),
            }
            print(json.dumps(made), flush=True)
        del model, modes, graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
