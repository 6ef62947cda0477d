"""Stages f and g of check_gpu.py: two GPUs of one machine, and one GPU on each of two machines.

    python scripts/check_gpu_group.py f cuda              two processes of this machine
    python scripts/check_gpu_group.py f cpu               two processes with gloo and tiny sizes

Stage g runs on both machines at the same time, with the address of the first one. On the second machine RANK is 1:

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python scripts/check_gpu.py --stage g

The first machine prints the rows. Needs what check_gpu_engines.py needs. The runs of stage f also need the environment
of a run (`bash scripts/setup.sh vllm`); without a GPU they run only if they are named: `f cpu runs`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check_gpu_engines import CHECKS
from check_gpu_parts import (  # also makes the project importable
    EXACT,
    FAILED,
    LIMIT_S,
    Check,
    Row,
    Setting,
    gradients,
    inferred,
    logprobs,
    name_of,
    policy_loss,
    rows_of,
    uneven,
    work,
)

from components.generate.config import HFRolloutConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.device import compute_device
from components.models.loading import load_policy
from components.rl.aggregation import Totals
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.train.process_group import init_process_group
from components.weights.carrier import CarrierSetting, carrier_class

RANKS = 2
SIZES = {"1 KB": 256, "64 MB": 16 * 2**20}
"""Name of a message -> number of its float32 numbers."""
REPEATS = 5
ENDS_WITHIN_S = 8.0
"""Timeout of the collective that one rank does not enter."""
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUNS_PROGRAM = "check_gpu_runs.py"


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def groups(setting: Setting) -> Iterator[Row]:
    """Check the devices of the ranks, and collectives on them."""
    init_process_group(LIMIT_S)
    device = compute_device()
    places: list[Any] = [None] * RANKS
    # An object: it must not travel through a GPU.
    dist.all_gather_object(places, (socket.gethostname(), str(device)))
    backend = str(dist.get_backend_config()).replace(",", " ")
    is_apart = len(set(places)) == RANKS or not setting.on_gpu
    yield inferred("process group", f"{backend}; {places}", "a device with its index for each rank", is_apart)
    for name, count in SIZES.items():
        values = torch.full((count,), float(rank() + 1), device=device)
        dist.all_reduce(values)
        is_sum = bool((values == 3).all())
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            float(values[0])  # waits for the device
            seconds.append(time.perf_counter() - began)
        speed = f"{min(seconds) * 1e3:.2f} ms, {count * 4 / min(seconds) / 1e9:.2f} GB/s"
        yield inferred(f"all_reduce of {name}", speed, "the sum of both ranks", is_sum)


def absent(setting: Setting) -> Iterator[Row]:  # noqa: ARG001 - all checks have the same arguments
    """Check that a collective ends with an error if the other rank does not enter it."""
    init_process_group(ENDS_WITHIN_S)
    value = torch.ones(1, device=compute_device())
    dist.all_reduce(value)
    if rank():
        time.sleep(4 * ENDS_WITHIN_S)
        return
    began = time.monotonic()
    error = ""
    try:
        dist.all_reduce(value)
        float(value)
    except RuntimeError as failure:
        error = str(failure).partition("\n")[0][:80]
    took = time.monotonic() - began
    bar = f"an error within {2 * ENDS_WITHIN_S:g} s"
    yield inferred("a rank that is absent", f"{took:.1f} s: {error}", bar, bool(error) and took < 2 * ENDS_WITHIN_S)


def sharded(setting: Setting, axis: str) -> Iterator[Row]:
    """Train with two ranks, and compare the first step with autograd of the whole batch in one process.

    Args:
        setting: device and sizes.
        axis: `data`: FSDP over both ranks, which share the sequences. `tensor`: each rank has a part of each layer.
    """
    init_process_group(LIMIT_S)
    setting_of_rank = replace(setting, device=str(compute_device()))
    plain = setting_of_rank.model()
    batch = uneven(setting)
    with torch.no_grad():
        batch = batch.with_tokens(old_logprob=logprobs(plain, batch.to(setting_of_rank.device)).cpu())
    totals = Totals(tokens=int(batch["action_mask"].sum()), sequences=len(batch))
    loss = policy_loss(plain, batch.to(setting_of_rank.device), totals).loss
    loss.backward()
    expected = loss.item(), float(gradients(plain).norm())
    trained = opened(setting_of_rank, tensor=RANKS if axis == "tensor" else 1)
    # Both ranks get the whole batch: the engine selects the sequences of its rank.
    steps = [trained.train_step(batch, policy_loss) for _ in range(4)]
    first = steps[0]["loss"], steps[0]["grad_norm"]
    gap = max(abs(a / b - 1) for a, b in zip(first, expected, strict=True))
    name = {"data": "FSDP over 2 ranks", "tensor": "tensor parallel 2"}[axis]
    measured = f"loss {first[0]:.5f}, gradient {first[1]:.4f}; {gap:.1e} from one rank"
    yield inferred(f"{name}: first step", measured, f"relative < {EXACT}", gap < EXACT)
    fell = steps[0]["loss"] - steps[-1]["loss"]
    yield inferred(f"{name}: 4 steps", f"the loss falls by {fell:.4f}", "> 0.01", fell > 0.01)


def opened(setting: Setting, model: str = "small", tensor: int = 1) -> TrainEngine:
    """Return an FSDP engine of both ranks in float32."""
    config = TrainConfig(
        engine="fsdp", zero_stage=3, tensor=tensor, precision="fp32", learning_rate=1e-3, max_grad_norm=0.0
    )
    policy: Any = load_policy(setting.folder / model)
    return open_engine(policy.to(setting.device), config)


def weights(setting: Setting, way: str, allocator: str = "") -> Iterator[Row]:
    """Send the weights of an engine of two ranks to an engine beside each rank, and verify all digests.

    Args:
        setting: device and sizes.
        way: name of the carrier.
        allocator: setting of torch's memory allocator on GPUs.
    """
    if allocator and not setting.on_gpu:
        return
    if allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = allocator
    init_process_group(LIMIT_S)
    device = compute_device()
    trained = opened(replace(setting, device=str(device)))
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=receive, args=(setting, device.index or 0, theirs), daemon=True)
    process.start()
    theirs.close()
    memory = Path("/dev/shm") / f"check-gpu-{os.environ['MASTER_PORT']}"
    memory.mkdir(exist_ok=True)
    carrier = carrier_class(way)(
        CarrierSetting(
            rank=rank(), device=trained.device, shared_dir=memory, fallback_dir=setting.folder, readers=RANKS,
            serve=os.environ["MASTER_ADDR"] != "127.0.0.1",
        )
    )  # fmt: skip
    taken = [ours.recv()]
    took = 0.0
    for version in (1, 2, 3):
        handle: list[Any] = [carrier.announce(version)]
        dist.broadcast_object_list(handle)
        began = time.perf_counter()
        if handle[0] is not None:
            ours.send(replace(handle[0], reader=1 + rank()))
        parameters = trained.gathered_parameters(carrier.bucket_type)
        published: list[Any] = [carrier.publish(version, parameters, with_digests=version < 3, adapter_scale=0.0)]
        if handle[0] is None:
            dist.broadcast_object_list(published)
            ours.send(published[0])
        taken.append(ours.recv())
        took = time.perf_counter() - began
    process.join()
    all_taken: list[Any] = [None] * RANKS
    dist.all_gather_object(all_taken, all(taken))
    dist.barrier()
    carrier.close()
    shutil.rmtree(memory, ignore_errors=True)
    name = f"weights by {way} to 2 engines" + (f", {allocator}" if allocator else "")
    yield inferred(name, f"{took:.2f} s", "all digests are the publisher's", all(all_taken))


def receive(setting: Setting, index: int, connection: Connection) -> None:
    """Entry point of the process of an engine. It reports for each version if it was received."""
    for name in ENVIRONMENT:
        os.environ.pop(name)
    if setting.on_gpu:
        torch.cuda.set_device(index)
    rollout = HFRolloutEngine(setting.folder / "small", HFRolloutConfig(precision="fp32"))
    connection.send(True)
    for version in (1, 2, 3):
        rollout.receive(connection.recv(), verify=version < 3)
        connection.send(rollout.weight_version == version)


ON_ONE_MACHINE: dict[str, list[Check]] = {
    "groups": [groups],
    "absent": [absent],
    "sharded": [partial(sharded, axis="data"), partial(sharded, axis="tensor")],
    "weights": [
        *(partial(weights, way=way) for way in ("shared_memory", "ipc", "broadcast")),
        partial(weights, way="ipc", allocator="expandable_segments:True"),
    ],
}
ON_TWO_MACHINES: dict[str, list[Check]] = {
    "groups": [groups],
    "absent": [absent],
    "sharded": [partial(sharded, axis="data")],
    "weights": [partial(weights, way=way) for way in ("shared_memory", "broadcast")],
}


def group_rows(check: Check, setting: Setting, ranks: list[int], address: str, port: int) -> list[Row]:
    """Run a check in a process for each of the given ranks, and return the rows of rank 0 and the failures."""
    processes: Any = multiprocessing.get_context("spawn" if setting.on_gpu else "fork")
    began = time.monotonic()
    running: list[tuple[int, Any, Any]] = []
    for number in ranks:
        environment = {"RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(number - ranks[0])}
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=work_in_group, args=(environment, check, setting, theirs))
        process.start()
        theirs.close()
        running.append((number, process, ours))
    rows: list[Row] = []
    for number, process, ours in running:
        sent: list[Row] = []
        try:
            while ours.poll(max(0.0, began + LIMIT_S - time.monotonic())):
                sent.append(ours.recv())
        except EOFError:
            process.join(30)
        process.kill()
        process.join()
        rows += [row for row in sent if number == 0 or row.verdict == FAILED]
        if process.exitcode != 0:
            why = f"its process ended with {process.exitcode} after {time.monotonic() - began:.0f} s"
            rows.append(Row(f"{name_of(check)}, rank {number}", why, verdict=FAILED))
    return rows


def work_in_group(environment: dict[str, str], check: Check, setting: Setting, connection: Connection) -> None:
    """Entry point of a rank of a check."""
    os.environ.update(environment)
    work(check, setting, connection)
    connection.close()
    # Threads of a process group would keep the process alive in rare cases.
    os._exit(0)


def main() -> None:
    """Run the selected checks of a stage."""
    stage, device, *only = sys.argv[1:]
    only = [word for word in only if not word.startswith("--")]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif stage == "f" and torch.cuda.device_count() < RANKS:
        show(Row("two GPUs", f"this machine has {torch.cuda.device_count()}", verdict="not run"))
        return
    checks = {"f": ON_ONE_MACHINE, "g": ON_TWO_MACHINES}[stage]
    ranks, address, first_port = list(range(RANKS)), "127.0.0.1", 0
    if stage == "g":
        if absent_names := [name for name in ENVIRONMENT if name not in os.environ]:
            show(Row("two machines", f"{', '.join(absent_names)} not set; see --help", verdict="not run"))
            return
        ranks, address, first_port = [rank()], os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        setting = Setting(device, Path(folder))
        for check in CHECKS["machine"]:
            for row in rows_of(check, setting):
                show(row)
        selected = [check for name in checks if name in only or not only for check in checks[name]]
        for number, check in enumerate(selected):
            # A port for each check: the last one's may not be free yet.
            port = first_port + number if first_port else free_port()
            for row in group_rows(check, setting, ranks, address, port):
                show(row)
    if stage == "f" and ("runs" in only or (not only and device == "cuda")):
        subprocess.run([sys.executable, str(Path(__file__).with_name(RUNS_PROGRAM)), "f", device], check=False)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def show(row: Row) -> None:
    """Print a row for check_gpu.py."""
    print(f"row {json.dumps(asdict(row))}", flush=True)


if __name__ == "__main__":
    main()
