"""`ShardedModel`: one model that nodes refer to, whether its shards are on the ranks at the moment or not."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.calls.remote import ModelInfo, RemoteModel
from ..core.checkpoint.files import identities
from ..core.errors import ConfigError, RankError
from ..core.ranks.client import RankGroup
from . import groups
from .devices import Placement
from .source import Fingerprint, ModelSource
from .status_feed import StatusLine, executing_context, running_prompts

log = logging.getLogger("comfy_tp.nodes")

Poll = Callable[[], None]
Progress = Callable[[int, int, float], None]

IDLE_SECONDS = float(os.environ.get("COMFY_TP_IDLE_SECONDS", "60"))
KEEP, PARK, RELEASE = POLICIES = ("keep", "park", "release")


@dataclass(frozen=True)
class ModelKey:
    """What two loads must share to be one model on the ranks."""

    fingerprint: Fingerprint
    dtype: str
    devices: tuple[str, ...]
    backend: str | None
    address: str | None = None


class ShardedModel:
    """A model file and the ranks it belongs on. `load` puts its shards there, `unload` and `park` take them away.

    Users are ComfyUI's model objects: when the last one is gone the shards stay for `IDLE_SECONDS`, so that a
    prompt which drops its cache finds them again, and are then freed. While the prompt that used them last is still
    running they stay in any case: ComfyUI may drop a node's output in the middle of it, where memory is short.
    """

    def __init__(self, key: ModelKey, source: ModelSource, placement: Placement, dtype: str):
        self.key = key
        self.source = source
        self.placement = placement
        self.dtype = dtype
        self.remote: RemoteModel | None = None
        self.parked = False
        self.loads = 0
        self.line = StatusLine(placement.degree)
        self.comfy_model: Callable[[], Any] = lambda: None
        self._users = 0
        self._prompt: str | None = None  # the id of the one that used it last
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()  # held while the ranks are waited for
        self._count_lock = threading.RLock()  # never held while waiting: finalizers take it in any thread

    @property
    def loaded(self) -> bool:
        """Whether the shards are on the ranks, on their devices or parked in host memory."""
        return self.remote is not None and self.remote.alive

    @property
    def info(self) -> ModelInfo | None:
        """What the ranks reported of the last load."""
        return self.remote.info if self.remote is not None else None

    def load(self, *, on_progress: Progress | None = None, poll: Poll | None = None) -> RemoteModel:
        """The model on the ranks; loaded first, on a new group if need be. Reads nothing when it is there.

        Waits until the ranks have ended a command that was cancelled, so that a group that died in it is not used.
        """
        context = executing_context()
        self._prompt = context.prompt_id if context is not None else self._prompt
        with self._lock:
            remote = self.remote
            if remote is not None and remote.alive and remote.group.settled(poll=poll):
                self.parked = False
                return remote
            started = time.perf_counter()
            self.line.starting()
            group = self._group(poll)
            for note in group.notes:
                log.warning("%s", note)
            try:
                self.remote = self._load_on(group, on_progress, poll)
            except RankError:
                if group.alive or group.failure is not None:
                    raise
                # The last model on these ranks was forgotten in another thread meanwhile, and they were ended with it.
                self.remote = self._load_on(self._group(poll), on_progress, poll)
            self.parked = False
            self.loads += 1
            info = self.remote.info
            self.line.ready(info.resident_bytes)
            for note in info.notes:
                log.info("%s: %s", os.path.basename(self.source.path), note)
            log.info(
                "Loaded %s in %.1f s (%.2f GB/s) into %d shard%s; ready after %.1f s",
                os.path.basename(self.source.path),
                info.load_seconds,
                info.gb_per_second,
                info.degree,
                "s" if info.degree > 1 else "",
                time.perf_counter() - started,
            )
            return self.remote

    def _load_on(self, group: RankGroup, on_progress: Progress | None, poll: Poll | None) -> RemoteModel:
        here = self.placement.address is None  # elsewhere the same path leads to another disk
        return RemoteModel.load(
            group,
            self.source.path,
            files=identities(Path(self.source.path)) if here else None,
            kind=self.source.kind,
            dtype=self.dtype,
            on_progress=self._told(on_progress),
            poll=poll,
        )

    def _group(self, poll: Poll | None) -> RankGroup:
        """The ranks the model belongs on, started or connected to where they are not."""
        address = self.placement.address
        if address is None:
            return groups.group_for(self.placement.devices, self.placement.backend, poll=poll)
        group = groups.connected(address)
        if not group.settled(poll=poll):
            group = groups.connected(address)
        if group.degree != self.placement.degree:
            raise ConfigError(
                f"The group at {address} has {group.degree} ranks now, and had {self.placement.degree} when "
                f"{os.path.basename(self.source.path)} was loaded. Set degree to {group.degree} in the loader node."
            )
        return group

    def _told(self, on_progress: Progress | None) -> Progress:
        """`on_progress`, with the status line told first."""

        def show(done: int, total: int, gb_per_second: float) -> None:
            self.line.loading(done, total, gb_per_second)
            if on_progress is not None:
                on_progress(done, total, gb_per_second)

        return show

    def require(self) -> RemoteModel:
        """The model on the ranks, for a call in the middle of a run. Raises `RankError` when it is not there."""
        remote = self.remote
        if remote is not None and remote.alive:
            return remote
        if remote is not None and remote.group.failure is not None:
            raise remote.group.failure
        raise RankError("The model's shards were unloaded during the run. Queue the prompt again.")

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in the middle of a command on the ranks, which can free nothing until it has ended."""
        return self.remote is not None and self.remote.group.in_callback

    def unload(self) -> int:
        """Free the shards; returns the bytes freed over all ranks. Harmless when they are not there."""
        if self.in_callback:
            log.warning("%s stays on its ranks until their command has ended", self.source.path)
            return 0
        with self._lock:
            remote, self.remote = self.remote, None
            self.parked = False
            if remote is None:
                return 0
            self.line.gone()
            try:
                return remote.unload()
            except RankError as error:
                log.warning("Unloading: %s", str(error).splitlines()[0])
                return 0

    def park(self, *, poll: Poll | None = None) -> int:
        """Move the shards to host memory; returns the device bytes freed. On the CPU there is nothing to gain: 0."""
        with self._lock:
            if not self.loaded or self.parked or self.remote is None or self.placement.devices[0] == "cpu":
                return 0
            if self.in_callback:
                return 0
            if not self.remote.group.settled(poll=poll):
                return 0
            freed = self.remote.park(poll=poll)
            self.parked = True
            return freed

    def make_room(self, policy: str) -> None:
        """Leave the devices, as `policy` says: parked in host memory, or freed.

        Shards on other machines stay: they take no room on this one.
        """
        if self.placement.address is not None:
            return
        if policy == PARK:
            if self.parked:
                return
            if self.park() > 0:
                log.info("Parked the shards of %s in host memory", os.path.basename(self.source.path))
                return
        if self.loaded:
            log.info("Unloading the shards of %s", os.path.basename(self.source.path))
        self.unload()

    def bytes_on(self, device: str) -> int:
        """Bytes of the shards on `device` once loaded: reported by the ranks, or expected from the headers."""
        info = self.info
        if info is not None:
            sizes = zip(self.placement.devices, info.resident_bytes, strict=False)
            return sum(size for name, size in sizes if name == device)
        share = self.source.expected_bytes(self.dtype) / self.placement.degree
        return int(share * self.placement.devices.count(device))

    def resident_on(self, device: str) -> int:
        """Bytes of the shards that lie on `device` now."""
        return self.bytes_on(device) if self.loaded and not self.parked else 0

    @property
    def parked_bytes(self) -> int:
        """Bytes of the shards that lie in host memory now."""
        info = self.info
        return sum(info.resident_bytes) if self.loaded and self.parked and info is not None else 0

    @property
    def reserves(self) -> list[int]:
        """Bytes of its device that each rank holds for its next command."""
        remote = self.remote
        return remote.group.reserves if remote is not None else [0] * self.placement.degree

    def serve(self, comfy_model: Any) -> None:
        """Count `comfy_model` as a user until it is collected."""
        with _table_lock:
            _table[self.key] = self
        with self._count_lock:
            self._users += 1
            self.comfy_model = weakref.ref(comfy_model)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        finalizer = weakref.finalize(comfy_model, self._user_gone)
        finalizer.atexit = False

    def _user_gone(self) -> None:
        with self._count_lock:
            self._users -= 1
            if self._users == 0:
                self._wait()

    def _wait(self) -> None:
        self._timer = threading.Timer(IDLE_SECONDS, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        running = running_prompts()  # before our locks are held: it takes one of ComfyUI's
        with _table_lock, self._count_lock:
            if self._users > 0:
                return
            if self._prompt in running:
                self._wait()
                return
            if _table.get(self.key) is self:
                del _table[self.key]
        log.info("Nothing has used %s for %g s", os.path.basename(self.source.path), IDLE_SECONDS)
        self.line.shown_by_no_loader()
        forget(self)


_table: dict[ModelKey, ShardedModel] = {}
_table_lock = threading.RLock()


def sharded_model(source: ModelSource, placement: Placement, dtype: str) -> ShardedModel:
    """The model of these files on these ranks: the known one, or a new one that is not loaded yet.

    A new one is known as soon as a ComfyUI model uses it, so that a loader that fails leaves none behind.
    """
    key = ModelKey(source.fingerprint, dtype, placement.devices, placement.backend, placement.address)
    with _table_lock:
        return _table.get(key) or ShardedModel(key, source, placement, dtype)


def known_models() -> list[ShardedModel]:
    """Every model that nodes refer to or that waits out its idle time."""
    with _table_lock:
        return list(_table.values())


def forget(model: ShardedModel) -> int:
    """Free the shards of `model`, and end its ranks when no other model is on them. Returns the bytes freed."""
    group = model.remote.group if model.remote is not None else None
    freed = model.unload()
    if group is not None and not any(
        other.remote and other.remote.group is group for other in known_models()
    ):
        groups.close_group(group)
    return freed
