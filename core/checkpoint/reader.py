"""Reads one rank's shards from a checkpoint by positioned reads of exactly the bytes it needs.

`ranges` says which bytes those are. On the CPU they are read straight into the final tensors; for another device or
dtype they pass through a small ring of staging buffers. Replicated tensors are read by one rank each and broadcast, so
the ranks together read the file once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from ..errors import CheckpointError
from ..tp.shard import ShardSpec
from ..tp.together import Together
from . import ranges
from .broadcast import broadcast_tensors, owners
from .files import Checkpoint
from .layout import Piece, Wanted
from .memory import PAGE, SHIFT, Staging, allocate, byte_view, copies_slowly
from .ranges import Fill, batches, check_wanted, chunks, fills_of

# Tensors and reads of fewer bytes take no time worth a look at where they lie.
LARGE = 1 << 20
ROWS_LOOKED_AT = 64
# Strided reads look random to the kernel, which then reads ahead too little: from a cold disk they take twice as long
# unless it is told how far to go.
AHEAD = 32 << 20
PROGRESS_SECONDS = 0.05
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ReadReport:
    """What reading cost this rank. Bytes are as counted from the read calls; seconds are wall time."""

    bytes_read: int
    bytes_kept: int
    bytes_broadcast: int
    calls: int
    threads: int
    seconds: float


def read_shards(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Wanted],
    *,
    rank: int,
    degree: int,
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], None] | None = None,
    threads: int | None = None,
) -> tuple[dict[str, torch.Tensor], ReadReport]:
    """Read what `rank` of `degree` holds of each wanted parameter, on `device`.

    With a `group` every rank of it calls this with the same `wanted`, and each replicated tensor is read by one of
    them and broadcast; without one every rank reads them all. `progress(done, total)` gets this rank's bytes, at most
    20 times a second; `cancelled()` is called between chunks and may raise. When one rank fails, the others raise
    too, instead of waiting for it.
    Raises `CheckpointError` for a file that is shorter than its header says or that changed since it was opened.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    threads = threads or default_threads(degree)
    alone = group is None or degree == 1
    owner = {} if alone else owners(wanted, checkpoint, degree)
    counts = _Counts()

    def read() -> dict[str, torch.Tensor]:
        for name, want in wanted.items():
            check_wanted(checkpoint, name, want, degree)
        fills = [
            fill
            for name, want in wanted.items()
            if owner.get(name, rank) == rank
            for fill in fills_of(checkpoint, name, want, rank)
        ]
        tensors = {}
        for name, want in wanted.items():
            dtype = want.dtype or checkpoint.entries[want.pieces[0].tensor].torch_dtype
            tensors[name] = allocate(want.spec.local_shape, dtype, device)
        _move_from_slow_places(checkpoint, fills, tensors)
        _read_all(checkpoint, fills, tensors, device, threads, counts, progress, cancelled)
        return tensors

    others = f"could not read its part of {checkpoint.path}; its own error says why. Nothing was loaded."
    # The caller may sample under inference_mode; weights are ordinary tensors, so that other threads may write them.
    with torch.inference_mode(False), torch.no_grad():
        tensors = Together(group, degree, rank).do(others, read)
        sent = 0 if alone else broadcast_tensors(tensors, owner, group, rank)
    kept = sum(tensor.nbytes for tensor in tensors.values())
    seconds = time.perf_counter() - begin
    return tensors, ReadReport(counts.read, kept, sent, counts.calls, threads, seconds)


def default_threads(degree: int) -> int:
    """Reader threads of one rank when `degree` ranks share this machine's cores: at most 4, at least 1."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // degree))


def read_whole(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor of the files as it is stored, on the CPU, in memory of its own: it outlasts the files, as those that
    map them do not. Errors as in `read_shards`."""
    wanted = {
        name: Wanted(ShardSpec.replicated(entry.shape, 1), (Piece(name),))
        for name, entry in checkpoint.entries.items()
    }
    return read_shards(checkpoint, wanted, rank=0, degree=1)[0]


def _move_from_slow_places(
    checkpoint: Checkpoint, fills: Sequence[Fill], tensors: dict[str, torch.Tensor]
) -> None:
    """Allocate anew the large tensors on the CPU that lie where the kernel would copy into them slowly."""
    direct: dict[str, list[Fill]] = {}
    for fill in fills:
        tensor = tensors[fill.parameter]
        stored = checkpoint.entries[fill.tensor].torch_dtype
        if tensor.device.type == "cpu" and tensor.dtype == stored and tensor.nbytes >= LARGE:
            direct.setdefault(fill.parameter, []).append(fill)
    for name, own in direct.items():
        tensor = tensors[name]
        slow = _slow_bytes(own, tensor.data_ptr())
        if slow:
            moved = allocate(tensor.shape, tensor.dtype, tensor.device, SHIFT)
            tensors[name] = min(tensor, moved, key=lambda place: _slow_bytes(own, place.data_ptr()))


def _slow_bytes(fills: Sequence[Fill], address: int) -> int:
    """Bytes of the fills, and of the first rows of strided ones, that go slowly into a tensor at `address`."""
    slow = 0
    for fill in fills:
        position = address + fill.start
        for row in range(min(fill.rows, ROWS_LOOKED_AT)):
            for offset, length in fill.runs:
                if copies_slowly(position, fill.offset + row * fill.pitch + offset):
                    slow += length
                position += length
    return slow


def _shift(part: Fill, address: int) -> int:
    """How far into a staging buffer at `address` to read the part."""
    part = replace(part, start=0)
    return (
        min(0, SHIFT, key=lambda shift: _slow_bytes([part], address + shift)) if part.nbytes >= LARGE else 0
    )


class _Counts:
    """Bytes and calls of all threads of one read."""

    def __init__(self) -> None:
        self.read = 0
        self.calls = 0
        self._lock = threading.Lock()

    def add(self, read: int, calls: int) -> None:
        with self._lock:
            self.read += read
            self.calls += calls


def _read_all(
    checkpoint: Checkpoint,
    fills: Sequence[Fill],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    threads: int,
    counts: _Counts,
    progress: Callable[[int, int], None] | None,
    cancelled: Callable[[], None] | None,
) -> None:
    total = sum(fill.nbytes for fill in fills)
    done = 0
    reported = 0.0
    descriptors = _open_files(checkpoint, {fill.path for fill in fills})

    def advance(batch_bytes: int) -> None:
        nonlocal done, reported
        done += batch_bytes
        now = time.perf_counter()
        if progress is not None and (now - reported >= PROGRESS_SECONDS or done == total):
            reported = now
            progress(done, total)
        if cancelled is not None:
            cancelled()

    try:
        reader = _Reader(checkpoint, fills, tensors, descriptors, device, threads, counts)
        if progress is not None:
            progress(0, total)
        if cancelled is not None:
            cancelled()
        try:
            if threads == 1:
                for batch in batches(fills):
                    advance(reader.read(batch))
            else:
                _in_threads(reader, batches(fills), threads, advance, cancelled)
        finally:
            # After an error too: a copy still under way must not land in memory that was given to someone else.
            reader.finish()
    finally:
        _close(descriptors)


def _in_threads(
    reader: _Reader,
    batches: Iterator[tuple[Fill, ...]],
    threads: int,
    advance: Callable[[int], None],
    cancelled: Callable[[], None] | None,
) -> None:
    """Keep `threads` reads going, two waiting; this thread alone reports progress and asks for a cancel."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="comfy-tp-read")
    running: set[Future[int]] = set()
    try:
        for batch in batches:
            running.add(pool.submit(reader.read, batch))
            while len(running) >= threads + 2:
                running = _collect(running, advance, cancelled)
        while running:
            running = _collect(running, advance, cancelled)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(
    running: set[Future[int]], advance: Callable[[int], None], cancelled: Callable[[], None] | None
) -> set[Future[int]]:
    finished, running = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
    if not finished and cancelled is not None:
        cancelled()
    for future in finished:
        advance(future.result(timeout=0))
    return running


def _open_files(checkpoint: Checkpoint, paths: set[str]) -> dict[str, int]:
    """Descriptors of the files, each as large and as old as when its header was read."""
    headers = {header.path: header for header in checkpoint.headers}
    descriptors: dict[str, int] = {}
    try:
        for path in sorted(paths):
            header = headers[path]
            descriptors[path] = os.open(header.real, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(descriptors[path])
            found = (status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)
            if found != (header.size, header.mtime_ns, header.device, header.inode):
                raise CheckpointError(
                    f"{path}: the file changed since its header was read ({header.size} bytes then, "
                    f"{status.st_size} now). Wait until it is written completely, then load again."
                )
    except OSError as error:
        _close(descriptors)
        raise CheckpointError(f"{error.filename}: cannot be opened ({error.strerror}).") from None
    except BaseException:
        _close(descriptors)
        raise
    return descriptors


def _close(descriptors: Mapping[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


class _Reader:
    """Reads batches into the final tensors, directly or through staging buffers. Safe to use from several threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        fills: Sequence[Fill],
        tensors: Mapping[str, torch.Tensor],
        descriptors: Mapping[str, int],
        device: torch.device,
        threads: int,
        counts: _Counts,
    ) -> None:
        self._entries = checkpoint.entries
        self._tensors = tensors
        self._descriptors = descriptors
        self._counts = counts
        self._direct = {
            name: byte_view(tensor) for name, tensor in tensors.items() if tensor.device.type == "cpu"
        }
        # Made in the calling thread, whose current stream the tensors were allocated on.
        staged = any(not self._goes_direct(fill) for fill in fills)
        self._staging = Staging(device, ranges.CHUNK + PAGE, threads) if staged else None
        self._scratch = memoryview(bytearray(ranges.GAP))
        self._announced = dict.fromkeys(descriptors.values(), 0)

    def read(self, batch: tuple[Fill, ...]) -> int:
        """Read one batch; returns its bytes."""
        if all(self._goes_direct(fill) for fill in batch):
            views = [self._direct[fill.parameter][fill.start : fill.start + fill.nbytes] for fill in batch]
            self._fill(batch, views)
        else:
            self._read_staged(batch)
        return sum(fill.nbytes for fill in batch)

    def finish(self) -> None:
        """Wait until everything that was read has reached the device."""
        if self._staging is not None:
            self._staging.finish()

    def _goes_direct(self, fill: Fill) -> bool:
        return (
            fill.parameter in self._direct
            and self._tensors[fill.parameter].dtype == self._entries[fill.tensor].torch_dtype
        )

    def _read_staged(self, batch: tuple[Fill, ...]) -> None:
        if self._staging is None:
            raise RuntimeError("a batch that was not announced needs staging")
        for fill in batch:
            for part in chunks(fill):
                with self._staging.buffer(part.nbytes + SHIFT) as buffer:
                    self._fill((part,), [buffer.view(part.nbytes, _shift(part, buffer.address))])
                    dtype = self._entries[part.tensor].torch_dtype
                    flat = self._tensors[part.parameter].reshape(-1)
                    begin = part.start // dtype.itemsize
                    buffer.send(flat[begin : begin + part.nbytes // dtype.itemsize], dtype)

    def _fill(self, batch: tuple[Fill, ...], views: list[memoryview]) -> None:
        first = batch[0]
        descriptor = self._descriptors[first.path]
        try:
            if first.is_contiguous:
                self._fill_joined(descriptor, batch, views)
            else:
                self._fill_strided(descriptor, first, views[0])
        except OSError as error:
            raise CheckpointError(
                f"{first.path}: tensor '{first.tensor}' cannot be read ({error.strerror}). Check the disk, or download "
                f"the file again."
            ) from None

    def _fill_joined(self, descriptor: int, batch: tuple[Fill, ...], views: list[memoryview]) -> None:
        vectors: list[memoryview] = []
        begin = position = batch[0].begin
        for fill, view in zip(batch, views, strict=True):
            if fill.begin > position:
                vectors.append(self._scratch[: fill.begin - position])
            vectors.append(view)
            position = fill.end
        wanted = position - begin
        read = calls = 0
        while read < wanted:
            count = os.preadv(descriptor, vectors, begin + read)
            calls += 1
            if count == 0:
                raise _short_read(next(fill for fill in batch if fill.end > begin + read))
            read += count
            if read < wanted:
                vectors = _after(vectors, count)
        self._counts.add(read, calls)

    def _fill_strided(self, descriptor: int, fill: Fill, view: memoryview) -> None:
        """One call per stretch: a vectored read can scatter in memory, but not skip in the file."""
        self._announce(descriptor, fill)
        preadv = os.preadv
        position = 0
        for base in range(fill.offset, fill.offset + fill.rows * fill.pitch, fill.pitch):
            for offset, length in fill.runs:
                end = position + length
                count = preadv(descriptor, (view[position:end],), base + offset)
                while count < length:
                    more = preadv(descriptor, (view[position + count : end],), base + offset + count)
                    if more == 0:
                        raise _short_read(fill)
                    count += more
                position = end
        self._counts.add(position, fill.rows * len(fill.runs))

    def _announce(self, descriptor: int, fill: Fill) -> None:
        """Have the kernel read from the fill's begin to AHEAD bytes beyond its end, as far as not yet announced."""
        begin = max(fill.begin, self._announced[descriptor])
        end = fill.end + AHEAD
        if begin < end:
            self._announced[descriptor] = end
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)


def _after(vectors: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `vectors` once `count` bytes of them are filled."""
    for index, vector in enumerate(vectors):
        if count < len(vector):
            return [vector[count:], *vectors[index + 1 :]]
        count -= len(vector)
    return []


def _short_read(fill: Fill) -> CheckpointError:
    return CheckpointError(
        f"{fill.path}: tensor '{fill.tensor}' ended before all its bytes were read; the file became shorter while it "
        f"was being read. Check the disk, and download the file again."
    )
