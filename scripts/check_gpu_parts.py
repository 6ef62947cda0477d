"""Shared parts of the checks of stages a and b of check_gpu.py: rows, models, batches, and a process per check.

Needs torch (2.11 or newer), transformers, safetensors and numpy; neither Ray, vLLM nor DeepSpeed. Each check runs in a
process of its own with a time limit, so that one that fails is a row.

Legend: `B` sequences, `N` all tokens of a batch end to end.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.batch import Batch  # noqa: E402 (the project may not be installed)
from components.models.causal import token_logprobs  # noqa: E402
from components.models.loading import load_policy  # noqa: E402
from components.rl.aggregation import LossOutput, Totals, reduce_loss  # noqa: E402
from components.rl.masked import token_mean  # noqa: E402
from components.rl.policy_losses import ppo_loss  # noqa: E402
from components.train.config import TrainConfig  # noqa: E402
from components.train.engine import TrainEngine  # noqa: E402
from components.train.opening import open_engine  # noqa: E402
from plugins.fsdp.engine import FSDPEngine  # noqa: E402

LIMIT_S = 180
"""Timeout of a check in seconds."""
OK, FAILED, MEASURED, NOT_RUN = "ok", "FAILED", "measured", "not run"
EXACT = 1e-4
"""Maximum difference of log-probabilities of the same weights and tokens in float32, in nats."""
ROUNDED = 0.05
"""Maximum mean difference in bfloat16, in nats; also the maximum relative difference of losses and gradients."""


def qwen2(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    spread: float,
    key_heads: int = 2,
    tied: bool = True,
) -> Qwen2Config:
    """Return the configuration of a model. It has no end token, so that all responses have the maximum length."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        initializer_range=spread,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )


# Model for comparing results. Its weights are large enough that its distributions are far from uniform.
SMALL = qwen2(1000, 256, 512, layers=4, heads=4, spread=0.06)
# Both models on a CPU, where bfloat16 is slow and only the code is tested.
TINY = qwen2(200, 64, 128, layers=2, heads=4, spread=0.12)
# The shape of Qwen2.5-0.5B (494 million parameters), for measuring speed.
LARGE = qwen2(151_936, 896, 4864, layers=24, heads=14, spread=0.02)


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    check: str
    measured: str
    required: str = ""
    """The requirement, or "" if the value is only measured."""
    verdict: str = MEASURED


@dataclass(frozen=True)
class Setting:
    """Device and sizes of the checks."""

    device: str
    folder: Path
    """Folder of the models, which is removed at the end."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def small(self) -> Qwen2Config:
        """Configuration of the model for comparing results."""
        return SMALL if self.on_gpu else TINY

    @property
    def large(self) -> Qwen2Config:
        """Configuration of the model for measuring speed."""
        return LARGE if self.on_gpu else TINY

    def sized(self, on_gpu: int, on_cpu: int) -> int:
        """Return the size of a check for the device."""
        return on_gpu if self.on_gpu else on_cpu

    def model(self, precision: str = "fp32", packing: bool = False) -> nn.Module:
        """Return the small model in a precision, on the device."""
        dtype = "bfloat16" if precision == "bf16" else "float32"
        model: Any = load_policy(self.folder / "small", dtype=dtype, packing=packing)
        return model.to(self.device)


def inferred(check: str, measured: str, required: str, fits: bool) -> Row:
    """Return a row with a verdict."""
    return Row(check, measured, required, OK if fits else FAILED)


# --- what is computed -------------------------------------------------------------------------------------------------


def ragged(lengths: Sequence[int], vocabulary: int) -> Batch:
    """Return sequences of random tokens with advantages around 1. All but the first token of each are trained on."""
    # The generator is on the CPU, so that all devices get the same batch.
    generator = torch.Generator().manual_seed(len(lengths))
    size = sum(lengths)
    first_B = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return Batch(
        torch.tensor(lengths),
        {
            "tokens": torch.randint(2, vocabulary, (size,), generator=generator),
            "action_mask": torch.ones(size, dtype=torch.bool).index_fill_(0, first_B, False),
            "old_logprob": torch.full((size,), -math.log(vocabulary)),
            "advantage": 1 + torch.randn(size, generator=generator),
        },
    )


def uneven(setting: Setting) -> Batch:
    """Return 12 sequences of 2 to 480 tokens for the small model, on a CPU an eighth of that."""
    lengths = [2, 480, 37, 211, 3, 130, 64, 5, 300, 17, 90, 128]
    return ragged([max(2, length // setting.sized(1, 8)) for length in lengths], setting.small.vocab_size)


def same_prompts(setting: Setting) -> Batch:
    """Return 3 prompts of 96 tokens with 4 responses each, of 1 to 160 tokens; on a CPU an eighth of that."""
    prompt = setting.sized(96, 12)
    responses = [setting.sized(length, max(1, length // 8)) for length in (1, 160, 40, 77)]
    batch = ragged([prompt + response for response in responses] * 3, setting.small.vocab_size)
    rows = batch.lists("tokens")
    rows = [[*rows[i - i % 4][:prompt], *row[prompt:]] for i, row in enumerate(rows)]
    return batch.with_tokens(tokens=torch.tensor([token for row in rows for token in row]))


def questions(setting: Setting, lengths: Sequence[int]) -> Batch:
    """Return prompts of tokens that both models have."""
    ids = {"prompt_id": torch.arange(len(lengths)), "sample_id": torch.zeros(len(lengths), dtype=torch.int64)}
    return ragged(lengths, setting.small.vocab_size).only("tokens").with_sequences(**ids)


def logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    return token_logprobs(model, batch, temperature).logprob_N


def policy_loss(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    mask_N = batch["action_mask"]
    loss = ppo_loss(
        logprobs(model, batch), batch["old_logprob"], batch["advantage"], mask_N, clip_low=0.2, clip_high=0.2
    )
    return reduce_loss(loss, mask_N, batch.lengths, totals)


def grpo_loss(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    """Compute the loss and metrics of recipes/grpo/algorithm.py with its defaults. The recipe itself needs Ray.

    As in the first optimizer step of a batch, the old policy is the policy.
    """
    mask_N = batch["action_mask"]
    output = token_logprobs(model, batch, 1.0, with_entropy=True)
    assert output.entropy_N is not None
    old_logprob_N = output.logprob_N.detach()
    loss = ppo_loss(output.logprob_N, old_logprob_N, batch["advantage"], mask_N, clip_low=0.2, clip_high=0.2)
    policy = reduce_loss(loss, mask_N, batch.lengths, totals)
    gap_N = (output.logprob_N.detach() - batch["rollout_logprob"]).abs()
    metrics = {
        "policy_loss": policy.loss.detach(),
        "entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens),
        "engine_gap": token_mean(gap_N, mask_N, totals.tokens),
    }
    return LossOutput(policy.loss, policy.metrics | metrics)


def gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters, end to end."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


class Attentions(TorchDispatchMode):
    """Context that records the names of the attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attn" in str(func) or "attention" in str(func):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def apart(check: str, precision: str, one: Tensor, other: Tensor) -> Row:
    """Return a row that compares log-probabilities: by the largest difference in fp32, otherwise by the mean."""
    gap_N = (one.detach().float().cpu() - other.detach().float().cpu()).abs()
    largest = float(gap_N.max())
    mean = float(gap_N.mean())
    measured = f"largest difference {largest:.1e}, mean {mean:.1e} nats"
    if precision == "fp32":
        return inferred(check, measured, f"largest < {EXACT}", largest < EXACT)
    return inferred(check, measured, f"mean < {ROUNDED}", mean < ROUNDED)


def engine(setting: Setting, model: str = "small", checkpointing: bool = False, **options: Any) -> TrainEngine:
    """Return an FSDP engine of one rank with one of the models."""
    config = TrainConfig(engine="fsdp", zero_stage=2, **options)
    policy: Any = load_policy(setting.folder / model, gradient_checkpointing=checkpointing, packing=config.packing)
    opened = open_engine(policy.to(setting.device), config)
    assert isinstance(opened, FSDPEngine)
    return opened


def peak_memory() -> str:
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if torch.cuda.is_available() else ""


# --- processes ------------------------------------------------------------------------------------------

Check = Callable[[Setting], Iterator[Row]]


def work(check: Check, setting: Setting, connection: Connection) -> None:
    """Entry point of the process of a check. It sends its rows through the connection."""
    signal.alarm(LIMIT_S)
    try:
        for row in check(setting):
            connection.send(row)
    except Exception as error:  # noqa: BLE001 (whatever it is, it belongs in the table)
        traceback.print_exc()
        verdict = NOT_RUN if isinstance(error, torch.OutOfMemoryError) else FAILED
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        connection.send(Row(name_of(check), what, verdict=verdict))


def name_of(check: Check) -> str:
    if not isinstance(check, partial):
        return check.__name__
    return " ".join([check.func.__name__, *(f"{name}={value}" for name, value in check.keywords.items())])


def rows_of(check: Check, setting: Setting) -> list[Row]:
    """Run a check in a separate process and return its rows."""
    # CUDA does not work in a forked process. Without CUDA a fork saves the time of the imports. A process per check
    # keeps an error that damages the CUDA context out of the other checks.
    processes: Any = multiprocessing.get_context("spawn" if setting.on_gpu else "fork")
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(check, setting, theirs))
    began = time.monotonic()
    process.start()
    # This process must not keep the other end open: it would never see the end of the rows.
    theirs.close()
    rows: list[Row] = []
    try:
        while ours.poll(max(0.0, began + LIMIT_S - time.monotonic())):
            rows.append(ours.recv())
    except EOFError:
        process.join(30)
    process.kill()
    process.join()
    if process.exitcode != 0:
        why = f"its process ended with {process.exitcode}"
        if time.monotonic() - began >= LIMIT_S:
            why = f"took more than {LIMIT_S} s"
        rows.append(Row(name_of(check), why, verdict=FAILED))
    return rows


def main(checks: dict[str, list[Check]]) -> None:
    _, device, *only = sys.argv[1:]
    if device == "cpu":
        # Engines would otherwise use a GPU that they see.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        setting = Setting(device, Path(folder))
        for name in [name for name in checks if name in ("machine", *only) or not only]:
            for row in (row for check in checks[name] for row in rows_of(check, setting)):
                print(f"row {json.dumps(asdict(row))}", flush=True)
                # Without the models no other check can run.
                if name == "machine" and row.verdict == FAILED:
                    return
