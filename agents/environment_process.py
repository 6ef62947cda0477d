"""The process that makes the processes of environments, and these. It has loaded the agent's file, so that a fork is
all that an environment costs. Its owner asks for one at a time: a new process, with the end of a connection that this
serves, or the end of one.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from agents.environment_pool import EnvironmentWorker
from agents.loading import load_agent_file
from components.process.child_process import (
    described,
    die_with,
    end_fork,
    end_tree,
    exit_reason,
    frame,
    keep_orphans,
    receive,
    receive_from,
    run_child,
    send,
)


def _make_and_end(control: socket.socket, instance: Callable[[], Any]) -> None:
    """Make environments and end them, until the owner closes the connection."""
    pids: set[int] = set()
    try:
        while True:
            pid = receive(control)
            if pid is not None:
                pids.remove(pid)
                send(control, _end(pid))
                continue
            try:
                pid = _make(control, instance)
            except OSError as error:  # there is no room for another
                send(control, error)
                continue
            pids.add(pid)
            send(control, pid)
    finally:
        for pid in pids:
            _end(pid)


def _make(control: socket.socket, instance: Callable[[], Any]) -> int:
    server = os.getpid()
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    with socket.socket(fileno=descriptors[0]) as channel:
        pid = os.fork()
        if not pid:
            _run_environment(control, channel, instance, server)
    # By both sides, as either may be first.
    with suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _end_of_owner(control: socket.socket) -> None:
    """Have the server stop waiting. The owner's death is told twice, by a signal and by the connection's end: an
    exception raised for the one would cut short what the other has begun.
    """
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)


def _end(pid: int) -> str:
    end_tree(pid)
    return exit_reason(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run_environment(
    control: socket.socket, channel: socket.socket, instance: Callable[[], Any], server: int
) -> NoReturn:
    """Live an environment's whole life, in a process just forked."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with(server)
        keep_orphans()
        control.close()
        # Python's own generator is seeded anew by the fork; all environments would draw the same numbers of these.
        for name in ("numpy.random", "torch"):
            if name in sys.modules:
                sys.modules[name].seed()
        asyncio.run(_serve_calls(channel, instance))
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the server's may run on in here
        traceback.print_exc()
    finally:
        os._exit(code)


async def _serve_calls(channel: socket.socket, instance: Callable[[], Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    worker, this = EnvironmentWorker(instance), os.getpid()
    writer.write(frame("ready"))
    with suppress(EOFError, ConnectionError):
        while True:
            number, method, states = await receive_from(reader)
            reply: Any = await worker.call(method, states)
            try:
                body = frame((number, reply))
            except Exception as error:  # noqa: BLE001 - pickling runs the user's code, too
                line, trace = described(error)
                reply = ("raised", f"{method} returned what cannot cross to another process: {line}", trace)
                body = frame((number, reply))
            end_fork(this)
            writer.write(body)
            await writer.drain()
    # Now, while the owner still waits: it may have something to clean up.
    del worker


def _serve(control: socket.socket) -> None:
    number, setup = receive(control)
    try:
        sys.path[:] = list(dict.fromkeys([*setup["path"], *sys.path]))
        if setup["file"] is not None:
            load_agent_file(setup["file"])
        instance = pickle.loads(setup["instance"])
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
        send(control, (number, ("failed", *described(error))))
        return
    # Environments share its memory until they write to it; a collection would write everywhere.
    gc.freeze()
    # From here on it can end its environments, and what they have started, before it ends itself.
    signal.signal(signal.SIGTERM, lambda *_: _end_of_owner(control))
    die_with(int(os.getppid()), signal.SIGTERM)
    send(control, (number, ("ok",)))
    _make_and_end(control, instance)


if __name__ == "__main__":
    run_child(_serve)
