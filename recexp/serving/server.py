"""A Triton server on this machine, on the loopback address, without a container: for tests, notebooks and first steps.

It comes from the environment that `make serving-env` sets up, and ends with the process that started it, whatever ends
that one.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recexp.serving.builder import CHECKPOINT
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
    """A running server; http, grpc, metrics: its addresses."""

    process: subprocess.Popen[bytes]
    ports: Sequence[int]
    log: Path

    def __post_init__(self) -> None:
        http, grpc, metrics = (f"{LOOPBACK}:{port}" for port in self.ports)
        self.http, self.grpc, self.metrics = f"http://{http}", f"grpc://{grpc}", f"http://{metrics}/metrics"

    def ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.http}/v2/health/ready", timeout=5):
            return True
        return False

    def errors(self) -> str:
        """What the log has of them."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if line[:1] in ("E", "e")][:20])

    def stop(self) -> int:
        """Take no more requests, answer those under way, end; returns the exit code."""
        if self.process.poll() is None:
            with Client(self.http) as client:
                client.drain()
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            with suppress(ProcessLookupError):  # what a server that ends while it loads models leaves behind
                os.killpg(self.process.pid, signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"{self.log.parent.name}-*"):  # theirs, if they were killed
            path.unlink()
        return self.process.wait()


@contextmanager
def serve(repository: Path, models: Sequence[str] = ("*",), timeout_s: float = 120) -> Iterator[Server]:
    """A server of ``repository``, its models loaded; stopped at the end.

    Raises ValueError without a repository or a serving environment, RuntimeError if the server does not get ready.
    """
    if not (repository / CHECKPOINT).is_dir():
        raise ValueError(f"{repository} is no model repository: `recexp serving build` makes one")
    home = environment()
    (site,) = home.glob("lib/python3.*/site-packages")
    triton = site / "pytriton" / "tritonserver"
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recexp-serving-")))
        backends, log = shutil.copytree(triton / "backends", work / "backends"), work / "server.log"
        version = site.parent.name.removeprefix("python")
        shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
        with ExitStack() as sockets:  # all open at once, so that the ports differ
            ports = [sockets.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1] for _ in range(3)]
        flags = [f"--model-repository={repository.resolve()}", f"--backend-directory={backends}"]
        for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            flags += [f"--{kind}-address={LOOPBACK}", f"--{kind}-port={port}"]
        flags += ["--allow-gpu-metrics=false", "--disable-auto-complete-config", "--exit-timeout-secs=5"]
        flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
        flags += [f"--backend-config=python,shm-region-prefix-name={work.name}-"]
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        variables["PATH"] = f"{home / 'bin'}:{variables.get('PATH', '')}"
        variables["LD_LIBRARY_PATH"] = f"{sysconfig.get_config_var('LIBDIR')}:{site / 'nvidia_pytriton.libs'}"
        command = [sys.executable, "-c", LAUNCH, str(triton / "bin" / "tritonserver"), *flags]
        with log.open("wb") as out:  # in a session of its own: Ctrl-C is for this process, which then drains it
            process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
        server = Server(process, ports, log)
        stack.callback(server.stop)
        deadline = time.monotonic() + timeout_s
        while not server.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not get ready:\n{server.errors()}")
            time.sleep(0.1)
        yield server
