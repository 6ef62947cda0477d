"""Measure the speed of this machine: large products, memory, disk, network, and small models in the engines."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from components.net.hub import cache_root
from core.placement import detect_devices
from plugins.machine_speed.clock import fastest_seconds, is_alone
from plugins.machine_speed.engines import measure_engines
from plugins.machine_speed.layers import EngineSpeed
from plugins.machine_speed.speed import MachineSpeed, device_name

DTYPES = ("float32", "bfloat16")
"""Dtypes of the products of a training."""
SETS = (2**18, 2**21, 2**24, 2**28)
"""Working sets in bytes on a CPU, from the cache of a core to the memory."""
GPU_SETS = (2**30,)
_PRODUCT = {"cuda": 8192, "cpu": 768}
"""Rows and columns of the matrices of a large product."""
_MB = 2**20


def measure_speed(info: Callable[[str], None] = lambda _: None, engine_threads: int | None = None) -> MachineSpeed:
    """Measure the first GPU of this machine, or its processor.

    The machine should do nothing else meanwhile.

    Args:
        info: receives a line before each part.
        engine_threads: number of threads with which small models are measured in the engines on a CPU. The time of a
            run is predicted from them. Default: torch's number of threads, which follows OMP_NUM_THREADS. 0: none.
    """
    on_gpu = detect_devices() > 0
    threads = sorted({1, len(os.sched_getaffinity(0))})
    device = "cpu"
    sets = SETS
    if on_gpu:
        threads = [0]
        device = "cuda"
        sets = GPU_SETS
    before = torch.get_num_threads()
    products: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    engines: dict[str, EngineSpeed] = {}
    if engine_threads is None:
        engine_threads = before
    try:
        for count in threads:
            info(f"products and memory with {count or before} threads")
            torch.set_num_threads(count or before)
            products[str(count)] = {dtype: product_rate(device, dtype) for dtype in DTYPES}
            memory[str(count)] = {str(size): read_rate(device, size) for size in sets}
        if engine_threads and not on_gpu:
            info(f"small models in the engines with {engine_threads} threads")
            torch.set_num_threads(engine_threads)
            engines[str(engine_threads)] = measure_engines()
    finally:
        torch.set_num_threads(before)
    info("disk and network")
    return MachineSpeed(
        device=device_name(int(on_gpu)),
        source="measured",
        products=products,
        memory=memory,
        host_copy=copy_rate(),
        disk=write_rate(cache_root()),
        network=loopback_rate(),
        engines=engines,
    )


def product_rate(device: str, dtype: str) -> float:
    """Return the operations per second of a large square product."""
    size = _PRODUCT[device]
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / fastest_seconds(_waited(lambda: left @ right, device), of_thread=is_alone(device))


def read_rate(device: str, size: int) -> float:
    """Return the bytes per second of reading a working set of `size` bytes again and again."""
    values = torch.ones(size // 4, device=device)
    # A matrix times a vector, as in the decoding of a single row, reads each value once.
    matrix = values.view(-1, 256)
    vector = torch.ones(256, device=device)
    rounds = max(1, 4 * _MB // size)

    def read() -> None:
        for _ in range(rounds):
            torch.mv(matrix, vector)

    return rounds * size / fastest_seconds(_waited(read, device), of_thread=is_alone(device))


def copy_rate() -> float:
    """Return the bytes per second of a copy in host memory."""
    source = torch.ones(64 * _MB // 4)
    target = torch.empty_like(source)
    return source.nbytes / fastest_seconds(lambda: target.copy_(source))


def write_rate(folder: Path) -> float:
    """Return the bytes per second of a file that is written and flushed to the disk of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = os.urandom(16 * _MB)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            file.seek(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

        return len(content) / fastest_seconds(write)


def loopback_rate() -> float:
    """Return the bytes per second of a TCP connection within this machine."""
    content = bytes(64 * _MB)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:

            def send() -> None:
                thread = threading.Thread(target=sender.sendall, args=(content,))
                thread.start()
                left = len(content)
                while left:
                    left -= len(receiver.recv(min(left, _MB)))
                thread.join()

            return len(content) / fastest_seconds(send)


def _waited(act: Callable[[], object], device: str) -> Callable[[], object]:
    """Return a function that calls `act` and waits for its kernels on a GPU."""
    if device != "cuda":
        return act

    def wait() -> None:
        act()
        torch.cuda.synchronize()

    return wait
