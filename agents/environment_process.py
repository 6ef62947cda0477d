"""Server process that forks the processes of environments, and the code of the forked processes.

The server has loaded the agent's file, so an environment costs only a fork. Its owner sends one request at a time: to
fork a process, together with the end of a connection that the process serves, or to end a process.
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
    """Fork and end environment processes until the owner closes the connection."""
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
            except OSError as error:  # the limit of processes or memory is reached
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
    # Set by parent and child, because either may run first.
    with suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _end_of_owner(control: socket.socket) -> None:
    """Stop the server's wait for requests, after the owner has died."""
    # The owner's death causes a signal and the end of the connection. An exception raised in the handler of the signal
    # could interrupt the clean-up that the end of the connection has started.
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)


def _end(pid: int) -> str:
    end_tree(pid)
    return exit_reason(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run_environment(
    control: socket.socket, channel: socket.socket, instance: Callable[[], Any], server: int
) -> NoReturn:
    """Run an environment in the forked process, until its connection is closed."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with(server)
        keep_orphans()
        control.close()
        # Python seeds its own generator after a fork. Without this all environments would draw the same numbers from
        # NumPy and torch.
        for name in ("numpy.random", "torch"):
            if name in sys.modules:
                sys.modules[name].seed()
        asyncio.run(_serve_calls(channel, instance))
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not continue with the server's code
        traceback.print_exc()
    finally:
        os._exit(code)


async def _serve_calls(channel: socket.socket, instance: Callable[[], Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    worker = EnvironmentWorker(instance)
    own_pid = os.getpid()
    writer.write(frame("ready"))
    with suppress(EOFError, ConnectionError):
        while True:
            number, method, states = await receive_from(reader)
            reply: Any = await worker.call(method, states)
            try:
                body = frame((number, reply))
            except Exception as error:  # noqa: BLE001 - pickling runs the user's code, too
                reason, trace = described(error)
                reply = ("raised", f"{method} returned an object that cannot be pickled: {reason}", trace)
                body = frame((number, reply))
            end_fork(own_pid)
            writer.write(body)
            await writer.drain()
    # Deleted here, while the owner still waits for the end, because the instance may have to clean up.
    del worker


def _serve(control: socket.socket) -> None:
    number, setup = receive(control)
    try:
        sys.path[:] = list(dict.fromkeys([*setup["path"], *sys.path]))
        if setup["file"] is not None:
            load_agent_file(setup["file"])
        instance = pickle.loads(setup["instance"])
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, including SystemExit
        send(control, (number, ("failed", *described(error))))
        return
    # The children share the server's memory pages until they write to them. A garbage collection would write to all.
    gc.freeze()
    # From here on SIGTERM lets the server end its environments, and all that they have started, before itself.
    signal.signal(signal.SIGTERM, lambda *_: _end_of_owner(control))
    die_with(int(os.getppid()), signal.SIGTERM)
    send(control, (number, ("ok",)))
    _make_and_end(control, instance)


if __name__ == "__main__":
    run_child(_serve)
