"""Which bytes of a checkpoint make up a rank's part of each parameter, and in which reads they are taken.

They follow from `ShardSpec.runs` and the file layout's pieces. Nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..errors import CheckpointError, PlanError
from .files import Checkpoint
from .header import TensorEntry
from .layout import Piece, Wanted
from .memory import PAGE

# Bytes per read call: large enough that a call costs nothing beside its copy, small enough that a cancel takes effect
# at once and the staging ring stays small. Staging buffers are a page longer, so that a read can be moved in them.
CHUNK = (8 << 20) - PAGE
# Reads that lie at most this far apart become one call, as long as what is read in vain stays below 1/1000.
GAP = 4096
OVER_READ = 1000
VECTORS = 256


@dataclass(frozen=True)
class Fill:
    """Bytes of one file tensor that fill a contiguous range of one parameter's local tensor.

    `rows` rows of the file, `pitch` bytes apart from byte `offset` on; of each the `runs` (offset in the row, length).
    `start` is where they go, in bytes of the local tensor in the stored dtype.
    """

    parameter: str
    tensor: str
    path: str
    offset: int
    rows: int
    pitch: int
    runs: tuple[tuple[int, int], ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def begin(self) -> int:
        """The file offset of the first byte."""
        return self.offset + self.runs[0][0]

    @property
    def is_contiguous(self) -> bool:
        """Whether the bytes are one stretch of the file."""
        return self.rows == 1 and len(self.runs) == 1

    @property
    def end(self) -> int:
        """The file offset after the last byte."""
        offset, length = self.runs[-1]
        return self.offset + (self.rows - 1) * self.pitch + offset + length


def fills_of(checkpoint: Checkpoint, name: str, want: Wanted, rank: int) -> Iterator[Fill]:
    """The byte ranges of the checkpoint that make up `rank`'s part of parameter `name`, in local order per piece."""
    runs = want.spec.runs(rank)
    first = 0
    for piece in want.pieces:
        entry = checkpoint.entries[piece.tensor]
        size = entry.torch_dtype.itemsize
        skipped, elements = _extent(entry, piece)
        base = entry.start + skipped * size
        if runs.rows == 1:
            local = 0
            for offset, length in runs.stretches:
                begin = max(offset, first)
                count = min(offset + length, first + elements) - begin
                if count > 0:
                    yield Fill(
                        name,
                        entry.name,
                        entry.path,
                        base + (begin - first) * size,
                        1,
                        0,
                        ((0, count * size),),
                        (local + begin - offset) * size,
                    )
                local += length
        elif elements:
            yield Fill(
                name,
                entry.name,
                entry.path,
                base,
                elements // runs.pitch,
                runs.pitch * size,
                tuple((offset * size, length * size) for offset, length in runs.stretches),
                first // runs.pitch * runs.length * size,
            )
        first += elements


def _extent(entry: TensorEntry, piece: Piece) -> tuple[int, int]:
    """Elements of the file tensor before the piece, and in it."""
    if piece.start is None or piece.stop is None:
        return 0, prod(entry.shape)
    row = prod(entry.shape[1:])
    return piece.start * row, (piece.stop - piece.start) * row


def check_wanted(checkpoint: Checkpoint, name: str, want: Wanted, degree: int) -> None:
    if want.spec.degree != degree:
        raise PlanError(f"'{name}' is laid out for {want.spec.degree} ranks, but {degree} are reading.")
    held = 0
    dtypes = set()
    for piece in want.pieces:
        entry = checkpoint.entries.get(piece.tensor)
        if entry is None:
            raise CheckpointError(f"{checkpoint.path} has no tensor '{piece.tensor}', which '{name}' needs.")
        if piece.start is not None and piece.stop is not None:
            rows = entry.shape[0] if entry.shape else 0
            if not 0 <= piece.start <= piece.stop <= rows:
                raise CheckpointError(
                    f"{entry.path}: tensor '{entry.name}' has {rows} rows, but '{name}' needs rows [{piece.start}, "
                    f"{piece.stop}). The file does not belong to this model."
                )
        held += _extent(entry, piece)[1]
        dtypes.add(entry.torch_dtype)
    if held != prod(want.spec.shape) or len(dtypes) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: '{name}' of shape {list(want.spec.shape)} needs {prod(want.spec.shape)} elements of "
            f"one dtype, but its tensors hold {held} of {len(dtypes)} dtypes. The file does not belong to this model."
        )


def batches(fills: Sequence[Fill]) -> Iterator[tuple[Fill, ...]]:
    """Fills in file order, cut into chunks; small neighbours share one read call."""
    batch: list[Fill] = []
    wasted = total = 0
    for fill in sorted(
        (chunk for fill in fills for chunk in chunks(fill)), key=lambda fill: (fill.path, fill.begin)
    ):
        total += fill.nbytes
        if batch:
            gap = fill.begin - batch[-1].end
            joins = (
                fill.is_contiguous
                and batch[-1].is_contiguous
                and fill.path == batch[-1].path
                and 0 <= gap <= GAP
                and (wasted + gap) * OVER_READ <= total
                and fill.end - batch[0].begin <= CHUNK
                and len(batch) < VECTORS
            )
            if joins:
                wasted += gap
                batch.append(fill)
                continue
            yield tuple(batch)
        batch = [fill]
    if batch:
        yield tuple(batch)


def chunks(fill: Fill) -> Iterator[Fill]:
    """`fill` in parts of at most CHUNK bytes (at least one row of a strided one)."""
    if fill.is_contiguous:
        offset, length = fill.runs[0]
        for begin in range(0, length, CHUNK):
            size = min(CHUNK, length - begin)
            start = fill.start + begin
            yield replace(fill, offset=fill.offset + offset + begin, runs=((0, size),), start=start)
        return
    rows = max(1, CHUNK // fill.row_bytes)
    for row in range(0, fill.rows, rows):
        yield replace(
            fill,
            offset=fill.offset + row * fill.pitch,
            rows=min(rows, fill.rows - row),
            start=fill.start + row * fill.row_bytes,
        )
