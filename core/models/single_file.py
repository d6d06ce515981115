"""What the tensor names and shapes of a single file say about the model in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.layout import FileLayout


class Shapes:
    """Shapes of a file's tensors by their names in `layout`, without the file's prefix; None for one it lacks."""

    def __init__(self, entries: Mapping[str, Any], layout: FileLayout):
        self.prefix = layout.prefix_of(entries)
        self.entries = entries

    def __getitem__(self, name: str) -> tuple[int, ...] | None:
        entry = self.entries.get(self.prefix + name)
        return tuple(entry.shape) if entry is not None else None

    def blocks(self, container: str) -> int:
        """How many blocks there are under `container`, by the highest number."""
        highest = -1
        for name in self.entries:
            head, _, rest = name.removeprefix(self.prefix).partition(".")
            number = rest.partition(".")[0]
            if head == container and number.isdecimal():
                highest = max(highest, int(number))
        return highest + 1


def rotary_axes(head: int) -> tuple[int, int, int]:
    """Widths of the three rotary axes of a `head` wide attention head: 1/8, 7/16 and 7/16 of it, the latter two even.

    16, 56 and 56 for the 128 of every published FLUX.1 and Qwen-Image; a file does not say them.
    """
    side = head * 7 // 32 * 2
    return head - 2 * side, side, side
