"""The load generator against the real server."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'recexp[serving]'")

from recexp import cli
from recexp.config import ServingConfig
from recexp.serving.builder import build
from recexp.serving.client import Client
from recexp.serving.load import load, summarise
from recexp.serving.server import Server, serve

from .conftest import make_model, metric, relative, request_of, served, stopped, wait_until


@pytest.fixture(scope="module")
def log() -> list:
    return [request_of(700 + i % 8, 2 + i // 8) for i in range(120)]


def test_requests_leave_by_the_clock_and_are_all_answered(hstu, log) -> None:
    model, server = hstu
    frame = load(server.grpc, log, 100, max_seconds=10, timeout_s=60)
    assert len(frame) == 120 and set(frame["status"]) == {"ok"}
    assert np.allclose(frame["due_s"], np.arange(120) / 100)
    assert (frame["sent_s"] >= frame["due_s"]).all() and (frame["done_s"] > frame["sent_s"]).all()
    assert np.allclose(frame["latency_ms"], 1e3 * (frame["done_s"] - frame["due_s"]))
    for logits, batch in zip(frame["logits"], log, strict=True):
        assert relative(logits, model.predict(batch)) < 1e-12
    assert (frame["tier"][:8] == "miss").all() and (frame["tier"][8:] == "device").mean() > 0.8
    found = summarise(frame)
    assert found["count"] == 120 and found["lost_share"] == 0
    assert found["answered_per_s"] == 120 / frame["done_s"].max() <= 120 / (119 / 100)
    assert found["p50_ms"] == frame["latency_ms"].median() <= found["p90_ms"] <= found["p99_ms"]
    uncached = load(server.grpc, log[:20], 100, cache=False, timeout_s=60)
    assert set(uncached["tier"]) == {"none"}


def test_time_and_count_are_bounds(hstu, log) -> None:
    assert len(load(hstu[1].grpc, log, 50, max_seconds=0.3)) == 15
    assert len(load(hstu[1].grpc, log[:5], 50, max_seconds=60)) == 5


def answered(server: Server) -> float:
    return metric(server, "nv_inference_request_success", model="ranking")


def test_a_stall_is_in_the_latency_of_every_request_that_was_due_meanwhile(hstu, log) -> None:
    """The server stops for a second and a half. Who waits for answers would send one request meanwhile; here all that
    are due leave, and each one's latency has what was left of the stall."""
    _, server = hstu
    before = answered(server)

    def stall() -> None:
        wait_until(lambda: answered(server) >= before + 10)
        with stopped(server.process.pid):
            time.sleep(1.5)

    thread = threading.Thread(target=stall)
    thread.start()
    frame = load(server.grpc, log, 40, max_seconds=10, timeout_s=60)
    thread.join()
    assert set(frame["status"]) == {"ok"}
    answers = np.sort(frame["done_s"])
    at = int(np.diff(answers).argmax())
    begin, end = answers[at], answers[at + 1]
    assert end - begin > 1.4
    meanwhile = frame[(frame["due_s"] > begin) & (frame["due_s"] < end)]
    assert len(meanwhile) > 10 and (meanwhile["latency_ms"] >= 1e3 * (end - meanwhile["due_s"]) - 1e-6).all()
    assert ((frame["sent_s"] > begin) & (frame["sent_s"] < end)).sum() > 5


def test_a_lost_answer_is_not_waited_for(hstu, log) -> None:
    _, server = hstu
    with stopped(server.process.pid):
        frame = load(server.grpc, log[:4], 100, timeout_s=0.05)
    assert frame["status"].str.contains("Deadline").all() and summarise(frame)["lost_share"] == 1
    assert set(load(server.grpc, log[:4], 100, timeout_s=60)["status"]) == {"ok"}


def test_users_are_routed_by_their_id(triton, tmp_path: Path, log) -> None:
    """Two ranking models, each with a cache of its own, as on two GPUs."""
    names = ["ranking_0", "ranking_1"]
    model = make_model("transformer")
    with served(model, tmp_path, *names, devices=["cpu", "cpu"], timeout_ms=60_000) as server:
        frame = load(server.grpc, log, 100, models=names, timeout_s=60)
        assert set(frame["status"]) == {"ok"} and (frame["tier"] != "miss").mean() > 0.8
        with Client(server.grpc) as client:
            for user in (700, 701):
                batch = request_of(user, 16)
                tiers = [client.predict(batch, names[(user + i) % 2]).tiers for i in range(2)]
                assert tiers == [["device"], ["miss"]]


@pytest.mark.parametrize(
    ("url", "rate", "message"),
    [
        ("http://127.0.0.1:8000", 1, "write grpc://HOST:PORT"),
        ("grpc://192.0.2.1:8001", 1, "192.0.2.1 is another machine; if you may load it, say so: --allow-remote"),
        ("grpc://example.invalid:8001", 1, "example.invalid is another machine"),
        ("grpc://127.0.0.1", 1, "write grpc://HOST:PORT"),
        ("grpc://127.0.0.1:99999", 1, "Port out of range"),
        ("grpc://127.0.0.1:8001", 0, "at 0 a second"),
        ("grpc://127.0.0.1:8001", float("nan"), "at nan a second"),
        ("grpc://127.0.0.1:8001", float("inf"), "at inf a second"),
    ],
)
def test_refusals(url: str, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(url, [request_of(1, 1)], rate)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["recexp", "serving", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_commands(
    triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model("hstu", context={}).save(tmp_path / "checkpoint").parent
    assert (
        call(monkeypatch, "build", folder, tmp_path / "models", "--set", "num_pages=65", "--set", "timeout_ms=60000")
        == 0
    )
    assert "sparse, dense, ensemble, ranking" in capsys.readouterr().out
    assert call(monkeypatch, "build", folder, tmp_path / "models") == 2
    data = tmp_path / "data.yaml"
    data.write_text("kind: data\ndataset: synthetic\nsynthetic: {num_users: 30, num_items: 60}\n")
    with serve(tmp_path / "models", ["ranking"]) as server:
        assert call(monkeypatch, "probe", server.http) == 0
        assert call(monkeypatch, "probe", server.http, "--model", "nothing") == 1
        capsys.readouterr()
        options = ("--rate", 60, "--seconds", 1, "--data", data, "--out", tmp_path / "out")
        assert call(monkeypatch, "load", server.grpc, *options) == 0
    printed = capsys.readouterr().out
    assert "p99_ms" in printed and "count           60" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"requests.csv", "latency.png"}
    assert call(monkeypatch, "load", "grpc://192.0.2.1:1", *options) == 2
    assert call(monkeypatch, "load", "grpc://127.0.0.1:1", *options, "--rate", "inf") == 2
    assert call(monkeypatch, "load", "grpc://127.0.0.1:1", *options) == 1
    assert "no request was answered" in capsys.readouterr().err
    for protocol in ("http", "grpc"):
        assert call(monkeypatch, "probe", f"{protocol}://127.0.0.1:1", "--reload") == 1
        assert "nor can it be loaded anew" in capsys.readouterr().err


def test_a_server_that_ends_by_itself_is_a_failure(
    triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(make_model("hstu").save(tmp_path / "checkpoint").parent, tmp_path / "models", ServingConfig())

    def dies(server: Server) -> bool:
        server.process.kill()
        return True

    monkeypatch.setattr(Server, "ready", dies)
    assert call(monkeypatch, "start", tmp_path / "models") == 1
    assert "the server ended by itself, with -9" in capsys.readouterr().err
