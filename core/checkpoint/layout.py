"""`FileLayout`: which tensors of a file make up a parameter of the model, written as a table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch

from ..errors import CheckpointError
from ..tp.shard import ShardSpec
from .files import Checkpoint
from .header import TensorEntry

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) along dimension 0 of the file's tensor `tensor`; all of it when both are None."""

    tensor: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Wanted:
    """What a rank wants of one parameter: its layout over the ranks, the file rows that make it up, its dtype.

    `dtype` None keeps the stored dtype.
    """

    spec: ShardSpec
    pieces: tuple[Piece, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Rows:
    """Part `part` of `of` equal parts of the rows of the file's module `module`."""

    module: str
    part: int = 0
    of: int = 1


@dataclass(frozen=True)
class Rule:
    """The model's `module` is made of `sources`, one below the other.

    Both sides are module names in which `{i}` stands for a block number. `suffixes` maps the parameter's last
    name to the names it may have in a file, in order of preference; one that is not listed keeps its name.
    """

    module: str
    sources: tuple[Rows, ...]
    suffixes: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Target:
    """Where rows of a file's module go: part `part` of `of` of it is part `index` of `count` of `module`."""

    module: str
    part: int
    of: int
    index: int
    count: int


class FileLayout:
    """A named table of `Rule`s from a file's tensor names to the model's parameter names.

    Without rules the names are the same (a diffusers folder). `prefixes` are what a file may put before every
    name; the one that fits a file is found from its names. Row parts are relative, so one table serves every
    size of the architecture.
    """

    def __init__(self, name: str, rules: Sequence[Rule] | None = None, prefixes: Sequence[str] = ("",)):
        self.name = name
        self.rules = tuple(rules) if rules is not None else None
        self.prefixes = tuple(prefixes)
        self._by_module = [(_pattern(rule.module), rule) for rule in self.rules or ()]
        self._by_source = [
            (_pattern(rows.module), rule, rows, index)
            for rule in self.rules or ()
            for index, rows in enumerate(rule.sources)
        ]

    def __repr__(self) -> str:
        return f"FileLayout({self.name!r})"

    def prefix_of(self, names: Iterable[str]) -> str:
        """The prefix under which most of a file's `names` are known to this table."""
        names = list(names)
        if len(self.prefixes) == 1:
            return self.prefixes[0]
        return max(self.prefixes, key=lambda prefix: (self.recognised(names, prefix), len(prefix)))

    def recognised(self, names: Iterable[str], prefix: str) -> int:
        """How many of a file's `names` this table knows."""
        if self.rules is None:
            return sum(name.startswith(prefix) for name in names)
        return sum(
            name.startswith(prefix) and bool(self.targets(name[len(prefix) :].rpartition(".")[0]))
            for name in names
        )

    def targets(self, module: str) -> tuple[Target, ...]:
        """The model's modules that the file's `module` (without prefix) feeds; the table read backwards.

        Serves LoRA files, whose keys name modules as the single file does.
        """
        if self.rules is None:
            return (Target(module, 0, 1, 0, 1),)
        found = []
        for pattern, rule, rows, index in self._by_source:
            match = pattern.fullmatch(module)
            if match:
                found.append(Target(_fill(rule.module, match), rows.part, rows.of, index, len(rule.sources)))
        return tuple(found)

    def sources(self, parameter: str) -> tuple[tuple[tuple[str, ...], int, int], ...] | None:
        """For each source of `parameter`: its possible tensor names (without prefix), and which part of how many.

        None when the table has no rule for the parameter.
        """
        if self.rules is None:
            return (((parameter,), 0, 1),)
        module, _, suffix = parameter.rpartition(".")
        for pattern, rule in self._by_module:
            match = pattern.fullmatch(module)
            if match:
                suffixes = (rule.suffixes or {}).get(suffix, (suffix,))
                return tuple(
                    (tuple(f"{_fill(rows.module, match)}.{one}" for one in suffixes), rows.part, rows.of)
                    for rows in rule.sources
                )
        return None


IDENTITY = FileLayout("diffusers")


def choose_layout(checkpoint: Checkpoint, layouts: Sequence[FileLayout]) -> FileLayout:
    """The layout that knows most of the checkpoint's tensor names; the first of equals.

    Layouts with rules are asked first: a table that knows nothing of a file leaves it to `IDENTITY`.
    """
    tables = [layout for layout in layouts if layout.rules is not None]
    plain = [layout for layout in layouts if layout.rules is None]
    scores = [
        (layout.recognised(checkpoint.entries, layout.prefix_of(checkpoint.entries)), layout)
        for layout in tables
    ]
    best = max((score for score, _ in scores), default=0)
    if plain and best * 2 < len(checkpoint.entries):
        return plain[0]
    for score, layout in scores:
        if score == best:
            return layout
    raise CheckpointError(f"{checkpoint.path}: no layout was given to read it by.")


def check(
    checkpoint: Checkpoint,
    layout: FileLayout,
    shapes: Mapping[str, Sequence[int] | torch.Size],
    *,
    optional: Collection[str] = (),
    ignored: Sequence[str] = (),
) -> dict[str, tuple[Piece, ...]]:
    """Compare a checkpoint with the model's full parameter `shapes`, and return each parameter's pieces.

    `optional` parameters may be missing; tensors that match one of the `ignored` patterns (`*.input_scale`,
    without the file's prefix) may be there though no parameter uses them.
    All problems (missing tensor, unknown tensor, wrong shape, unsupported dtype) are gathered in one
    `CheckpointError` before anything is allocated.
    """
    prefix = layout.prefix_of(checkpoint.entries)
    pieces: dict[str, tuple[Piece, ...]] = {}
    used: set[str] = set()
    problems: list[str] = []
    for parameter, shape in shapes.items():
        found = _pieces_of(checkpoint, layout, prefix, parameter)
        used.update(piece.tensor for piece in found if isinstance(piece, Piece))
        missing = [source for source in found if not isinstance(source, Piece)]
        if missing:
            if parameter not in optional:
                problems.append(f"missing tensor '{missing[0]}'" + _for(parameter, missing[0]))
            continue
        parts = tuple(piece for piece in found if isinstance(piece, Piece))
        problem = _problem(checkpoint, parameter, tuple(shape), parts)
        if problem:
            problems.append(problem)
        else:
            pieces[parameter] = parts
    for name in checkpoint.entries:
        if name in used:
            continue
        bare = name[len(prefix) :] if name.startswith(prefix) else name
        if not any(fnmatchcase(bare, pattern) for pattern in ignored):
            problems.append(f"unknown tensor '{name}'")
    if problems:
        shown = "; ".join(problems[:5])
        rest = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model (read as {layout.name}): {shown}{rest}. It is another "
            f"model's file, or a part of one: choose the whole model's file, or load this one with the stock loader."
        )
    return pieces


def _pieces_of(checkpoint: Checkpoint, layout: FileLayout, prefix: str, parameter: str) -> list[Piece | str]:
    """The pieces of `parameter` in order; in place of one that the file lacks, the name it should have."""
    sources = layout.sources(parameter)
    if sources is None:
        return [parameter]
    found: list[Piece | str] = []
    for names, part, of in sources:
        present = [prefix + name for name in names if prefix + name in checkpoint.entries]
        if not present:
            found.append(prefix + names[0])
        elif of == 1 or not checkpoint.entries[present[0]].shape:
            found.append(Piece(present[0]))
        else:
            rows = checkpoint.entries[present[0]].shape[0]
            found.append(Piece(present[0], rows * part // of, rows * (part + 1) // of))
    return found


def _problem(
    checkpoint: Checkpoint, parameter: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]
) -> str | None:
    entries = [checkpoint.entries[piece.tensor] for piece in pieces]
    for entry in entries:
        if entry.dtype not in FLOAT_DTYPES:
            return (
                f"tensor '{entry.name}' has the unsupported dtype {entry.dtype}{_for(parameter, entry.name)}"
            )
        if entry.dtype != entries[0].dtype:
            return (
                f"tensors '{entries[0].name}' ({entries[0].dtype}) and '{entry.name}' ({entry.dtype}) of '{parameter}' "
                f"differ in dtype"
            )
    held = _shape_of(entries, pieces)
    if held != shape:
        names = " + ".join(f"'{entry.name}'" for entry in entries)
        shown = list(held) if held is not None else "that does not fit together"
        return f"tensor {names} has shape {shown}, expected {list(shape)}{_for(parameter, entries[0].name)}"
    return None


def _shape_of(entries: list[TensorEntry], pieces: tuple[Piece, ...]) -> tuple[int, ...] | None:
    """The shape of the pieces, one below the other, or None where they do not fit together."""
    if len(pieces) == 1 and pieces[0].start is None:
        return entries[0].shape
    if any(not entry.shape or entry.shape[1:] != entries[0].shape[1:] for entry in entries):
        return None
    rows = sum(
        entry.shape[0] if piece.start is None or piece.stop is None else piece.stop - piece.start
        for entry, piece in zip(entries, pieces, strict=True)
    )
    return (rows, *entries[0].shape[1:])


def _for(parameter: str, tensor: str) -> str:
    return f" (for '{parameter}')" if parameter != tensor else ""


@lru_cache(maxsize=4096)
def _pattern(module: str) -> re.Pattern[str]:
    return re.compile(re.escape(module).replace(r"\{i\}", r"(\d+)"))


def _fill(module: str, match: re.Match[str]) -> str:
    for number in match.groups():
        module = module.replace("{i}", number, 1)
    return module
