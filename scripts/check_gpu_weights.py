"""Stage b of check_gpu.py: transfer of weights from a trainer to an engine with each carrier.

    python scripts/check_gpu_weights.py b cuda
    python scripts/check_gpu_weights.py b cpu       with tiny sizes

Needs what check_gpu_engines.py needs, and works as it does.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from check_gpu_engines import CHECKS
from check_gpu_parts import Row, Setting, engine, inferred, main  # also makes the project importable

from components.generate.config import HFRolloutConfig
from components.generate.hf_engine import HFRolloutEngine
from components.train.engine import TrainEngine
from components.weights.carrier import CarrierSetting, carrier_class
from components.weights.publisher import WeightPublisher


def carriers(setting: Setting) -> Iterator[Row]:
    """Transfer the weights of the large model from a trainer to the hf engine with each carrier. Verify all digests."""
    trained = engine(setting, "large", precision="bf16" if setting.on_gpu else "fp32")
    rollout = HFRolloutEngine(setting.folder / "large", HFRolloutConfig(precision=trained.config.precision))
    memory = Path("/dev/shm") / f"check-gpu-{os.getpid()}"
    began = time.perf_counter()
    nbytes = sum(tensor.nbytes for _, tensor in trained.gathered_parameters())
    took = time.perf_counter() - began
    yield Row("weights, gathered on the host", f"{nbytes:,} bytes, {took:.2f} s, {nbytes / took / 1e9:.1f} GB/s")
    for number, carrier in enumerate(("shared memory", "disk", "TCP")):
        place = setting.folder if carrier == "disk" else memory
        publisher = WeightPublisher(place / "weights", serve=carrier == "TCP")
        times = []
        # The last of three is reported: the first version allocates memory that later ones reuse.
        for version in (10 * number + 1, 10 * number + 2, 10 * number + 3):
            began = time.perf_counter()
            handle = publisher.publish(version, trained.gathered_parameters(), with_digests=version % 10 == 1)
            published = time.perf_counter() - began
            received = handle
            if carrier == "TCP":  # a path that does not exist forces the transfer by TCP
                received = replace(handle, path="/on/another/machine")
            rollout.receive(received, verify=version % 10 == 1)
            if setting.on_gpu:
                torch.cuda.synchronize()
            times.append((published, time.perf_counter() - began))
        publisher.close()
        published, both = times[-1]
        yield inferred(
            f"weights by {carrier}",
            f"{handle.nbytes:,} bytes; publish {published:.2f} s, with receive {both:.2f} s",
            "all digests are the publisher's",
            rollout.weight_version == 10 * number + 3,
        )
    shutil.rmtree(memory, ignore_errors=True)
    yield from sent_past_the_host(setting, trained, "ipc")
    if setting.on_gpu and torch.cuda.device_count() < 2:
        yield Row("weights by broadcast", "not run: NCCL takes each GPU once, and there is one")
    else:
        yield from sent_past_the_host(setting, trained, "broadcast")


WAYS = {"ipc": ("CUDA IPC", "a bucket of the CPU that both map"), "broadcast": ("NCCL broadcast", "gloo broadcast")}
"""Carrier -> (name on GPUs, name on CPUs)."""


def sent_past_the_host(setting: Setting, trained: TrainEngine, way: str) -> Iterator[Row]:
    """Transfer the same weights to an engine in another process without the host.

    The engine is on the same GPU, or on the next one for a broadcast. Digests of the first two versions are verified.
    The third one is timed without.
    """
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    arguments = (setting, trained.config.precision, way, theirs)
    process = processes.Process(target=receive_sent, args=arguments, daemon=True)
    process.start()
    theirs.close()
    memory = Path("/dev/shm") / f"check-gpu-{os.getpid()}"
    memory.mkdir()
    carrier = carrier_class(way)(
        CarrierSetting(
            rank=0, device=trained.device, shared_dir=memory, fallback_dir=setting.folder, readers=1, serve=False
        )
    )
    # The engine reports that it is up. A transfer before that would wait for its timeout.
    taken = [ours.recv()]
    for version in (1, 2, 3):
        announced = carrier.announce(version)
        assert announced is not None
        ours.send(announced)
        began = time.perf_counter()
        parameters = trained.gathered_parameters(carrier.bucket_type)
        handle = carrier.publish(version, parameters, with_digests=version < 3, adapter_scale=0.0)
        took = time.perf_counter() - began
        taken.append(ours.recv())
    process.join()
    on_host = sum(path.stat().st_size for path in memory.rglob("weights.bin"))
    carrier.close()
    shutil.rmtree(memory)
    assert handle is not None
    yield inferred(
        f"weights by {WAYS[way][0 if setting.on_gpu else 1]}",
        f"{handle.nbytes:,} bytes; {took:.2f} s, {on_host:,} bytes through the host",
        "all digests are the publisher's",
        all(taken) and not on_host,
    )


def receive_sent(setting: Setting, precision: Any, way: str, connection: Connection) -> None:
    """Entry point of the process of that engine. It reports for each version if it was received."""
    if setting.on_gpu and way == "broadcast":
        torch.cuda.set_device(1)
    rollout = HFRolloutEngine(setting.folder / "large", HFRolloutConfig(precision=precision))
    connection.send(True)
    for version in (1, 2, 3):
        rollout.receive(replace(connection.recv(), reader=1), verify=version < 3)
        connection.send(rollout.weight_version == version)


if __name__ == "__main__":
    main({"machine": CHECKS["machine"], "carriers": [carriers]})
