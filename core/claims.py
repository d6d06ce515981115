"""Which temporary files and folders still have an owner: whoever makes one locks it, and a lock ends with its process.

So what a killed process left behind can be told from what another still works on. The locks are those of flock(2), on
the file or folder itself; systemd-tmpfiles leaves alone what is locked so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


class Claim:
    """What `make` makes, locked until `release` or the end of this process.

    Where somebody clears it away as a leftover before it is locked, it is made anew.
    """

    def __init__(self, make: Callable[[], Path]):
        while True:
            self.path = make()
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                self._held = True
                try:
                    _lock(self.descriptor)
                    if os.path.samestat(os.fstat(self.descriptor), self.path.stat()):
                        return
                except BaseException:
                    self.release()
                    raise
                self.release()
            time.sleep(0.001)  # whoever clears it away holds the lock no longer than that takes

    def release(self) -> None:
        """Give the lock back; harmless a second time."""
        if self._held:
            self._held = False
            os.close(self.descriptor)


def abandoned(paths: Iterable[Path]) -> Iterator[Path]:
    """Those of `paths` that nobody holds, each locked while the caller clears it away."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _lock(descriptor):
                yield path
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock it; False on a file system without locks. Raises `BlockingIOError` where another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
