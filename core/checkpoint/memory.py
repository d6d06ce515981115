"""Memory that weights are read into: final tensors on huge pages, and the staging ring of another device or dtype."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

HUGE_PAGE = 2 << 20
STAGING_SECONDS = 600


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor; a large one on the CPU asks for huge pages.

    Touching fresh memory in 4 kB pages takes longer than copying a warm file into it.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= 2 * HUGE_PAGE:
        _advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _advise_huge_pages(address: int, nbytes: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + nbytes) // HUGE_PAGE * HUGE_PAGE - begin
    if advice is not None and length > 0:
        # A kernel without huge pages refuses, which costs speed alone.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Buffer:
    """One staging buffer: `view` is written by a read, `send` converts it and copies it into a tensor."""

    def __init__(self, staging: Staging, nbytes: int) -> None:
        self._staging = staging
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=staging.stream is not None)
        self.view = byte_view(self._memory)
        self._sent: torch.cuda.Event | None = None
        self._on_device: torch.Tensor | None = None

    def wait(self) -> None:
        """Wait until the last `send` has left the buffer."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, destination: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy the buffer's first elements of `dtype` into the flat `destination`, converted on its device."""
        nbytes = destination.numel() * dtype.itemsize
        source = self._memory[:nbytes]
        if self._staging.stream is None:
            destination.copy_(source.view(dtype))
            return
        with torch.cuda.device(destination.device), torch.cuda.stream(self._staging.stream):
            if destination.dtype == dtype:
                destination.copy_(source.view(dtype), non_blocking=True)
            else:
                # A copy that changes device and dtype at once converts on the CPU; this converts on the device.
                if self._on_device is None:
                    self._on_device = torch.empty_like(self._memory, device=destination.device)
                arrived = self._on_device[:nbytes]
                arrived.copy_(source, non_blocking=True)
                destination.copy_(arrived.view(dtype))
            self._sent = torch.cuda.Event()
            self._sent.record(self._staging.stream)


class Staging:
    """A ring of buffers, one more than there are reading threads; pinned and on a stream of its own for CUDA."""

    def __init__(self, device: torch.device, nbytes: int, threads: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        if self.stream is not None:
            # The tensors were allocated on the current stream, perhaps from memory whose last use is still under way.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._nbytes = nbytes
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(threads + (self.stream is not None)):
            self._free.put(Buffer(self, nbytes))

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[Buffer]:
        """A free buffer of at least `nbytes`, given back on exit."""
        buffer = self._free.get(timeout=STAGING_SECONDS)
        try:
            buffer.wait()
            yield buffer if nbytes <= self._nbytes else Buffer(self, nbytes)
        finally:
            self._free.put(buffer)

    def finish(self) -> None:
        """Wait until every copy has reached the device."""
        if self.stream is not None:
            self.stream.synchronize()
