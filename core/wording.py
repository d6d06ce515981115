"""What others wrote, as an error of ours can show it."""

from __future__ import annotations

import reprlib

_WRITER = reprlib.Repr()
_WRITER.maxstring = 100


def short(text: str, most: int = 100) -> str:
    """`text` cut to `most` characters, every one of them printable."""
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def quote(value: object) -> str:
    """A value as Python writes it, cut wherever it is long or deep."""
    return _WRITER.repr(value)


def cause(error: BaseException) -> str:
    """The kind and the text of an error of another library, in one short line."""
    return short(" ".join(f"{type(error).__name__}: {str(error)[:1000]}".split()), 300)
