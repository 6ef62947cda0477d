"""Exchange of the states of all ranks through the rendezvous store of their group, which is on rank 0.

It has a thread of its own, because an operation of the store does not return if the process of rank 0 is stopped.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from plugins.collective_watch.state import RankState

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0


class Exchange:
    """Publishes the state of this rank, and reads those of the others on request.

    Args:
        role: role of the ranks.
        rank: rank of this process.
        world: number of ranks.
        address: host and port of the store.
        every: interval in seconds.
    """

    def __init__(self, role: str, rank: int, world: int, address: tuple[str, int], every: float) -> None:
        self._role = role
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._address = address
        self._every = every
        self._next: RankState | None = None
        self.reads = False
        """True if the states of the other ranks are needed."""
        self.states: dict[int, RankState] = {}
        """Last state of each other rank."""
        self.changed: dict[int, float] = {}
        """Time of the last new state of each other rank (time.monotonic)."""
        self.progress = 0.0
        """Time of the last heartbeat or collective of another rank (time.monotonic)."""
        self.answered = time.monotonic()
        """Time of the last response of the store (time.monotonic)."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="troupe-collective-states", daemon=True).start()

    def publish(self, state: RankState) -> None:
        """Publish the state at the next exchange."""
        self._next = state

    def _run(self) -> None:
        store: Any = None
        while dist.is_initialized():
            try:
                store = store or self._connected()
                if self._next is not None:
                    store.set(self._key(self._rank), json.dumps(self._next.as_dict()))
                if self.reads:
                    self._read(store)
            except RuntimeError as error:
                # Rank 0 has ended, which the supervisor finds, or the group is destroyed.
                _log.info("the store of the collectives does not respond: %s", error)
                store = None
            time.sleep(self._every)

    def _connected(self) -> Any:
        """Return a connection of this thread. The main thread blocks that of the group while it waits."""
        store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        return store(*self._address, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)

    def _read(self, store: Any) -> None:
        # `multi_get` would wait for a rank that has published nothing.
        present = [rank for rank in self._others if store.check([self._key(rank)])]
        values = store.multi_get([self._key(rank) for rank in present]) if present else []
        now = self.answered = time.monotonic()
        for rank, value in zip(present, values, strict=True):
            state = RankState.from_dict(json.loads(value))
            before = self.states.get(rank)
            if before is None or before.tick != state.tick:
                self.changed[rank] = now
            if before is not None and (before.beats, before.counts) != (state.beats, state.counts):
                self.progress = now
            self.states[rank] = state

    def silent(self, after: float) -> dict[int, float]:
        """Return the seconds since the last state of each rank that has sent none for `after` seconds."""
        now = time.monotonic()
        if now - self.answered > after:
            # Without the store, nothing is known of the ranks other than the one that has it.
            return {0: now - self.changed.get(0, self.answered)}
        return {rank: now - since for rank, since in self.changed.items() if now - since > after}

    def _key(self, rank: int) -> str:
        return f"collective_watch/{self._role}/{rank}"
