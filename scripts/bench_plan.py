"""The plan's memory beside what processes take on a CPU: engines, precisions, ranks.

    python scripts/bench_plan.py                  six configurations of a model of 75 M parameters
    python scripts/bench_plan.py --only 2 --phases

Each rank is a process of its own, as in a run: it loads the model, evaluates log-probabilities, trains two optimizer
steps and writes its state. Measured is the most that malloc has given out to rank 0 at any time, and what the process
has besides, of libraries its part. The estimate is that of `--dry_run`. Exits 1 where one is off by more than 10 %. The
last column is the process's peak in /proc: malloc keeps what is freed between what is not, and libraries count whole.
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
SEQUENCES, LENGTH = 8, 128
"""Of an optimizer step, over all ranks."""
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_tokens": 256}),
    (2, {"zero_stage": 2, "precision": "bf16", "max_tokens": 256}),
    (2, {"zero_stage": 3, "max_tokens": 128}),
    (2, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16", "max_tokens": 128, "gradient_checkpointing": True}),
    (2, {"engine": "fsdp", "zero_stage": 2, "precision": "bf16", "max_tokens": 256}),
    (1, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16_autocast", "max_tokens": 256}),
]
"""Ranks, and what is not at its default."""
BAR = 0.1


def config_of(options: dict[str, Any]) -> TrainConfig:
    """The engine's configuration; packed, as there is no padding in it."""
    return TrainConfig(**{"engine": "deepspeed", "packing": True, "learning_rate": 1e-4, **options})


def estimate(folder: Path, ranks: int, options: dict[str, Any]) -> int:
    """Bytes of rank 0, as the plan has them."""
    config = config_of(options)
    own = -(-SEQUENCES // ranks)
    tokens = micro_batch_tokens(config, LENGTH, own)
    size = model_size(str(folder))
    return training(size, config, ranks, tokens=tokens, several=steps_in_parts(config, LENGTH, own)).total


# --- one rank


def work(folder: str, options: dict[str, Any], scratch: str) -> None:
    """What a rank of a policy does in a run."""
    import torch

    from components.batch import Batch
    from components.models.causal import token_logprobs
    from components.models.loading import load_policy
    from components.rl.aggregation import LossOutput
    from components.train.opening import open_engine

    def loss(model: Any, micro: Batch, totals: Any) -> LossOutput:
        return LossOutput(-token_logprobs(model, micro).logprob_N.sum() / totals.tokens, {})

    allocator, peaks = Allocator(), dict[str, int]()
    phases = ["load"]

    def watch() -> None:
        while True:
            peaks[phases[-1]] = max(peaks.get(phases[-1], 0), allocator.in_use())
            time.sleep(0.001)

    def reached(phase: str) -> None:
        phases.append(phase)

    torch.set_num_threads(1)
    config = config_of(options)
    threading.Thread(target=watch, daemon=True).start()
    model = load_policy(folder, gradient_checkpointing=config.gradient_checkpointing, packing=True, empty=True)
    engine = open_engine(model, config)
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
    engine.save_state(Path(scratch, "state"))
    for _ in engine.gathered_parameters():
        pass
    phases.append("end")
    time.sleep(0.01)
    # What is not of malloc: libraries, of which a process that shares them has its part, and data of their own.
    other = proc_fields("smaps_rollup")["Pss_File"] + allocator.other
    found = {"other": other, "proc": proc_fields("status")["VmHWM"]}
    Path(scratch, f"peaks-{os.environ['RANK']}").write_text(json.dumps(found | {"peaks": peaks}))
    sys.stdout.flush()
    os._exit(0)


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Allocator:
    """What glibc's malloc has given out in this process, and what it holds."""

    class Info(ctypes.Structure):
        """glibc's `struct mallinfo2`."""

        _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = self.Info
        self.other = max(0, proc_fields("status")["RssAnon"] - self._mallinfo().arena)
        """Bytes of the process that are not malloc's."""

    def in_use(self) -> int:
        """Bytes that somebody has asked for and not given back. Of blocks of a GiB or more, which are DeepSpeed's
        buffers, what has been written to.
        """
        found = self._mallinfo()
        if not found.hblkhd:
            return found.uordblks
        written = proc_fields("status")["RssAnon"] - found.arena - self.other
        return found.uordblks + min(found.hblkhd, max(0, written))


def proc_fields(name: str) -> dict[str, int]:
    """Bytes by their names, of a file of /proc/self."""
    lines = Path("/proc/self", name).read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def measure(folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 has taken: `peaks` of what malloc has given out by phase, `other` memory, and `proc`'s peak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        for rank in range(ranks):
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, __file__, "--rank", json.dumps([str(folder), options, scratch])]
            processes.append(subprocess.Popen(command, env=os.environ | meeting | own))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a rank of {options} has failed; see above")
        return json.loads(Path(scratch, "peaks-0").read_text(encoding="utf-8"))


def make_model(folder: Path) -> None:
    """A model of random weights in bfloat16, as published ones are."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).bfloat16().save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="numbers of configurations")
    parser.add_argument("--phases", action="store_true", help="the peak of each phase too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        work(*json.loads(chosen.rank))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        make_model(folder)
        size = model_size(str(folder))
        assert size is not None
        print(f"{size.parameters / 1e6:.1f} M parameters, {SEQUENCES} sequences of {LENGTH} tokens in a step\n")
        print("| engine | stage | precision | ranks | tokens | estimate | measured | ratio | with malloc's holes |")
        print("|---|---|---|---|---|---|---|---|---|")
        worst = 0.0
        for number in chosen.only:
            ranks, options = CASES[number]
            config = config_of(options)
            planned, measured = estimate(folder, ranks, options), measure(folder, ranks, options)
            peak = measured["other"] + max(measured["peaks"].values())
            worst = max(worst, abs(planned / peak - 1))
            named = f"{config.engine} | {config.stage} | {config.precision} | {ranks} | {config.max_tokens}"
            amounts = f"{planned / 1e9:.2f} GB | {peak / 1e9:.2f} GB | {planned / peak:.2f}"
            print(f"| {named} | {amounts} | {measured['proc'] / 1e9:.2f} GB |", flush=True)
            if chosen.phases:
                shown = {phase: f"{most / 1e9:.2f}" for phase, most in measured["peaks"].items()}
                print(shown | {"other": f"{measured['other'] / 1e9:.2f}"}, flush=True)
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
