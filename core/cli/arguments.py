"""Kinds of arguments that several subcommands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1, as argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
