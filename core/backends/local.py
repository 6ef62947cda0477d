"""Local mode: the whole job in this process, one workload at a time, for breakpoints and quick tests. No Ray."""

import asyncio
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from core.exports import Export
from core.host import Host, HostSpec, WarningsTo
from core.inline import Inline, InlineCall, copied, notice_breakpoints
from core.members import Member, Outcome
from core.plan import HostPlan, Placement


class LocalTransport:
    """Calls that run when somebody waits for them. What is passed is copied, as between processes."""

    is_inline = True

    def __init__(self) -> None:
        self.inline = Inline()

    def send(self, member: Member, export: Export, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InlineCall:
        """Take one call in: who carries it out gets copies, and so does its caller."""
        role, rank, host = member.role, member.rank, member.handle
        args, kwargs = copied((args, dict(kwargs)))
        return self.inline.send((role, rank), lambda: copied(host.call(role, rank, export.name, *args, **kwargs)))

    def put(self, value: Any) -> Any:
        """Nothing to store: everything is in this process."""
        return value

    def wait(self, references: Sequence[InlineCall], timeout: float | None, count: int = 1) -> list[InlineCall]:
        """Those that are done, once one is."""
        del count
        return self.inline.wait(references, timeout)

    async def ready(self, references: Sequence[InlineCall]) -> None:
        """Let other coroutines work first; who asks for the result carries the calls out."""
        del references
        await asyncio.sleep(0)

    def values(self, references: Sequence[InlineCall]) -> list[Any] | None:
        """None: there is no quicker way here."""
        del references

    def outcome(self, reference: InlineCall) -> Outcome:
        """What came of a call that is done."""
        assert reference.outcome is not None
        return reference.outcome


class LocalHost(Host):
    """A host beside others in one process: while it works, the process looks as if it were its own."""

    def __init__(
        self, spec: HostSpec, transport: LocalTransport, emit: Callable[[str, Any], None], env: Mapping[str, str]
    ) -> None:
        super().__init__(spec, spec.config, "127.0.0.1", transport, emit)
        self._own = _State()
        self._own.environment.update(env)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Give it its own environment variables, random numbers and default precision; and take them back."""
        others = _State()
        self._own.enter()
        try:
            yield
        finally:
            self._own = _State()
            others.enter()


class LocalBackend:
    """The stand-in for a cluster."""

    is_local = True

    def __init__(self, emit: Callable[[str, Any], None]) -> None:
        self._emit = emit
        self._before: _State | None = None
        self._warnings = WarningsTo(lambda text: emit("info", text))
        self.transport = LocalTransport()
        notice_breakpoints()

    def start(self, placement: Placement, placement_timeout: float, info: Callable[[str], None]) -> None:
        """Let the libraries use as many threads as the role with the most of them, where they have not counted yet."""
        del placement_timeout, info  # there is room at once
        self._before = _State()
        threads = max(host.threads for host in placement.hosts)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)
        logging.getLogger().addHandler(self._warnings)

    def pickled(self, value: Any) -> Any:
        """A copy, for a host of its own."""
        return copied(value)

    def create(self, spec: HostSpec, _plan: HostPlan, env: Mapping[str, str]) -> LocalHost:
        """Make one host."""
        return LocalHost(spec, self.transport, self._emit, env)

    def invoke(self, handle: LocalHost, method: str, *args: Any) -> InlineCall:
        """Call a method of the host itself; returns a reference."""
        key = (args[0], args[1]) if method == "run" else (method, id(handle))
        return self.transport.inline.send(key, lambda: getattr(handle, method)(*args))

    def kill(self, _handle: LocalHost) -> None:
        """Nothing to end: it goes when nobody knows it any more."""

    def release(self) -> None:
        """Forget the calls that nobody has waited for, and leave the process as it was."""
        self.transport.inline = Inline()
        if self._before is not None:
            self._before.enter()
        logging.getLogger().removeHandler(self._warnings)

    def stop(self) -> None:
        """Nothing was started."""

    def fault(self) -> str:
        """Nothing can die alone."""
        return ""

    def dead_nodes(self) -> set[str]:
        """There is one machine, and it lives."""
        return set()

    def room_missing(self) -> str:
        """There is always room."""
        return ""


class _State:
    """What libraries keep once per process, as it is now."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.python_random = random.getstate()
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self.numpy_random = numpy.random.get_state() if numpy else None
        self.torch_random = torch.get_rng_state() if torch else None
        self.torch_dtype = torch.get_default_dtype() if torch else None
        self.torch_threads = torch.get_num_threads() if torch else None

    def enter(self) -> None:
        """Make it so."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in self.environment.items() if os.environ.get(k) != v})
        random.setstate(self.python_random)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy and self.numpy_random is not None:
            numpy.random.set_state(self.numpy_random)
        if torch:
            # Somebody else has imported torch: in a process of its own it would begin as a new generator does.
            fresh = self.torch_random is None
            torch.set_rng_state(torch.Generator().get_state() if fresh else self.torch_random)
            torch.set_default_dtype(torch.float32 if fresh else self.torch_dtype)
            if self.torch_threads not in (None, torch.get_num_threads()):
                torch.set_num_threads(self.torch_threads)
