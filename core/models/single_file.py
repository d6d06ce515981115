"""What the tensor names and shapes of a single file say about the model in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.layout import FileLayout, Rows, Rule

# What single files put before every name.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
# Norm weights are called `scale` by Black Forest Labs and `weight` in some files of ComfyUI's time.
NORM = {"weight": ("scale", "weight")}


def attention_rules(
    file: str, model: str, *, q: str, k: str, v: str, norm_q: str, norm_k: str, out: str
) -> tuple[Rule, ...]:
    """One stream's attention in a double block of FLUX: the file's fused qkv is three weights of the model.

    `file` is the stream's name there ("double_blocks.{i}.img"), `model` the block's; the others name its modules.
    """
    return (
        Rule(f"{model}.attn.{q}", (Rows(f"{file}_attn.qkv", 0, 3),)),
        Rule(f"{model}.attn.{k}", (Rows(f"{file}_attn.qkv", 1, 3),)),
        Rule(f"{model}.attn.{v}", (Rows(f"{file}_attn.qkv", 2, 3),)),
        Rule(f"{model}.attn.{norm_q}", (Rows(f"{file}_attn.norm.query_norm"),), NORM),
        Rule(f"{model}.attn.{norm_k}", (Rows(f"{file}_attn.norm.key_norm"),), NORM),
        Rule(f"{model}.attn.{out}", (Rows(f"{file}_attn.proj"),)),
    )


class Shapes:
    """Shapes of a file's tensors by their names in `layout`, without the file's prefix; None for one it lacks."""

    def __init__(self, entries: Mapping[str, Any], layout: FileLayout):
        self.prefix = layout.prefix_of(entries)
        self.entries = entries

    def __getitem__(self, name: str) -> tuple[int, ...] | None:
        entry = self.entries.get(self.prefix + name)
        return tuple(entry.shape) if entry is not None else None

    def blocks(self, container: str) -> int:
        """How many blocks there are under `container`, whatever numbers they have: no more than the file has tensors."""
        numbers = set()
        for name in self.entries:
            head, _, rest = name.removeprefix(self.prefix).partition(".")
            number = rest.partition(".")[0]
            if head == container and number.isdecimal():
                numbers.add(number)
        return len(numbers)


def rotary_axes(head: int) -> tuple[int, int, int]:
    """Widths of the three rotary axes of a `head` wide attention head: 1/8, 7/16 and 7/16 of it, the latter two even.

    16, 56 and 56 for the 128 of every published FLUX.1 and Qwen-Image; a file does not say them.
    """
    side = head * 7 // 32 * 2
    return head - 2 * side, side, side
