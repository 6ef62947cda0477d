"""Measure the peak memory of a rank with a model of 400 M parameters, from loading to exporting it, on CPUs.

    for ranks in 2 4; do for kind in fsdp deepspeed frozen; do python scripts/bench_memory.py $kind $ranks; done; done
    python scripts/bench_memory.py fsdp 2 --layers 2        a small model, for a trial

Each rank trains two steps on a few tokens, saves its state and exports the model. The peak of each phase is read from
/proc. "bound" is the memory of a process after all imports and the rendezvous, plus 16 bytes per parameter of the rank
(weights, gradients and AdamW's moments in float32), plus two buckets of 256 MiB. The state is then loaded by half as
many ranks, and by a single rank; the digests must be equal. A sharded frozen model evaluates the same tokens and is
exported; its bound has 2 bytes per parameter. Exit code 1: a peak is more than 10% above the bound, or a digest
differs.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.batch import Batch  # noqa: E402 (may not be installed)
from components.models.causal import policy_logprobs, token_logprobs  # noqa: E402
from components.models.disk.export import save_model  # noqa: E402
from components.models.loading import load_policy  # noqa: E402
from components.rl.aggregation import LossOutput, Totals  # noqa: E402
from components.train.config import FrozenConfig, PassLimits, TrainConfig  # noqa: E402
from components.train.engine import TrainEngine  # noqa: E402
from components.train.frozen import open_frozen_policy  # noqa: E402
from components.train.opening import open_engine  # noqa: E402
from components.train.process_group import init_process_group  # noqa: E402
from components.train.state import EngineState, save_state  # noqa: E402
from components.weights.bucket_sizes import BUCKET_BYTES  # noqa: E402
from plugins.reference_updates.weights import save as save_frozen  # noqa: E402
from plugins.resume.engine_state import load_state  # noqa: E402

VOCABULARY = 32_000
HIDDEN = 1024
INTERMEDIATE = 4096
LAYERS = 22
BYTES_PER_PARAMETER = {"fsdp": 16, "deepspeed": 16, "frozen": 2}
TOKENS = 8
"""Number of tokens per rank and step, in one micro-batch. Small, because the bound excludes activations."""
BAR = 1.1
PHASES = ("load", "forward", "step", "save_state", "save_hf", "load_state")


def write_model(folder: Path, layers: int) -> int:
    """Write a model of random bfloat16 weights, as published models are. Return the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
    )
    # Without memory: the weights are created one by one while they are written.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = ((name, torch.randn(shape.shape).mul_(0.02).bfloat16()) for name, shape in shapes.items())
    save_model(folder, model, shapes, weights)
    return sum(shape.numel() for shape in shapes.values())


def memory(name: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS is the current memory, VmHWM the peak since `forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(next(field for field in text.splitlines() if field.startswith(name)).split()[1]) * 1024


def forget_peak() -> None:
    """Return freed memory to the system, and reset VmHWM."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def nll(model: Any, batch: Batch, totals: Totals) -> LossOutput:
    return LossOutput(-token_logprobs(model, batch).logprob_N.sum() / totals.tokens, {})


def engine_of(folder: Path, engine: str) -> TrainEngine:
    config = TrainConfig(engine=engine, zero_stage=3, precision="bf16", learning_rate=1e-3, max_tokens=TOKENS)
    return open_engine(load_policy(folder, empty=True, gradient_checkpointing=True), config)


def rank_main(folder: Path, kind: str, work: str) -> None:
    """Entry point of one rank. It prints the memory of each phase on stderr."""
    record = measured(folder, kind, work, lambda text: print(text, file=sys.stderr, flush=True))
    (folder / f"{work}-{dist.get_rank()}.json").write_text(json.dumps(record))
    os._exit(0)


def measured(folder: Path, kind: str, work: str, say: Callable[[str], object] = str) -> dict[str, Any]:
    """Run the phases of this rank and return its memory: train and save, load the state, or evaluate a frozen model."""
    torch.set_num_threads(1)
    init_process_group()
    # Imports before the measurement, so that their memory is not counted for the model.
    if kind == "deepspeed":
        importlib.import_module("deepspeed")
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    import transformers.utils.logging as library

    library.disable_progress_bar()
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    starts: dict[str, int] = {}
    peaks: dict[str, int] = {}
    record: dict[str, Any] = {"before": memory("VmRSS"), "starts": starts, "peaks": peaks}

    def phase(name: str, doing: Any) -> Any:
        forget_peak()
        starts[name] = memory("VmRSS")
        began = time.perf_counter()
        result = doing()
        peaks[name] = memory("VmHWM")
        seconds = time.perf_counter() - began
        say(f"rank {rank} of {ranks}: {name} {starts[name] / 1e9:.2f} -> {peaks[name] / 1e9:.2f} GB, {seconds:.0f} s")
        return result

    if kind == "frozen":
        config = FrozenConfig(precision="bf16", limits=PassLimits(max_tokens=TOKENS), layout="sharded")
        frozen = phase("load", lambda: open_frozen_policy(folder / "model", config))
        phase("forward", lambda: frozen.forward(sequences(1), policy_logprobs))
        phase("save_hf", lambda: save_frozen(frozen, folder / "hf", writes=rank == 0))
        return record | {"digest": ""}
    engine: TrainEngine = phase("load", lambda: engine_of(folder / "model", kind))
    if work == "train":
        phase("forward", lambda: engine.forward(sequences(1), policy_logprobs))
        # AdamW allocates its moments at the end of the first step, so the second one has the peak.
        phase("step", lambda: [engine.train_step(sequences(ranks), nll) for _ in range(2)])
        phase("save_state", lambda: save_state(engine, folder / "state"))
        phase("save_hf", lambda: engine.save_hf(folder / "hf"))
    else:
        phase("load_state", lambda: load_state(engine, folder / "state"))
    return record | {"digest": digest(engine)}


def sequences(count: int) -> Batch:
    return Batch(torch.full((count,), TOKENS), {"tokens": torch.arange(count * TOKENS) % VOCABULARY})


def digest(engine: TrainEngine) -> str:
    """Return a digest of the full AdamW state in the order of the model, on rank 0."""
    total = hashlib.sha256()
    state = EngineState(engine)
    for parameter in engine.parameters.values():
        for key in state.keys_of(parameter):
            for _, piece in state.pieces(parameter, key, 0):
                if engine.rank == 0:
                    total.update(numbers(piece))
    return total.hexdigest()


def numbers(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def run(folder: Path, kind: str, ranks: int, work: str) -> list[dict[str, Any]]:
    """Start the ranks and return the record of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, kind, str(ranks), "--work", work, "--folder", str(folder)]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    rendezvous |= {"WORLD_SIZE": str(ranks)}
    started = [subprocess.Popen(command, env=os.environ | rendezvous | {"RANK": str(r)}) for r in range(ranks)]
    ends = [process.wait() for process in started]
    if any(ends):
        raise SystemExit(f"a rank of {kind} on {ranks} failed")
    return [json.loads((folder / f"{work}-{rank}.json").read_text()) for rank in range(ranks)]


def rows(records: list[dict[str, Any]], kept: int) -> Iterator[tuple[str, float, float]]:
    """Yield (phase, largest peak of a rank, its bound) in GB. `kept` is the number of bytes for all parameters."""
    for name in PHASES:
        for record in records:
            record["bound"] = record["before"] + kept / len(records) + 2 * BUCKET_BYTES["cuda"]
        with_phase = [record for record in records if name in record["peaks"]]
        if with_phase:
            worst = max(with_phase, key=lambda record: record["peaks"][name] / record["bound"])
            yield name, worst["peaks"][name] / 1e9, worst["bound"] / 1e9


def main() -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(BYTES_PER_PARAMETER))
    parser.add_argument("ranks", type=int)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", choices=("train", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        rank_main(options.folder, options.kind, options.work)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parameters = write_model(folder / "model", options.layers)
        print(f"{options.kind}, {options.ranks} ranks, {parameters / 1e6:.0f} M parameters; GB of the largest rank")
        print("| phase | ranks | peak | bound | peak / bound |\n|---|---|---|---|---|")
        faults = 0
        digests = set()
        works = [("train", options.ranks)]
        if options.kind != "frozen":
            works += dict.fromkeys((("load", max(1, options.ranks // 2)), ("load", 1)))
        for work, ranks in works:
            records = run(folder, options.kind, ranks, work)
            digests.add(records[0]["digest"])
            for name, peak, bound in rows(records, BYTES_PER_PARAMETER[options.kind] * parameters):
                faults += peak > BAR * bound
                print(f"| {name} | {ranks} | {peak:.2f} | {bound:.2f} | {peak / bound:.2f} |", flush=True)
        print(f"the state has {len(digests)} different digests on all numbers of ranks; it must be 1")
    return int(bool(faults) or len(digests) > 1)


if __name__ == "__main__":
    sys.exit(main())
