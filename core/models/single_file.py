"""What the tensor names and shapes of a single file say about the model in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.layout import FileLayout, Rows, Rule

# What single files put before every name.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
# diffusers' own names in a single file.
DIFFUSERS_FILE = FileLayout("diffusers", prefixes=PREFIXES)
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
    """Shapes of a file's tensors by their names in `layout`, without the file's prefix; None for one it lacks.

    A file in diffusers' names is asked for the same by the layout's rules.
    """

    def __init__(self, entries: Mapping[str, Any], layout: FileLayout):
        self.prefix = layout.prefix_of(entries)
        self.entries = entries
        self.translated = layout.rules is not None and not layout.recognised(entries, self.prefix)
        self.layout = layout
        if self.translated:
            self.prefix = DIFFUSERS_FILE.prefix_of(entries)

    def __getitem__(self, name: str) -> tuple[int, ...] | None:
        entry = self.entries.get(self.prefix + (self._translate(name) if self.translated else name))
        return tuple(entry.shape) if entry is not None else None

    def _translate(self, name: str) -> str:
        module, _, suffix = name.rpartition(".")
        found = self.layout.targets(module)
        return f"{found[0].module}.{suffix}" if found else name

    def blocks(self, container: str) -> int:
        """How many blocks there are under `container`, whatever numbers they have: no more than the file has tensors."""
        if self.translated:
            container = self._container(container)
        numbers = set()
        for name in self.entries:
            head, _, rest = name.removeprefix(self.prefix).partition(".")
            number = rest.partition(".")[0]
            if head == container and number.isdecimal():
                numbers.add(number)
        return len(numbers)

    def _container(self, name: str) -> str:
        """What diffusers calls the blocks that are called `name` in the file of the layout."""
        for rule in self.layout.rules or ():
            if rule.sources[0].module.startswith(f"{name}.{{i}}."):
                return rule.module.partition(".{i}.")[0]
        return name


def rotary_axes(head: int) -> tuple[int, int, int]:
    """Widths of the three rotary axes of a `head` wide attention head: 1/8, 7/16 and 7/16 of it, the latter two even.

    16, 56 and 56 for the 128 of every published FLUX.1 and Qwen-Image; a file does not say them.
    """
    side = head * 7 // 32 * 2
    return head - 2 * side, side, side
