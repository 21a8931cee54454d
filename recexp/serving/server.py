"""A Triton server on this machine, on the loopback address, without a container: for tests, notebooks and first steps.

The server comes from the environment that `make serving-env` sets up: the wheel of nvidia-pytriton carries it for
Linux on x86_64. It ends with the process that started it, whatever ends that one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from recexp.serving.client import Client

LOOPBACK = "127.0.0.1"
# Asks the kernel to end this process with its parent, then becomes the server.
LAUNCH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def environment() -> Path:
    """The serving environment: $RECEXP_SERVING_ENV, or .venv-serving beside this one. ValueError: there is none."""
    folder = Path(os.environ.get("RECEXP_SERVING_ENV") or Path(sys.prefix).parent / ".venv-serving")
    if not (folder / "bin" / "python3").exists():
        raise ValueError(
            f"no serving environment in {folder}: `make serving-env` sets it up on Linux x86_64 with Python 3.11 or "
            "3.12; name another by RECEXP_SERVING_ENV"
        )
    return folder


@dataclass
class Server:
    """A running server: its process, addresses and log."""

    process: subprocess.Popen[bytes]
    ports: tuple[int, int, int]  # HTTP, gRPC, metrics
    log: Path

    @property
    def http(self) -> str:
        return f"http://{LOOPBACK}:{self.ports[0]}"

    @property
    def grpc(self) -> str:
        return f"grpc://{LOOPBACK}:{self.ports[1]}"

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports[2]}/metrics"

    def metrics(self) -> str:
        """What Prometheus would read."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            return str(answer.read().decode())

    def stop(self) -> int:
        """Take no more requests, answer those under way, end; returns the exit code."""
        if self.process.poll() is None:
            with Client(self.http) as client:
                client.drain()
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def serve(repository: Path, models: Sequence[str] = ("*",), timeout_s: float = 120) -> Iterator[Server]:
    """A server of ``repository``, its models loaded; stopped at the end.

    Raises ValueError without a serving environment, and RuntimeError with the end of the log if it does not get ready.
    """
    home = environment()
    (site,) = home.glob("lib/python3.*/site-packages")
    version = site.parent.name.removeprefix("python")
    triton = site / "pytriton" / "tritonserver"
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recexp-serving-")))
        backends = shutil.copytree(triton / "backends", work / "backends")
        stub = shutil.copy(
            triton / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python"
        )
        for binary in (Path(stub), triton / "bin" / "tritonserver"):
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        ports = tuple(one.getsockname()[1] for one in sockets)
        for one in sockets:
            one.close()
        flags = [f"--model-repository={repository.resolve()}", f"--backend-directory={backends}"]
        flags += [f"--{kind}-address={LOOPBACK}" for kind in ("http", "grpc", "metrics")]
        flags += [f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
        flags += ["--allow-gpu-metrics=false", "--disable-auto-complete-config", "--exit-timeout-secs=5"]
        flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
        flags += [f"--backend-config=python,shm-region-prefix-name={work.name}-"]
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        variables["PATH"] = f"{home / 'bin'}:{variables.get('PATH', '')}"
        variables["LD_LIBRARY_PATH"] = f"{sysconfig.get_config_var('LIBDIR')}:{site / 'nvidia_pytriton.libs'}"
        log = work / "server.log"
        command = [sys.executable, "-c", LAUNCH, str(triton / "bin" / "tritonserver"), *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        server = Server(process, ports, log)
        stack.callback(_unlink_shared_memory, work.name)
        stack.callback(server.stop)
        deadline = time.monotonic() + timeout_s
        while not _ready(server):
            if process.poll() is not None or time.monotonic() > deadline:
                errors = [line for line in log.read_text(errors="replace").splitlines() if line[:1] in "Ee"]
                raise RuntimeError("the server did not get ready:\n" + "\n".join(errors[:20]))
            time.sleep(0.1)
        yield server


def _unlink_shared_memory(prefix: str) -> None:
    for path in Path("/dev/shm").glob(f"{prefix}-*"):  # left by processes that were killed
        path.unlink()


def _ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.http}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
