"""The committed runs: whole, readable, without anything from elsewhere, and each shown in results/README.md."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recexp.experiments.record import load_run

RESULTS = Path(__file__).parents[1] / "results"
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8").partition("\n## Gallery\n")[2]
FOLDERS = sorted(path for path in (RESULTS / "gallery").glob("*/*") if path.is_dir())
NAMES = [path.relative_to(RESULTS / "gallery").as_posix() for path in FOLDERS]
MOST_BYTES = 4 * 2**20  # of a file, so that the clone stays small


class Foreign(HTMLParser):
    """Collects what a page would run or fetch: links that a reader follows are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            fetches = name in ("src", "srcset", "poster", "data") or (name in ("href", "xlink:href") and tag != "a")
            if name.startswith("on") or (fetches and not (value or "").startswith(("data:", "#"))):
                self.found.append(f"{tag} {name}={value}"[:100])
            self.styles(value or "" if name == "style" else "")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.styles(data)

    def styles(self, text: str) -> None:
        self.found += re.findall(r"@import[^;]*", text) + re.findall(r"url\((?![\"']?(?:data:|#))[^)]*\)", text)


def foreign(text: str) -> list[str]:
    parser = Foreign()
    parser.feed(text)
    return parser.found


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_what_claims_to_be_a_run_is_one(folder: Path) -> None:
    if not (folder / "manifest.json").exists():
        assert (folder / "README.md").exists(), "neither a run nor a table with a README that says what was measured"
        return
    run = load_run(folder)
    assert run.manifest["experiment"] == folder.parent.name
    listed = {"manifest.json", *run.manifest["files"]}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == listed


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_pages_bring_all_they_show_and_files_are_small(folder: Path) -> None:
    assert [path.name for path in folder.rglob("*") if path.stat().st_size > MOST_BYTES] == []
    pages = [path for kind in ("html", "svg") for path in folder.rglob(f"*.{kind}")]
    assert {path.name: foreign(path.read_text(encoding="utf-8")) for path in pages} == {path.name: [] for path in pages}


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_the_index_shows_it(folder: Path) -> None:
    """One line of the table: a picture of its own, if it has any, a link into it, and a sentence."""
    place = folder.relative_to(RESULTS).as_posix()
    (line,) = [line for line in INDEX.splitlines() if line.startswith("|") and f"({place}/" in line]
    _, picture, said, _ = line.split("|")
    if any(folder.glob("figures/*.png")):
        assert re.findall(r'<img src="([^"]+)"', picture)[0].startswith(f"{place}/figures/")
    assert len(re.sub(r"\[.*?\]\(.*?\)|<.*?>", "", said).split()) >= 8, "no sentence"


def test_the_index_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^):]+)\)", INDEX) + re.findall(r'<img src="([^"]+)"', INDEX)
    assert links and [link for link in links if not (RESULTS / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://a.example/x.js"></script>', "<script>1</script>", '<img src="https://a.example/x.png">',
        '<img src="figures/x.png">', '<link rel="stylesheet" href="//a.example/x.css">', '<p onclick="x()">',
        "<style>@import 'x.css'; p {color: red}</style>", "<style>p {background: url(https://a.example/x.png)}</style>",
        '<p style="background: url(\'x.png\')">',
    ],
)  # fmt: skip
def test_foreign_parts_are_found(text: str) -> None:
    assert foreign(text)
    own = "<a href='https://a.example'>x</a><img src='data:image/png;base64,AA'><style>p {fill: url(#c)}</style>"
    assert foreign(own) == []
