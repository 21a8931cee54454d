"""Compile the kernels for an SM without having it and print registers, stack (spills) and shared memory as JSON.

A stand-in driver names the target; every launch becomes a compile. usage: python tests/layers/aot.py SM [full]
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SM = int(sys.argv[1])
FULL = "full" in sys.argv
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}  # KiB a program may have
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
compiled: list = []


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[SM] << 10, "multiprocessor_count": 132}


class Driver:
    utils = Utils()

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", SM, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        return ty


triton.runtime.driver.set_active(Driver())
launch_for_real = JITFunction.run


def compile_only(self, *args, grid, warmup, **kwargs):
    compiled.append((self.__name__, launch_for_real(self, *args, grid=grid, warmup=True, **kwargs)))


JITFunction.run = compile_only

from attention_cases import make_case  # noqa: E402  (after the driver is set)

from recexp.cache.embeddings.kernels import gather_rows, guard_keys  # noqa: E402
from recexp.layers import HSTULayer, fused  # noqa: E402
from recexp.layers.backends import gluon  # noqa: E402
from recexp.layers.backends import triton as plain  # noqa: E402
from recexp.layers.kernels.tiles import choose_tiles  # noqa: E402

fused.choose = lambda backend, request: backend  # it would refuse a CPU
plain.overlaps = gluon.overlaps = lambda x: SM >= 90


def report(kernel: str, head_dim: int, dtype: torch.dtype, weighting: str, page_size: int | None, splits: int) -> None:
    case = make_case([70], [6], [2], 2, head_dim, page_size, dtype)
    module = gluon if kernel == "gluon" else plain
    compiled.clear()
    tiles = choose_tiles(kernel, SM, dtype, head_dim, weighting, page_size)
    module.launch(case.call(weighting), tiles, splits).merged()
    show(head_dim=head_dim, dtype=str(dtype).split(".")[1], weighting=weighting, page_size=page_size, splits=splits)


def show(**variant) -> None:
    for name, binary in compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True
            ).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        sizes = {"registers": int(registers), "stack": int(stack), "shared": binary.metadata.shared}
        row = {"kernel": name, "sm": SM, **variant, **sizes, "shared_limit": SHARED[SM] << 10}
        print(json.dumps(row), flush=True)


def report_layer(page_size: int | None) -> None:
    """The kernels of a fused HSTU layer, on the largest tiles."""
    case = make_case([70], [6], [2], 4, 128, page_size, torch.bfloat16)
    layer = HSTULayer(512, 4, 128, scaling_seqlen=64.0, backend="triton").to(torch.bfloat16)
    compiled.clear()
    with torch.no_grad():
        fused.fused_hstu_layer(
            layer, torch.zeros(len(case.q), 512, dtype=torch.bfloat16), *case.args[3:], None, case.kv
        )
    show(head_dim=128, dtype="bfloat16", weighting="silu", page_size=page_size, splits=1)


def report_embeddings() -> None:
    compiled.clear()
    keys = torch.arange(70)
    for must_be_known in (False, True):
        guard_keys(keys, torch.ones(97, dtype=torch.bool), must_be_known, torch.zeros(1, dtype=torch.int64))
    gather_rows(torch.zeros(97, 256, dtype=half), keys)
    show(head_dim=256, dtype="bfloat16", page_size=None)


half = torch.bfloat16
dims, dtypes, weightings, pages, splits = (
    (32, 64, 128, 256),
    (half, torch.float16, torch.float32),
    ("silu", "softmax"),
    (None, 16, 64),
    (1, 3),
)
if FULL:
    cases = list(itertools.product(["triton"], dims, dtypes, weightings, pages, splits))
    gluon_cases = list(itertools.product(["gluon"], dims[1:], [half], weightings, (None, 8, 16, 64, 128), splits))
else:
    cases = [("triton", 128, half, "softmax", 64, 3)]
    gluon_cases = [("gluon", 128, half, "silu", 64, 1), ("gluon", 256, half, "softmax", 16, 3)]
for case in cases + (gluon_cases if SM == 90 and gluon.WHY_NOT is None else []):
    report(*case)
report_layer(64)
report_embeddings()
