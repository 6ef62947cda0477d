"""The process that makes the processes of environments, and these. It has loaded the agent's file, so that a fork is
all that an environment costs. Its owner gives it, with each request, the end of a connection: a new environment's own,
or one for the response.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from agents.environment_pool import Asked
from agents.loading import load_agent_file
from components.data.child_process import (
    described,
    die_with,
    exit_reason,
    frame,
    receive,
    receive_from,
    run_child,
    send,
)


class _Server:
    """Makes environments and ends them, until the owner closes the connection."""

    def __init__(self, control: socket.socket, instance: type) -> None:
        self._control = control
        self._instance = instance
        self._pids: dict[int, int | str] = {}
        """By number; or why there is none."""

    def run(self) -> None:
        try:
            while True:
                what, number = receive(self._control)
                _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if not descriptors:
                    raise EOFError
                with socket.socket(fileno=descriptors[0]) as channel, suppress(ConnectionError):
                    if what == "make":
                        self._pids[number] = self._make(channel)
                    else:
                        send(channel, _end(self._pids.pop(number)))
        finally:
            for pid in self._pids.values():
                _end(pid)

    def _make(self, channel: socket.socket) -> int | str:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return f"it could not be made: {error}"
        if not pid:
            _run_environment(self._control, channel, self._instance, server)
        # By both sides, as either may be first.
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid


def _end_of(control: socket.socket) -> None:
    """Have the server stop waiting. The owner's death is told twice, by a signal and by the connection's end: an
    exception raised for the one would cut short what the other has begun.
    """
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)


def _end(pid: int | str) -> str:
    if isinstance(pid, str):
        return pid
    # It is not yet collected, so the number still means it, and what it has started.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return exit_reason(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run_environment(control: socket.socket, channel: socket.socket, instance: type, server: int) -> NoReturn:
    """Live an environment's whole life, in a process just forked."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with(server)
        control.close()
        # Python's own generator is seeded anew by the fork; all environments would draw the same numbers of these.
        for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
            if name in sys.modules:
                getattr(sys.modules[name], seed)()
        asyncio.run(_live(channel, instance))
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the server's may run on in here
        traceback.print_exc()
    finally:
        os._exit(code)


async def _live(channel: socket.socket, instance: type) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    asked = Asked(instance)
    writer.write(frame("ready"))
    with suppress(EOFError, ConnectionError):
        while True:
            method, states = await receive_from(reader)
            reply: Any = await asked.response(method, states)
            try:
                body = frame(reply)
            except Exception as error:  # noqa: BLE001 - pickling runs the user's code, too
                line, trace = described(error)
                body = frame(("raised", f"{method} returned what cannot cross to another process: {line}", trace))
            writer.write(body)
            await writer.drain()
    # Now, while the owner still waits: it may have something to clean up.
    del asked


def _serve(control: socket.socket) -> None:
    try:
        setup = receive(control)
        sys.path[:] = list(dict.fromkeys([*setup["path"], *sys.path]))
        if setup["file"] is not None:
            load_agent_file(setup["file"])
        instance = pickle.loads(setup["instance"])
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
        send(control, ("failed", *described(error)))
        return
    # Environments share its memory until they write to it; a collection would write everywhere.
    gc.freeze()
    # From here on it can end its environments, and what they have started, before it ends itself.
    signal.signal(signal.SIGTERM, lambda *_: _end_of(control))
    die_with(int(os.getppid()), signal.SIGTERM)
    send(control, ("ok",))
    _Server(control, instance).run()


if __name__ == "__main__":
    run_child(_serve)
