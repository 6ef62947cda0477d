"""The plan's memory beside what processes take on a CPU: engines, precisions, ranks.

    python scripts/bench_plan.py                  six configurations of a model of 100 M parameters
    python scripts/bench_plan.py --only 2 --phases

Each rank is a process of its own, as in a run: it loads the model, evaluates log-probabilities, trains two optimizer
steps and writes its state. The measured peak is the most anonymous and shared memory of a rank at any time, and its
part of the files that it maps (libraries). The estimate is that of `--dry_run`. Exits 1 where one is off by more than
10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.engines.config import TrainConfig  # noqa: E402 (may not be installed)
from components.engines.memory import micro_batch_tokens, steps_in_parts, training  # noqa: E402
from components.engines.model_size import model_size  # noqa: E402

SHAPE = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 10, "num_attention_heads": 12}
SHAPE |= {"num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
SEQUENCES, LENGTH = 16, 256
"""Of an optimizer step, over all ranks."""
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_tokens": 1024}),
    (2, {"zero_stage": 2, "precision": "bf16", "max_tokens": 1024}),
    (2, {"zero_stage": 3, "max_tokens": 512}),
    (2, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16", "max_tokens": 512, "gradient_checkpointing": True}),
    (2, {"engine": "fsdp", "zero_stage": 2, "precision": "bf16", "max_tokens": 1024}),
    (1, {"engine": "fsdp", "zero_stage": 3, "precision": "bf16_autocast", "max_tokens": 1024}),
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
    from components.engines.causal import load_policy, token_logprobs
    from components.engines.opening import open_engine
    from components.rl.aggregation import LossOutput

    def loss(model: Any, micro: Batch, totals: Any) -> LossOutput:
        return LossOutput(-token_logprobs(model, micro).logprob_N.sum() / totals.tokens, {})

    def reached(phase: str) -> None:
        Path(scratch, f"phase-{os.environ['RANK']}").write_text(phase)

    torch.set_num_threads(1)
    config = config_of(options)
    reached("load")
    model = load_policy(folder, gradient_checkpointing=config.gradient_checkpointing, packing=True)
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
    reached("end")
    time.sleep(1.0)
    os._exit(0)


# --- watching the ranks


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file stands behind."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)


def mapped_bytes(pid: int) -> int:
    """Of the files that a process maps, its part: what several processes map counts once among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_File:"))


def measure(folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, int]:
    """The most that a rank takes in each phase, with the files it maps."""
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
        peaks: dict[str, int] = {}
        mapped = 0
        while any(process.poll() is None for process in processes):
            for rank, process in enumerate(processes):
                note = Path(scratch, f"phase-{rank}")
                try:
                    phase = note.read_text() if note.is_file() else "import"
                    peaks[phase] = max(peaks.get(phase, 0), anonymous_bytes(process.pid))
                    mapped = mapped_bytes(process.pid) if phase == "end" else mapped
                except (OSError, KeyError):
                    continue  # it has just ended
            time.sleep(0.01)
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank of {options} has failed; see above")
    return {phase: peak + mapped for phase, peak in peaks.items()}


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
        print("| engine | stage | precision | ranks | tokens | estimate | measured | estimate / measured |")
        print("|---|---|---|---|---|---|---|---|")
        worst = 0.0
        for number in chosen.only:
            ranks, options = CASES[number]
            config = config_of(options)
            planned, measured = estimate(folder, ranks, options), measure(folder, ranks, options)
            peak = max(measured.values())
            worst = max(worst, abs(planned / peak - 1))
            named = f"{config.engine} | {config.stage} | {config.precision} | {ranks} | {config.max_tokens}"
            print(f"| {named} | {planned / 1e9:.2f} GB | {peak / 1e9:.2f} GB | {planned / peak:.2f} |", flush=True)
            if chosen.phases:
                print({phase: f"{most / 1e9:.2f}" for phase, most in measured.items()}, flush=True)
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
