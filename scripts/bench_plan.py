"""Compare the memory estimate of the plan with the memory of processes on a CPU: engines, precisions, ranks.

    python scripts/bench_plan.py                  six configurations of a model of 75 M parameters
    python scripts/bench_plan.py --only 2 --phases

Each rank is a process, as in a run. It loads the model, evaluates log-probabilities, trains two optimizer steps and
writes its state. The measured value is the peak of bytes that malloc has allocated on rank 0, plus the other memory of
the process with its share of libraries. The estimate is that of `--dry_run`. Exit code 1: an estimate is off by more
than 10 %. The last column is the peak in /proc, which includes holes of malloc and all of the libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.models.size import model_size  # noqa: E402
from components.train.config import TrainConfig  # noqa: E402 (may not be installed)
from components.train.state import save_state  # noqa: E402
from plugins.plan.memory import micro_batch_tokens, steps_in_parts, training  # noqa: E402

SHAPE: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "vocab_size": 20000,
    "max_position_embeddings": 2048,
}
SEQUENCES = 8
"""Number of sequences per optimizer step, over all ranks."""
LENGTH = 128
"""Number of tokens per sequence."""
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_tokens": 256}),
    (2, {"zero_stage": 2, "precision": "bf16", "max_tokens": 256}),
    (2, {"zero_stage": 3, "max_tokens": 128}),
    (2, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16", "max_tokens": 128, "gradient_checkpointing": True}),
    (2, {"engine": "fsdp", "zero_stage": 2, "precision": "bf16", "max_tokens": 256}),
    (1, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16_autocast", "max_tokens": 256}),
]
"""(number of ranks, options that differ from the defaults)."""
BAR = 0.1


def config_of(options: dict[str, Any]) -> TrainConfig:
    """Return the configuration of the engine. It packs, because the estimate has no padding."""
    return TrainConfig(**{"engine": "deepspeed", "packing": True, "learning_rate": 1e-4, **options})


def estimate(folder: Path, ranks: int, options: dict[str, Any]) -> int:
    """Return the estimate of the plan for rank 0, in bytes."""
    config = config_of(options)
    sequences = -(-SEQUENCES // ranks)
    tokens = micro_batch_tokens(config, LENGTH, sequences)
    size = model_size(str(folder))
    return training(size, config, ranks, tokens=tokens, several=steps_in_parts(config, LENGTH, sequences)).total


# --- one rank


def work(folder: str, options: dict[str, Any], scratch: str) -> None:
    """Entry point of one rank: the phases of a policy in a run."""
    import torch

    from components.batch import Batch
    from components.models.causal import token_logprobs
    from components.models.loading import load_policy
    from components.rl.aggregation import LossOutput
    from components.train.opening import open_engine

    def loss(model: Any, micro: Batch, totals: Any) -> LossOutput:
        return LossOutput(-token_logprobs(model, micro).logprob_N.sum() / totals.tokens, {})

    allocator = Allocator()
    peaks: dict[str, int] = {}
    phases = ["load"]

    def watch() -> None:
        while True:
            peaks[phases[-1]] = max(peaks.get(phases[-1], 0), allocator.in_use())
            # A peak between two samples is missed, so they are much closer than the operations of a pass.
            time.sleep(0.001)

    def reached(phase: str) -> None:
        phases.append(phase)

    torch.set_num_threads(1)
    config = config_of(options)
    threading.Thread(target=watch, daemon=True).start()
    model = load_policy(folder, gradient_checkpointing=config.gradient_checkpointing, packing=True, empty=True)
    engine = open_engine(model, config)
    # A second reference would keep parameters alive that the engine has replaced by shards.
    del model
    torch.manual_seed(0)
    rows = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, LENGTH)).tolist()
    batch = Batch.from_rows({"tokens": rows})
    reached("forward")
    share = batch.balanced_shares(engine.world_size)[engine.rank]
    engine.forward(batch.select(share), lambda model, micro: token_logprobs(model, micro).logprob_N)
    reached("train")
    for _ in range(2):
        engine.train_step(batch, loss)
    reached("save")
    save_state(engine, Path(scratch, "state"))
    for _ in engine.gathered_parameters():
        pass
    phases.append("end")
    time.sleep(0.01)
    # Memory outside of malloc: the share of libraries (Pss), and anonymous memory of other allocators.
    other = proc_fields("smaps_rollup")["Pss_File"] + allocator.other
    record = {"other": other, "proc": proc_fields("status")["VmHWM"]}
    Path(scratch, f"peaks-{os.environ['RANK']}").write_text(json.dumps(record | {"peaks": peaks}))
    sys.stdout.flush()
    os._exit(0)


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Allocator:
    """Statistics of glibc's malloc in this process."""

    class Info(ctypes.Structure):
        """glibc's `struct mallinfo2`."""

        _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = self.Info
        self.other = max(0, proc_fields("status")["RssAnon"] - self._mallinfo().arena)
        """Anonymous memory of the process outside of malloc, in bytes."""

    def in_use(self) -> int:
        """Return the allocated bytes. Of mapped blocks (a GiB or more, as DeepSpeed has) only written pages count."""
        info = self._mallinfo()
        if not info.hblkhd:
            return info.uordblks
        written = proc_fields("status")["RssAnon"] - info.arena - self.other
        return info.uordblks + min(info.hblkhd, max(0, written))


def proc_fields(name: str) -> dict[str, int]:
    """Return name -> bytes of a file of /proc/self."""
    fields = Path("/proc/self", name).read_text(encoding="utf-8").splitlines()
    return {field.split(":")[0]: int(field.split()[1]) * 1024 for field in fields if field.endswith(" kB")}


def measure(folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks. Return the record of rank 0: `peaks` of malloc by phase, `other` memory, and the peak in /proc."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        for rank in range(ranks):
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, __file__, "--rank", json.dumps([str(folder), options, scratch])]
            processes.append(subprocess.Popen(command, env=os.environ | rendezvous | variables))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a rank of {options} has failed; see above")
        return json.loads(Path(scratch, "peaks-0").read_text(encoding="utf-8"))


def make_model(folder: Path) -> None:
    """Write a model of random bfloat16 weights, as published models are."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).bfloat16().save_pretrained(folder)


def main() -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="numbers of configurations")
    parser.add_argument("--phases", action="store_true", help="also print the peak of each phase")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(*json.loads(arguments.rank))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        make_model(folder)
        size = model_size(str(folder))
        assert size is not None
        print(f"{size.parameters / 1e6:.1f} M parameters, {SEQUENCES} sequences of {LENGTH} tokens in a step\n")
        print("| engine | stage | precision | ranks | tokens | estimate | measured | ratio | with malloc's holes |")
        print("|---|---|---|---|---|---|---|---|---|")
        worst = 0.0
        for number in arguments.only:
            ranks, options = CASES[number]
            config = config_of(options)
            planned = estimate(folder, ranks, options)
            measured = measure(folder, ranks, options)
            peak = measured["other"] + max(measured["peaks"].values())
            worst = max(worst, abs(planned / peak - 1))
            named = f"{config.engine} | {config.stage} | {config.precision} | {ranks} | {config.max_tokens}"
            amounts = f"{planned / 1e9:.2f} GB | {peak / 1e9:.2f} GB | {planned / peak:.2f}"
            print(f"| {named} | {amounts} | {measured['proc'] / 1e9:.2f} GB |", flush=True)
            if arguments.phases:
                shown = {phase: f"{most / 1e9:.2f}" for phase, most in measured["peaks"].items()}
                print(shown | {"other": f"{measured['other'] / 1e9:.2f}"}, flush=True)
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
