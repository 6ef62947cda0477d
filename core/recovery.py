"""What a process knows of workers that die and are replaced.

The master tells every process, through its control channel: a worker is lost; replay into this new process what you
had called on it; the worker is back. Each process remembers its own calls, so nothing is kept twice.
"""

import itertools
import threading

from core.exports import Export
from core.members import Directory, Member, Share, Transport

_Call = tuple[int, Export, Share]
"""When it was made, among all calls of the process, of which method, and with which arguments."""


class Recovery:
    """Shared by the threads of one process. Without a directory (nobody replaces anything) it only remembers."""

    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory
        self._changed = threading.Condition()
        self._lost: set[tuple[str, int]] = set()
        self._remembered: dict[tuple[str, int], dict[str, _Call]] = {}
        self._clock = itertools.count()

    # --- for calls

    def may_return(self, member: Member) -> bool:
        """Whether a worker that died comes back: instances of a `run` role do, within their budget."""
        entry = self._directory.get(member.role) if self._directory is not None else None
        return entry is not None and entry.kind == "run"

    def replacement(self, member: Member, timeout: float | None = None) -> Member | None:
        """Who stands in for a member: itself while it lives; None if nobody does after `timeout` seconds."""
        if self._directory is None:
            return member
        with self._changed:
            is_back = self._changed.wait_for(lambda: (member.role, member.rank) not in self._lost, timeout)
            return self._directory[member.role].members[member.rank] if is_back else None

    def remember(self, member: Member, export: Export, share: Share) -> _Call | None:
        """Keep a call for replays, in place of the method's last one, which is returned."""
        with self._changed:
            calls = self._remembered.setdefault((member.role, member.rank), {})
            before = calls.get(export.name)
            calls[export.name] = (next(self._clock), export, share)
            return before

    def take_back(self, member: Member, method: str, before: _Call | None) -> None:
        """Forget a call that failed: what is repeated is the one before it."""
        with self._changed:
            calls = self._remembered[member.role, member.rank]
            calls.pop(method, None)  # two threads may have waited for it
            if before is not None:
                calls[method] = before

    def met_death(self, member: Member) -> None:
        """A call found out that a member is gone, perhaps before the master did."""
        with self._changed:
            if self._directory is None or not self.may_return(member):
                return
            if self._directory[member.role].members[member.rank] == member:
                self._lost.add((member.role, member.rank))

    # --- for the control thread

    def lose(self, role: str, rank: int) -> None:
        """From now on, calls to this worker wait for its replacement."""
        with self._changed:
            self._lost.add((role, rank))

    def replay(self, member: Member, transport: Transport) -> None:
        """Repeat in a new process what was called on the lost one, in order; an error of a call is raised."""
        with self._changed:
            calls = dict(self._remembered.get((member.role, member.rank), {}))
        for _, export, share in sorted(calls.values(), key=lambda call: call[0]):
            reference = transport.send(member, export, share)
            transport.wait([reference], None)
            error = transport.outcome(reference).error
            if error is not None:
                raise error

    def replace(self, member: Member) -> None:
        """The worker is back as `member`."""
        with self._changed:
            # Before the process was told who is there, there is nothing to correct.
            if self._directory is not None and member.role in self._directory:
                self._directory[member.role].members[member.rank] = member
            self._lost.discard((member.role, member.rank))
            self._changed.notify_all()

    def meet(self, found: Directory, directory: Directory) -> None:
        """Put who was found into the directory, but for those whose replacements are there already."""
        with self._changed:
            for role, entry in found.items():
                for now in directory[role].members if role in directory else ():
                    if now.attempt > entry.members[now.rank].attempt:
                        entry.members[now.rank] = now
                directory[role] = entry
