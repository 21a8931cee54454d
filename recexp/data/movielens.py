"""MovieLens ratings in their published layouts: ratings.csv, ratings.dat, u.data, and ml-100k.inter."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from recexp.data.interactions import Interactions

LAYOUTS = {  # file name: separator, header
    "ratings.csv": (",", "userId,movieId,rating,timestamp"),
    "ratings.dat": ("::", None),
    "u.data": ("\t", None),
    "ml-100k.inter": ("\t", "user_id:token\titem_id:token\trating:float\ttimestamp:float"),
}
STARS = tuple(range(1, 6))
HALF_STARS = tuple(i / 2 for i in range(1, 11))


def load_movielens(path: str | Path, name: str | None = None) -> Interactions:
    """Ratings of the file ``path``, or of the one file of a known layout in the folder ``path``.

    The action id is the index of the rating among the possible ones, counted from 1 (0 is padding): the rating itself
    where all ratings are whole stars, twice the rating where a half star occurs. ``action_values`` maps it back.
    Raises ValueError: nothing of a known layout, more than one, no ratings, or a bad line (its number and text).
    """
    path = Path(path)
    found = [path] if path.is_file() and path.name in LAYOUTS else [path / n for n in LAYOUTS if (path / n).is_file()]
    if len(found) != 1:
        there = " and ".join(file.name for file in found) or "none"
        raise ValueError(f"no ratings to read at {path}: give it one file of {', '.join(LAYOUTS)}; found {there}")
    users, items, ratings, timestamps = _read(found[0])
    half = bool((ratings % 1).any())
    values = (np.nan, *(HALF_STARS if half else STARS))
    action_ids = (ratings * (2 if half else 1)).astype(np.int64)
    name = name or found[0].resolve().parent.name
    return Interactions.from_events(name, users, items, action_ids, timestamps, values)


def _read(path: Path) -> list[NDArray[Any]]:
    """Users, items, ratings, timestamps, each [N]. pandas reads fast; what it cannot take is looked for by line."""
    separator, header = LAYOUTS[path.name]
    with path.open(encoding="utf-8", errors="replace") as lines:
        if header is not None and (first := lines.readline().rstrip("\r\n")) != header:
            raise ValueError(f"{path}, line 1: {first!r:.120}; expected the header {header!r}")
    skip, step = int(header is not None), len(separator)
    try:  # "::" is read as ":" with an empty column between two fields: the fast parser takes single characters only
        table = pd.read_csv(
            path, sep=separator[0], header=None, skiprows=skip, quoting=csv.QUOTE_NONE, low_memory=False
        )
        columns = [table[i].to_numpy() for i in table.columns[::step]]
        if len(columns) != 4 or table.drop(columns=table.columns[::step]).notna().any(axis=None):
            raise ValueError(f"{len(columns)} fields")
        if any(c.dtype.kind != "i" or c.min() < 0 for c in columns[:2] + columns[3:]):
            raise ValueError("an id or timestamp that is not a whole number")
        if not np.isin(columns[2], HALF_STARS).all():
            raise ValueError("a rating that is none of 0.5, 1, … 5")
    except ValueError as error:  # those above, and pandas' own: of parsing, of decoding, of an empty file
        raise ValueError(f"{path}{_first_fault(path, separator, skip) or f' holds no ratings: {error}'}") from error
    return columns


def _first_fault(path: Path, separator: str, skip: int) -> str | None:
    """Number and text of the first line that is not four fields as expected; None when every line is."""
    number, rating = r"\d{1,18}", r"([1-5](\.0+)?|[0-4]?\.50*)"
    rating_line = re.compile(re.escape(separator).join((number, number, rating, number)))
    expected = separator.join(("user", "item", "rating", "timestamp")).replace("\t", "<tab>")
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            text = line.rstrip("\r\n")
            if line_number > skip and text and not rating_line.fullmatch(text):
                rules = "whole numbers but for the rating, which is 0.5, 1, … 5"
                return f", line {line_number}: {text!r:.120}; expected {expected}, {rules}"
    return None
