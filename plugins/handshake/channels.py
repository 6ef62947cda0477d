"""The trainer's check of the channels between roles: calls, weights, and Ray's object store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from core import Role
from core.context import current
from plugins.handshake.ends import End, broken, end_here, fetch, serve
from plugins.handshake.settings import LARGE_BYTES, SMALL_BYTES, limit_of

Workers = Mapping[str, Any]
"""Handle of the process of each worker, by the name of the worker."""


def check(trainer: Any, config: Any) -> None:
    """Check the channels of a job before a model is loaded, and report the time that it took.

    Raises:
        BrokenChannel: two processes cannot use a channel.
    """
    limit = limit_of(config)
    if not limit:
        return
    entries = current().directory.values()
    workers = {member.name: member.handle for entry in entries for member in entry.members}
    # This process is busy with the check, so a call to itself would wait for ever.
    workers.pop(trainer.name, None)
    if not all(isinstance(handle, ActorHandle) for handle in workers.values()):
        return  # local mode has one process
    began = time.monotonic()
    here = _end_of_process(None, trainer.name)
    ends = check_calls(here, workers, limit)
    source = f"{Role.ACTOR}-0"
    if source in ends:
        readers = [name for name in ends if name.startswith(f"{Role.ROLLOUT}-")]
        check_weights(ends[source], [ends[name] for name in readers], workers, limit)
    check_store(here, list(ends.values()), workers, limit)
    machines = len({end.node for end in ends.values()})
    seconds = time.monotonic() - began
    trainer.info(f"handshake: {len(ends)} processes on {machines} machines reach each other ({seconds:.1f} s)")


def check_calls(here: End, workers: Workers, limit: float) -> dict[str, End]:
    """Call each process, and return the ends of the channels by the names of the workers."""
    # All at once: one after the other, a large job would take the limit for each silent process.
    calls = {name: _call(handle, _end_of_process, name) for name, handle in workers.items()}
    done = _ended(list(calls.values()), limit)
    for name, call in calls.items():
        if call not in done:
            raise broken(
                "calls by Ray", here, f"{name}, or gets no response from it", f"no response within {limit:g} s"
            )
    return dict(zip(calls, ray.get(list(calls.values())), strict=True))


def check_weights(source: End, readers: list[End], workers: Workers, limit: float) -> None:
    """Let each rollout engine read bytes from rank 0 of the policy, as the carriers of weights do between machines."""
    if not readers:
        return
    for reader in readers:
        size = SMALL_BYTES
        if reader.node != source.node:
            size = LARGE_BYTES
        address = ray.get(_call(workers[source.name], _serve, size, limit))
        call = _call(workers[reader.name], fetch_here, address, size, limit)
        error: Any = f"no response within {2 * limit:g} s"
        if _ended([call], 2 * limit):
            error = ray.get(call)
        if error:
            raise broken("weights", reader, f"{source} at {address[0]}:{address[1]}", error)


def check_store(here: End, ends: list[End], workers: Workers, limit: float) -> None:
    """Send an object of 64 MB to one process of each other machine, and back."""
    # One process of a machine is enough, because all of them share its object store.
    others = {end.node: end for end in ends if end.node != here.node}
    if not others:
        return
    ports = {node["NodeID"]: node.get("ObjectManagerPort", "?") for node in ray.nodes()}
    stored = ray.put(np.zeros(LARGE_BYTES, dtype=np.uint8))
    for end in others.values():
        # In a list, because Ray would fetch a plain reference before the call, without a limit.
        call = _call(workers[end.name], _returned, [stored], limit)
        destination = f"{end}, port {ports.get(end.node, '?')} of Ray's object manager"
        if not _ended([call], 2 * limit):
            raise broken("Ray's object store", here, destination, f"no response within {2 * limit:g} s")
        try:
            error = ray.get(call, timeout=limit)
        except GetTimeoutError:
            error = f"its object did not arrive here within {limit:g} s"
        if isinstance(error, str):
            raise broken("Ray's object store", here, destination, error)


def fetch_here(_process: Any, address: tuple[str, int], nbytes: int, limit: float) -> str:
    """Call `fetch` in a worker's process."""
    return fetch(address, nbytes, limit)


def _end_of_process(process: Any, name: str) -> End:
    """Return the process in which this runs as the end of a channel."""
    # The address that the process chose at its start, which depends on placement.interface.
    ip = getattr(process, "_ip", None) or ray.util.get_node_ip_address()
    return end_here(name, ip, ray.get_runtime_context().get_node_id())


def _serve(process: Any, nbytes: int, limit: float) -> tuple[str, int]:
    """Serve bytes at the address at which this process serves weights."""
    host = os.environ.get("MASTER_ADDR") or process._ip
    return serve(host, nbytes, 1, limit)


def _returned(_process: Any, stored: list[Any], limit: float) -> Any:
    """Fetch an object, and return it, or an error."""
    try:
        array: Any = ray.get(stored[0], timeout=limit)
        return array + 1
    except GetTimeoutError:
        return f"an object of this machine did not arrive there within {limit:g} s"


def _call(handle: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in the process of a worker, with the process as its first argument."""
    return handle.__ray_call__.remote(function, *arguments)


def _ended(references: list[Any], limit: float) -> list[Any]:
    """Return the references that are ready within the limit."""
    return ray.wait(references, num_returns=len(references), timeout=limit)[0]
