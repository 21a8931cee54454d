"""page_sizes in a real browser: JupyterLab runs every cell, and what it shows is a plot."""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [f"--{flag}" for flag in (
    "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "no-proxy-server", "disable-background-networking",
    "disable-component-update", "disable-sync",
)]  # fmt: skip
OVERRIDES = ["sweep.grid.backbone=[hstu]", "sweep.grid.batch_size=[1]"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """JupyterLab, on this machine only, over a folder with the notebook set to the quick configuration."""
    node = nbformat.read(ROOT / "notebooks/02_page_sizes.ipynb", as_version=4)
    (cell,) = (cell for cell in node.cells if "parameters" in cell.metadata.get("tags", []))
    given = {"config": str(ROOT / "configs/experiments/page_sizes_quick.yaml"), "overrides": OVERRIDES, "run_dir": ""}
    given |= {"results": str(tmp_path / "results"), "quiet": True}
    assert {line.split(" = ")[0] for line in cell.source.splitlines()} == set(given)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    nbformat.write(node, tmp_path / "page_sizes.ipynb")
    for kind in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{kind}_DIR", str(tmp_path / kind))
    monkeypatch.setenv("JUPYTER_PATH", f"{sys.prefix}/share/jupyter")
    monkeypatch.setenv("RECEXP_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token, url = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    options = [f"--ServerApp.{name}={value}" for name, value in (
        ("ip", "127.0.0.1"), ("port", port), ("port_retries", 0), ("root_dir", tmp_path), ("allow_root", True),
        ("open_browser", False),
    )]  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", *options, f"--IdentityProvider.token={token}"]
    before = signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that a test run that is told to stop cleans up
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(240):
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/api?token={token}")
                break
            except OSError:
                time.sleep(0.5)
        yield f"{url}/lab/tree/page_sizes.ipynb?token={token}&reset"
    finally:
        server.terminate()  # ends its kernels too
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        signal.signal(signal.SIGTERM, before)


def test_page_sizes_shows_its_plots(address: str) -> None:
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        panel = page.locator(".jp-NotebookPanel:visible")
        panel.locator(".jp-CodeCell").first.wait_for()
        idle = page.get_by_text("| Idle")  # of the kernel, in the status bar
        idle.wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        last = panel.locator(".jp-CodeCell .jp-InputArea-prompt").last
        playwright.expect(last).to_have_text(re.compile(r"\[\d+\]:"), timeout=240_000)
        idle.wait_for()
        errors = panel.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
        assert errors.all_inner_texts() == []
        images = panel.locator(".jp-OutputArea-output img")
        assert images.count() == 3  # map, latency, costs
        for image in images.all():
            image.scroll_into_view_if_needed()
            seen = matplotlib.image.imread(io.BytesIO(image.screenshot()))
            assert min(seen.shape[:2]) > 100 and len(np.unique(seen.reshape(-1, seen.shape[2]), axis=0)) > 50
        assert "rows of the map" in panel.inner_text()
        browser.close()
