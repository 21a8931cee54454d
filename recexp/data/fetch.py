"""MovieLens-100K, fetched once into the user's cache: its licence forbids redistribution.

Command: ``recexp data fetch ml-100k [--from FILE_OR_FOLDER]``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm.auto import tqdm

SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
HEADER = b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
PACKAGE = "recbole==1.2.1"  # its wheel carries the data as an example
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
BY_HAND = (
    "download ml-100k.zip by hand from https://grouplens.org/datasets/movielens/100k/, unpack it, and run "
    "'recexp data fetch ml-100k --from FOLDER' with the folder that holds u.data"
)


def fetch_ml100k(destination: str | Path, source: str | Path | None = None, quiet: bool = False) -> Path:
    """Put ``ml-100k.inter`` into the folder ``destination`` and return its path; offline once it is there.

    source: a copy on this machine, ``ml-100k.inter`` or the official ``u.data``, as a file or the folder that holds it;
    None: the wheel of a public package that carries it, through pip. Both layouts hold the same rows in the same order,
    which counts because it breaks ties of time: ``u.data`` under the header line must give the same sha256.
    Raises ValueError when ``source`` is missing or something else, RuntimeError when the package cannot be had.
    """
    target = Path(destination) / "ml-100k.inter"
    if source is not None:
        content, origin = _from_copy(Path(source))
    elif target.is_file() and _sha256(target.read_bytes()) == SHA256:
        return target
    else:
        content, origin = _from_package(quiet), f"{MEMBER} of {PACKAGE}"
    if (found := _sha256(content)) != SHA256:
        kind = RuntimeError if source is None else ValueError
        raise kind(
            f"{origin} is not MovieLens-100K as published: its rows, in their order, under the header of ml-100k.inter "
            f"have sha256 {found}, not {SHA256}; {BY_HAND}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, target)  # a half-written file is never taken for a whole one
    finally:
        part.unlink(missing_ok=True)
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _from_copy(source: Path) -> tuple[bytes, str]:
    candidates = [source / name for name in ("ml-100k.inter", "u.data")] if source.is_dir() else [source]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise ValueError(f"no MovieLens-100K at {source}: looked for {', '.join(map(str, candidates))}; {BY_HAND}")
    content = path.read_bytes().replace(b"\r\n", b"\n")
    return content if content.startswith(HEADER) else HEADER + content, str(path)


def _from_package(quiet: bool) -> bytes:
    """The member of the package's wheel; pip takes it from the index that this machine is set to."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", PACKAGE]
    with tempfile.TemporaryDirectory() as folder, tqdm(total=2, desc="fetch ml-100k", disable=quiet) as progress:
        options = ["--dest", folder, "--quiet", "--disable-pip-version-check", "--retries=2"]
        done = subprocess.run(command + options, capture_output=True, text=True)
        progress.update()
        try:
            if done.returncode:
                raise OSError((done.stderr.strip() or "no message").splitlines()[-1])
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                content = wheel.read(MEMBER)
        except (OSError, KeyError, StopIteration, zipfile.BadZipFile) as error:
            raise RuntimeError(f"MovieLens-100K: tried '{' '.join(command)}' and failed: {error}; {BY_HAND}") from error
        progress.update()
        return content
