import hashlib
import os
import re
import zipfile
from pathlib import Path

import pytest

from recexp.data import fetch
from recexp.data.fetch import HEADER, MEMBER, SHA256, fetch_ml100k


def offer_package(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes | None) -> None:
    """Let pip find nothing but a package of our own with this content; None: no package at all."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    if content is not None:
        with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("recbole-1.2.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: recbole\nVersion: 1.2.1\n")
            wheel.writestr("recbole-1.2.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(MEMBER if content else "elsewhere", content)


def test_real_file_has_the_published_hash(ml100k_file):
    content = ml100k_file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    assert content.count(b"\n") == 100_001


def test_from_package_then_offline(ml100k_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "index").mkdir()
    offer_package(monkeypatch, tmp_path / "index", ml100k_file.read_bytes())
    path = fetch_ml100k(tmp_path / "data")
    assert path.read_bytes() == ml100k_file.read_bytes()
    assert "fetch ml-100k" in capsys.readouterr().err
    monkeypatch.setattr(fetch.subprocess, "run", lambda *a, **k: pytest.fail("went to the network again"))
    assert fetch_ml100k(tmp_path / "data") == path


def test_damaged_cache_is_fetched_again_quietly(ml100k_file, tmp_path, monkeypatch, capfd):
    (tmp_path / "index").mkdir()
    offer_package(monkeypatch, tmp_path / "index", ml100k_file.read_bytes())
    (tmp_path / "ml-100k.inter").write_bytes(ml100k_file.read_bytes()[:-1])
    path = fetch_ml100k(tmp_path, quiet=True)
    assert path.read_bytes() == ml100k_file.read_bytes()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["ml-100k.inter", "u.data"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_local_copy_in_either_layout(ml100k_file, tmp_path, name, as_folder, line_end):
    content = ml100k_file.read_bytes()
    rows = content if name == "ml-100k.inter" else content.removeprefix(HEADER)
    source = tmp_path / "copy" / name
    source.parent.mkdir()
    source.write_bytes(rows.replace(b"\n", line_end))
    path = fetch_ml100k(tmp_path / "data", source.parent if as_folder else source, quiet=True)
    assert path.read_bytes() == content


def test_copy_in_another_order_is_refused(ml100k_file, tmp_path):
    first, second, *rest = ml100k_file.read_bytes().removeprefix(HEADER).splitlines(keepends=True)
    (tmp_path / "u.data").write_bytes(b"".join([second, first, *rest]))
    with pytest.raises(
        ValueError, match=r"u\.data is not MovieLens-100K as published.*in their order.*grouplens\.org.*--from"
    ):
        fetch_ml100k(tmp_path / "data", tmp_path)
    assert not (tmp_path / "data").exists()


def test_wrong_copy_is_refused_even_when_cached(ml100k_file, tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n")
    with pytest.raises(ValueError, match=r"have sha256 \w{64}, not " + SHA256):
        fetch_ml100k(ml100k_file.parent, tmp_path / "u.data")


def test_no_copy_there(tmp_path):
    looked_for = re.escape(f"{tmp_path / 'ml-100k.inter'}, {tmp_path / 'u.data'}")
    with pytest.raises(ValueError, match=f"looked for {looked_for}; download ml-100k.zip by hand"):
        fetch_ml100k(tmp_path / "data", tmp_path)
    with pytest.raises(ValueError, match=r"no MovieLens-100K at .*absent"):
        fetch_ml100k(tmp_path / "data", tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"tried '.*pip download.*recbole==1\.2\.1' and failed: .*No matching distribution"),
        (b"", r"failed: .*no item named 'recbole/dataset_example/ml-100k/ml-100k\.inter'"),
        (
            HEADER + b"1\t2\t3\t4\n",
            r"ml-100k\.inter of recbole==1\.2\.1 is not MovieLens-100K as published.*not " + SHA256,
        ),
    ],
    ids=["unreachable", "other package", "other content"],
)
def test_package_that_cannot_be_used(tmp_path, monkeypatch, content, message):
    (tmp_path / "index").mkdir()
    offer_package(monkeypatch, tmp_path / "index", content)
    with pytest.raises(RuntimeError, match=f"(?s){message}.*by hand from https://grouplens.org.*--from FOLDER"):
        fetch_ml100k(tmp_path / "data", quiet=True)
    assert not (tmp_path / "data").exists()


def test_interrupted_write_leaves_the_old_file(ml100k_file, tmp_path, monkeypatch):
    old = tmp_path / "ml-100k.inter"
    old.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: (path.touch(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        fetch_ml100k(tmp_path, ml100k_file)
    assert [path.name for path in tmp_path.iterdir()] == ["ml-100k.inter"]
    assert old.read_text() == "old"
