"""JSON objects in files that may be damaged: what parsing one may allocate is known before it is parsed."""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

from ..errors import CheckpointError
from ..wording import short

# What parsing a text may allocate. JSON can blow up in memory ("[[],[],..." grows 20-fold), so the cost is
# estimated from the counts of its structural characters before it is parsed.
PARSE_LIMIT = 60_000_000


class DamagedJSON(ValueError):
    """A text that is no JSON object that can be read; its text says what is wrong, as "is not UTF-8" does."""


def parse_object(raw: bytes, limit: int = PARSE_LIMIT) -> dict[str, Any]:
    """The JSON object in `raw` (UTF-8, with or without a byte order mark), which may take about `limit` bytes of memory.

    Raises `DamagedJSON` for text that would take more, is malformed, nested too deeply or no object, and for a key
    that appears twice.
    """
    cost = parse_cost(raw)
    if cost > limit:
        raise DamagedJSON(
            f"of {len(raw)} bytes would take about {cost // 10**6} MB to parse; no real one does"
        )
    try:
        table = json.loads(
            raw.decode("utf-8-sig"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise DamagedJSON("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise DamagedJSON(f"is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise DamagedJSON(f"is not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise DamagedJSON("is not a JSON object")
    return table


def read_object(path: str | os.PathLike, most: int) -> dict[str, Any]:
    """The JSON object in the file at `path`, of at most `most` bytes. Raises `CheckpointError` for any other file."""
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Check its permissions, or download it again."
        ) from None
    if len(raw) > most:
        raise CheckpointError(f"{path} has more than the {most} bytes of any real one. Download it again.")
    try:
        return parse_object(raw)
    except DamagedJSON as error:
        raise CheckpointError(f"{path} {error}. Download it again.") from None


def parse_cost(raw: bytes) -> int:
    """About how many bytes it takes to parse `raw`, itself included."""
    # Python stores a text in 1 byte per character, or in 4 when one character needs it; once whole, once in parts.
    text = 1 if raw.isascii() else 4
    parts = 4 if b"\\u" in raw else text
    return (
        len(raw) * max(1 + text, text + parts)
        + 250 * raw.count(b":")
        + 100 * (raw.count(b"[") + raw.count(b"{"))
        + 50 * raw.count(b",")
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key '{short(key)}' appears twice")
            seen.add(key)
    return table


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")
