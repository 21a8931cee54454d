"""Servers that are overloaded, lose a process, are restarted, or end while there is work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from tritonclient.utils import InferenceServerException

from recexp import SequenceBatch
from recexp.serving.client import Answer, Client
from recexp.serving.server import Server, environment, serve

from .conftest import MAX_CANDIDATES, MAX_PAIRS, make_model, relative, request_of, served, stopped, wait_until

ROOT = Path(__file__).parents[2]


def children(pid: int) -> dict[int, str]:
    """Processes below one, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def slow_request(users: int) -> SequenceBatch:
    """Without the cache."""
    rows = range(users)
    items, candidates = [1] * MAX_PAIRS, [2] * MAX_CANDIDATES
    return SequenceBatch.from_lists(rows, [items] * users, [items] * users, [candidates] * users, {"age": [0] * users})


def send(
    client: Client, requests: list[SequenceBatch], done: list[tuple[str, Answer | None]], model: str = "ranking"
) -> None:
    """All at once over gRPC, without the cache; done collects (status, answer)."""
    for batch in requests:

        def take(result, error) -> None:
            done.append((str(error or "ok"), None if error else Answer.of(result)))

        client.triton.async_infer(model, callback=take, **client.request(batch, cache=False))


def test_a_dead_process_is_noticed_and_reloaded_and_a_restart_loses_the_cache_only(triton, tmp_path: Path) -> None:
    model = make_model("hstu")
    batch = request_of(3, 9)
    expected = model.predict(batch)
    with (
        served(model, tmp_path, "ranking", num_pages=65, timeout_ms=60_000) as server,
        Client(server.http, 20) as client,
    ):
        assert [client.predict(batch).tiers for _ in range(2)] == [["miss"], ["device"]]
        (stub,) = [pid for pid, command in children(server.process.pid).items() if "/ranking/1/model.py" in command]
        os.kill(stub, signal.SIGKILL)
        wait_until(lambda: not alive(stub))
        assert client.triton.is_server_ready() and client.triton.is_model_ready("ranking")
        with pytest.raises(InferenceServerException):
            client.predict(batch)
        assert "not healthy" in client.probe()
        assert "not healthy" in client.probe(reload=True)
        assert client.probe() is None
        answers = [client.predict(batch) for _ in range(2)]
        assert [answer.tiers for answer in answers] == [["miss"], ["device"]]
        assert all(relative(answer.logits, expected) < 1e-12 for answer in answers)
    with serve(tmp_path / "models", ["ranking"]) as server, Client(server.grpc) as client:
        answers = [client.predict(batch) for _ in range(2)]
        assert [answer.tiers for answer in answers] == [["miss"], ["device"]]
        assert all(relative(answer.logits, expected) < 1e-12 for answer in answers)


def test_the_end_waits_for_what_was_accepted(triton, tmp_path: Path) -> None:
    """Requests that are computed, that wait, and that are on their way through the ensemble: all are answered."""
    model, slow = make_model("hstu"), slow_request(100)
    with served(model, tmp_path, num_pages=65, timeout_ms=60_000) as server, Client(server.grpc) as sender:
        stubs = children(server.process.pid)
        done: list[tuple[str, Answer | None]] = []
        send(sender, [slow] * 20, done)
        send(sender, [slow] * 20, done, "ensemble")
        wait_until(lambda: len(done) >= 2)
        assert server.stop() == 0
        wait_until(lambda: len(done) == 40)
        assert Counter(status for status, _ in done) == {"ok": 40}
        expected = model.predict(slow)
        assert all(relative(answer.logits, expected) < 1e-12 for _, answer in done)
        assert len(stubs) == 3 and not any(map(alive, stubs))
    assert not list(Path("/dev/shm").glob(f"{server.log.parent.name}*"))


def test_what_waits_too_long_or_in_too_long_a_queue_is_refused(triton, tmp_path: Path) -> None:
    model = make_model("hstu")
    limits = dict(num_pages=65, max_queue=6, max_batch=1, timeout_ms=60)
    with served(model, tmp_path, "ranking", **limits) as server, Client(server.grpc) as client:
        done: list[tuple[str, Answer | None]] = []
        slow = slow_request(100)
        (stub,) = [pid for pid, command in children(server.process.pid).items() if "/ranking/1/model.py" in command]
        with stopped(stub):
            send(client, [slow] * 30, done)
            wait_until(lambda: len(done) >= 20)  # one is computed, six wait
            time.sleep(0.1)
        wait_until(lambda: len(done) == 30)
        statuses = Counter(
            "full" if "maximum queue size" in s else "late" if "timeout" in s.lower() else s for s, _ in done
        )
        assert set(statuses) == {"ok", "full", "late"}, statuses
        good = [answer for status, answer in done if status == "ok"]
        assert all(relative(answer.logits, model.predict(slow)) < 1e-12 for answer in good)
        assert relative(client.predict(request_of(1, 5)).logits, model.predict(request_of(1, 5))) < 1e-12


def test_the_server_ends_with_the_process_that_started_it(triton, tmp_path: Path) -> None:
    """Even one that is killed; its port is free again."""
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.serving.conftest import make_model, served
with served(make_model("hstu"), Path({str(tmp_path)!r}), "sparse") as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""
    folder = os.environ | {"TMPDIR": str(tmp_path)}  # nobody is left to remove it
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=folder)
    server = int(parent.stdout.readline())
    (stub,) = children(server)
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(server) and not alive(stub))


def test_a_model_that_cannot_be_loaded_says_why(triton, tmp_path: Path) -> None:
    unknown = served(make_model("hstu"), tmp_path, "no_such_model")
    with pytest.raises(RuntimeError, match=r"did not get ready:[\s\S]*no_such_model"), unknown:
        pass


def test_a_server_stopped_while_it_loads_leaves_no_process(triton, tmp_path: Path, monkeypatch) -> None:
    """Its models' processes, which load PyTorch before the server minds a signal."""
    stubs: dict[int, str] = {}

    def interrupted(server: Server) -> bool:
        stubs.update(children(server.process.pid))
        if any("torch" in Path(f"/proc/{pid}/maps").read_text() for pid in stubs if alive(pid)):
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(Server, "ready", interrupted)
    with pytest.raises(KeyboardInterrupt), served(make_model("hstu"), tmp_path, "ranking", "sparse"):
        pass
    assert stubs
    wait_until(lambda: not any(map(alive, stubs)))


def test_what_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no model repository: `recexp serving build` makes one"), serve(tmp_path):
        pass


def test_without_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECEXP_SERVING_ENV", str(tmp_path))
    with pytest.raises(ValueError, match="`make serving-env` sets it up"):
        environment()
