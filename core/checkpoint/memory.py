"""Memory that weights are read into: final tensors, and the staging ring of another device or dtype."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

STAGING_SECONDS = 600
PAGE = 4096
# The kernel copies out of the page cache by the processor's string move. On AMD's that runs at a third of its speed
# where the destination lies 1 to 31 bytes further in its page than the source: 2.3 instead of 7.9 GB/s, measured.
SLOW_DISTANCE = 32
# Moving the destination by this much helps, and leaves it aligned as torch aligns memory.
SHIFT = 64


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, shift: int = 0) -> torch.Tensor:
    """An uninitialised contiguous tensor, `shift` bytes into its memory.

    It does not ask for huge pages: they are faster to touch on a machine just started, but once its memory is
    fragmented the kernel compacts it for each of them, which made a load three times as long.
    """
    if shift:
        skipped = shift // dtype.itemsize
        tensor = torch.empty(prod(shape) + skipped, dtype=dtype, device=device)[skipped:].view(tuple(shape))
    else:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    return tensor


def copies_slowly(address: int, offset: int) -> bool:
    """Whether bytes of a file from `offset` on go slowly into memory at `address`."""
    return 0 < (address - offset) % PAGE < SLOW_DISTANCE


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Buffer:
    """One staging buffer: a read writes into `view`, `send` converts that and copies it into a tensor."""

    def __init__(self, staging: Staging, nbytes: int) -> None:
        self._staging = staging
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=staging.stream is not None)
        self.address = self._memory.data_ptr()
        self._begin = 0
        self._sent: torch.cuda.Event | None = None
        self._on_device: torch.Tensor | None = None

    def view(self, nbytes: int, shift: int = 0) -> memoryview:
        """The `nbytes` bytes from `shift` on, which are the ones to send."""
        self._begin = shift
        return byte_view(self._memory[shift : shift + nbytes])

    def wait(self) -> None:
        """Wait until the last `send` has left the buffer."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, destination: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy what was read, elements of `dtype`, into the flat `destination`, converted on its device."""
        nbytes = destination.numel() * dtype.itemsize
        source = self._memory[self._begin : self._begin + nbytes]
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
