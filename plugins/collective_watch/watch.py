"""Thread of each rank that reports a collective that does not end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from components.process import heartbeat
from plugins.collective_watch.abort import abort_groups
from plugins.collective_watch.exchange import Exchange
from plugins.collective_watch.sentence import missing_ranks, wait_sentence
from plugins.collective_watch.state import DUMPS, Pending, RankState, dumped, read_state

_log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Maximum interval between two states of a rank, in seconds. A state has 300 bytes."""
SHOW_AFTER_S = 60.0
"""Maximum wait in a collective before a line is shown, in seconds."""
END_AFTER = 0.8
"""Share of `stall_timeout` after which a wait is reported as a hang. The rest is for the end of the rank."""
_SILENT_AFTER = 4
"""Number of intervals without a state after which a rank counts as silent."""


class Watch:
    """Watcher of the collectives of one rank.

    Args:
        role: role of the rank, for messages.
        address: host and port of the rendezvous store.
        limit: `stall_timeout` in seconds. 0 reports no hang.
        report: callback for a hang, with the sentence.
        folder: folder for the flight record of a rank that hangs, or None.
    """

    def __init__(
        self,
        role: str,
        address: tuple[str, int],
        limit: float,
        report: Callable[[str], None],
        folder: Path | None = None,
    ) -> None:
        self._role = role
        self._limit = limit
        self._report = report
        self._folder = folder
        self._every = EVERY_S
        self._show_after = SHOW_AFTER_S
        if limit:
            self._every = min(EVERY_S, limit / 10)
            self._show_after = min(SHOW_AFTER_S, limit / 4)
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._exchange = Exchange(role, self._rank, self._world, address, self._every)
        self._beats = 0
        self._tick = 0
        self._pending: Pending | None = None
        self._since = 0.0
        """Time since which the pending collective waits (time.monotonic)."""
        self._is_shown = self._is_reported = False

    def start(self) -> None:
        """Start the threads of the watch."""
        heartbeat.listen(self._count)
        self._exchange.start()
        threading.Thread(target=self._run, name="troupe-collectives", daemon=True).start()

    def _count(self) -> None:
        self._beats += 1

    def _run(self) -> None:
        while dist.is_initialized():
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a fault of the watch must not end the rank
                _log.info("the watch of collectives has failed once", exc_info=True)
            time.sleep(self._every)

    def look(self) -> None:
        """Publish the state of this rank, and report its pending collective if that takes too long."""
        self._tick += 1
        state = read_state(self._rank, self._tick, self._beats)
        self._exchange.publish(state)
        now = time.monotonic()
        if not _is_same(state.pending, self._pending):
            self._pending = state.pending
            self._since = now
            self._is_shown = self._is_reported = False
        self._exchange.reads = state.pending is not None and now - self._since > self._show_after / 4
        if state.pending is not None:
            self._judge(state, now - self._since, now - max(self._since, self._exchange.progress))

    def _judge(self, state: RankState, waited: float, idle: float) -> None:
        """Show or report a wait.

        Args:
            state: state of this rank, with a pending collective.
            waited: duration of the wait in seconds.
            idle: seconds without progress of any rank. A rank that writes a large checkpoint makes progress.
        """
        is_long = waited > self._show_after and not self._is_shown
        is_hang = self._limit > 0 and idle > END_AFTER * self._limit and not self._is_reported
        if not (is_long or is_hang):
            return
        sentence = self._sentence(state)
        if is_long:
            self._is_shown = True
            others = self._exchange.states.values()
            # One line is enough, from the first of the ranks that wait.
            if all(self._rank < other.rank for other in others if _is_same(other.pending, state.pending)):
                _log.warning("%s, for %.0f s so far", sentence, waited)
        if is_hang:
            self._is_reported = True
            self._save_record()
            # Before the abort, whose error would otherwise end the job instead of restarting it.
            self._report(f"{sentence}, for {idle:.0f} s without progress")
            abort_groups()

    def _sentence(self, state: RankState) -> str:
        assert state.pending is not None
        states = self._exchange.states
        silent = self._exchange.silent(_SILENT_AFTER * self._every)
        missing = missing_ranks(state, ranks_of(state.pending.group, self._world), states)
        # Of ranks that are alive, an old state may be all that is known if rank 0, which has the store, is silent.
        certain = [rank for rank in missing if rank in silent]
        return wait_sentence(self._role, state, certain or missing, states, silent)

    def _save_record(self) -> None:
        """Save the flight record of this rank in torch's format, which `torchfrtrace` reads."""
        if self._folder is None:
            return
        for name in DUMPS:
            if record := dumped(name):
                (self._folder / f"collectives{name}_{self._role}_{self._rank}").write_bytes(record)


def _is_same(one: Pending | None, other: Pending | None) -> bool:
    """True if both are the same collective. The name depends on the stack, so it is not compared."""
    return one is not None and other is not None and (one.group, one.number) == (other.group, other.number)


def ranks_of(group: str, world: int) -> list[int]:
    """Return the ranks of a process group, given its name."""
    c10d: Any = dist.distributed_c10d
    for process_group, name in c10d._world.pg_names.items():
        if name == group:
            return dist.get_process_group_ranks(process_group)
    return list(range(world))
