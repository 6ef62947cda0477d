"""Stage a of check_gpu.py: the CUDA side of `components`, by torch alone. Stage b is check_gpu_weights.py.

    python scripts/check_gpu_engines.py a cuda             all checks
    python scripts/check_gpu_engines.py a cpu packing      some of them, with tiny sizes

Needs torch (2.11 or newer), transformers, safetensors and numpy; neither Ray, vLLM nor DeepSpeed. Prints a line of JSON
for each row. Each check runs in a process of its own with a time limit, so that one that fails is a row.

Legend: `B` sequences, `N` all tokens of a batch end to end.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
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
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.batch import Batch  # noqa: E402 (the project may not be installed)
from components.engines.causal import load_policy, token_logprobs, without_progress_bars  # noqa: E402
from components.engines.config import HFRolloutConfig, SamplingConfig, TrainConfig  # noqa: E402
from components.engines.fsdp_engine import FSDPEngine  # noqa: E402
from components.engines.hf_engine import HFRolloutEngine  # noqa: E402
from components.engines.memory import training as planned_training  # noqa: E402
from components.engines.model_size import model_size  # noqa: E402
from components.engines.opening import open_engine  # noqa: E402
from components.engines.train_engine import TrainEngine  # noqa: E402
from components.engines.utilisation import peak_flops, training_flops  # noqa: E402
from components.engines.weight_sync import WeightPublisher  # noqa: E402
from components.rl.aggregation import LossOutput, Totals, reduce_loss  # noqa: E402
from components.rl.policy_losses import ppo_loss  # noqa: E402

LIMIT_S = 180
OK, FAILED, MEASURED, NOT_RUN = "ok", "FAILED", "measured", "not run"
EXACT = 1e-4
"""Nats by which log-probabilities of the same weights and tokens may differ in float32."""
ROUNDED = 0.05
"""The same in bfloat16, on average over the tokens; and the relative difference of losses and gradients."""


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
    """The shape of a model. It has no end token: what is generated is as long as asked for."""
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


# Results are compared on this one, whose weights are large enough that its choices are far from uniform.
SMALL = qwen2(1000, 256, 512, layers=4, heads=4, spread=0.06)
# Both models where only the code is tried: a CPU multiplies bfloat16 slowly.
TINY = qwen2(200, 64, 128, layers=2, heads=4, spread=0.12)
# The shape of Qwen2.5-0.5B, whose speed is measured: 494 million parameters.
LARGE = qwen2(151_936, 896, 4864, layers=24, heads=14, spread=0.02)
# The shapes of larger ones, whose memory is measured: 1.5 and 7.6 thousand million parameters.
SHAPES = {
    "1.5B": qwen2(151_936, 1536, 8960, layers=28, heads=12, spread=0.02),
    "7B": qwen2(152_064, 3584, 18_944, layers=28, heads=28, spread=0.02, key_heads=4, tied=False),
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    measured: str
    asked: str = ""
    """What would do; empty where nothing is asked."""
    verdict: str = MEASURED


@dataclass(frozen=True)
class Setting:
    """Where the checks run, and on how much."""

    device: str
    folder: Path
    """Has the models; removed at the end."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def small(self) -> Qwen2Config:
        """The configuration of the model that results are compared on."""
        return SMALL if self.on_gpu else TINY

    @property
    def large(self) -> Qwen2Config:
        """Of the model whose speed is measured."""
        return LARGE if self.on_gpu else TINY

    def sized(self, on_gpu: int, on_cpu: int) -> int:
        """A size of a check, smaller where only the code is tried."""
        return on_gpu if self.on_gpu else on_cpu

    def model(self, precision: str = "fp32", packing: bool = False) -> nn.Module:
        """The small one in this precision, on the device."""
        dtype = "bfloat16" if precision == "bf16" else "float32"
        model: Any = load_policy(self.folder / "small", dtype=dtype, packing=packing)
        return model.to(self.device)


def inferred(check: str, measured: str, asked: str, fits: bool) -> Row:
    return Row(check, measured, asked, OK if fits else FAILED)


# --- what is computed -------------------------------------------------------------------------------------------------


def ragged(lengths: Sequence[int], vocabulary: int) -> Batch:
    """Random tokens, of which all but the first of a sequence are trained on, with advantages around 1."""
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
    """For the small model: 12 sequences of 2 to 480 tokens, on a CPU an eighth of that."""
    lengths = [2, 480, 37, 211, 3, 130, 64, 5, 300, 17, 90, 128]
    return ragged([max(2, length // setting.sized(1, 8)) for length in lengths], setting.small.vocab_size)


def questions(setting: Setting, lengths: Sequence[int]) -> Batch:
    """Prompts of tokens that both models have."""
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


def gradients(model: nn.Module) -> Tensor:
    """Of all parameters, end to end."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


class Attentions(TorchDispatchMode):
    """Notes which kernels compute attention inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attn" in str(func) or "attention" in str(func):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def apart(check: str, precision: str, one: Tensor, other: Tensor) -> Row:
    """How far log-probabilities differ: in fp32 none may by much, else they may not on average."""
    gap_N = (one.detach().float().cpu() - other.detach().float().cpu()).abs()
    largest, mean = float(gap_N.max()), float(gap_N.mean())
    measured = f"largest difference {largest:.1e}, mean {mean:.1e} nats"
    if precision == "fp32":
        return inferred(check, measured, f"largest < {EXACT}", largest < EXACT)
    return inferred(check, measured, f"mean < {ROUNDED}", mean < ROUNDED)


def engine(setting: Setting, model: str = "small", checkpointing: bool = False, **options: Any) -> TrainEngine:
    """An FSDP engine of one rank around one of the models."""
    config = TrainConfig(engine="fsdp", zero_stage=2, **options)
    policy: Any = load_policy(setting.folder / model, gradient_checkpointing=checkpointing, packing=config.packing)
    opened = open_engine(policy.to(setting.device), config)
    assert isinstance(opened, FSDPEngine)
    return opened


# --- the checks -------------------------------------------------------------------------------------------------------


def machine(setting: Setting) -> Iterator[Row]:
    """Say what this runs on, and make the models."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    name = f"no GPU, {os.cpu_count()} CPUs"
    if setting.on_gpu:
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = f"{torch.cuda.get_device_name(0)} ({gib:.0f} GiB), driver {driver()}, CUDA {torch.version.cuda}"
    yield Row("machine", f"{name}; {versions}")
    for model, config in (("small", setting.small), ("large", setting.large)):
        torch.manual_seed(1)
        with torch.device(setting.device):
            policy: Any = Qwen2ForCausalLM(config)
        with without_progress_bars():
            policy.to(torch.float32 if model == "small" else torch.bfloat16).save_pretrained(setting.folder / model)
        count = sum(parameter.numel() for parameter in policy.parameters())
        yield Row(f"the {model} model", f"{count / 1e6:.1f} M parameters")


def driver() -> str:
    """The version of the GPU's driver, or why it is not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    return done.stdout.partition("\n")[0].strip() or f"unknown (nvidia-smi ended with {done.returncode})"


def training(setting: Setting, precision: str) -> Iterator[Row]:
    """Steps of a policy loss: the first one's loss and gradient beside plain autograd in float32."""
    plain, batch = setting.model(), uneven(setting)
    with torch.no_grad():
        batch = batch.with_tokens(old_logprob=logprobs(plain, batch.to(setting.device)).cpu())
    totals = Totals(tokens=int(batch["action_mask"].sum()), sequences=len(batch))
    loss = policy_loss(plain, batch.to(setting.device), totals).loss
    loss.backward()
    expected = loss.item(), float(gradients(plain).norm())
    trained = engine(
        setting, precision=precision, learning_rate=1e-3, max_grad_norm=0.0, max_tokens=setting.sized(1024, 128)
    )
    steps = [trained.train_step(batch, policy_loss) for _ in range(4)]
    found = steps[0]["loss"], steps[0]["grad_norm"]
    gap = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    bar = EXACT if precision == "fp32" else ROUNDED
    name = f"FSDP2 training, {precision}"
    yield inferred(
        f"{name}: first step",
        f"loss {found[0]:.5f}, gradient {found[1]:.4f}; {gap:.1e} from autograd",
        f"relative < {bar}",
        gap < bar,
    )
    fell = steps[0]["loss"] - steps[-1]["loss"]
    yield inferred(f"{name}: 4 steps", f"the loss falls by {fell:.4f}", "> 0.01", fell > 0.01)


def packing(setting: Setting, precision: str) -> Iterator[Row]:
    """Sequences end to end beside one at a time: log-probabilities, gradients, and that none sees another."""
    batch = uneven(setting).to(setting.device)
    packed, separate = setting.model(precision, packing=True), setting.model(precision)
    with Attentions() as attentions:
        ours_N = logprobs(packed, batch)
    ours_N.sum().backward()
    theirs = []
    for i in range(len(batch)):
        theirs.append(logprobs(separate, batch.select([i])))
        theirs[-1].sum().backward()
    name = f"packing, {precision}"
    names = ", ".join(sorted(attentions.names))
    if setting.on_gpu and precision == "bf16":
        yield inferred(f"{name}: attention", names, "a variable-length kernel", "varlen" in names)
    else:
        yield Row(f"{name}: attention", names)
    yield apart(f"{name}: log-probabilities beside separate sequences", precision, ours_N, torch.cat(theirs))
    one, other = gradients(packed), gradients(separate)
    gap = float((one - other).norm() / other.norm())
    bar = EXACT if precision == "fp32" else ROUNDED
    yield inferred(f"{name}: gradient beside separate sequences", f"{gap:.1e}", f"relative < {bar}", gap < bar)
    first, last = batch.offsets[1:3].tolist()
    changed_N = batch["tokens"].clone()
    changed_N[first:last] = 1
    with torch.no_grad():
        again_N = logprobs(packed, batch.with_tokens(tokens=changed_N))
        base_N = logprobs(packed, batch)
    is_other_N = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch["tokens"].device)
    is_other_N[first:last] = False
    leak = float((again_N - base_N)[is_other_N].abs().max())
    yield inferred(f"{name}: one sequence changed", f"the others move by {leak:.1e} nats", "0", leak == 0)


def rounding(setting: Setting) -> Iterator[Row]:
    """Log-probabilities in bfloat16 beside float32, of the same weights."""
    batch = uneven(setting)
    exact_N = engine(setting).forward(batch, logprobs)
    for precision in ("bf16", "bf16_autocast"):
        rounded_N = engine(setting, precision=precision).forward(batch, logprobs)
        yield apart(f"{precision} beside fp32", precision, rounded_N, exact_N)


def agreement(setting: Setting, precision: str) -> Iterator[Row]:
    """What the hf engine says about the tokens that it drew beside what the trainer says about them."""
    trained = engine(setting, precision=precision, learning_rate=1e-3)
    rollout = HFRolloutEngine(setting.folder / "small", HFRolloutConfig(precision=precision))
    prompts = questions(setting, [3, 17, 9, 40] * 8)
    for when in ("", ", after a step and its weights"):
        if when:
            trained.train_step(uneven(setting), policy_loss)
            with tempfile.TemporaryDirectory(dir=setting.folder) as place:
                rollout.receive(WeightPublisher(place).publish(1, trained.gathered_parameters()))
        for temperature in (1.0, 0.7):
            sampling = SamplingConfig(temperature=temperature, max_new_tokens=setting.sized(24, 6))
            drawn = rollout.generate(prompts, sampling)
            said_N = trained.forward(drawn, partial(logprobs, temperature=temperature))
            mask_N = drawn["action_mask"]
            check = f"hf rollout beside FSDP2, {precision}, temperature {temperature}{when}"
            yield apart(check, precision, said_N[mask_N], drawn["rollout_logprob"][mask_N])


def generation(setting: Setting) -> Iterator[Row]:
    """Tokens per second of the hf engine with the large model."""
    rows, length, new = setting.sized(256, 4), setting.sized(128, 8), setting.sized(128, 8)
    precision = "bf16" if setting.on_gpu else "fp32"
    rollout = HFRolloutEngine(setting.folder / "large", HFRolloutConfig(precision=precision))
    prompts = questions(setting, [length] * rows)
    rollout.generate(prompts, SamplingConfig(max_new_tokens=4))
    began = time.perf_counter()
    drawn = rollout.generate(prompts, SamplingConfig(max_new_tokens=new))
    took = time.perf_counter() - began
    rate = int(drawn["action_mask"].sum()) / took
    yield Row(f"hf generation: {rows} prompts of {length}, {new} new tokens", f"{rate:,.0f} tokens/s{peak_memory()}")


def speed(setting: Setting, length: int, checkpointing: bool) -> Iterator[Row]:
    """Training the large model in bf16 on packed sequences of one length."""
    if not setting.on_gpu:
        length //= 64
    tokens = setting.sized(16_384, 512)
    batch = ragged([length] * (tokens // length), setting.large.vocab_size)
    options = {"precision": "bf16", "packing": True, "max_tokens": tokens}
    trained = engine(setting, "large", checkpointing, **options)
    seconds = []
    for _ in range(setting.sized(5, 2)):
        began = time.perf_counter()
        trained.train_step(batch, policy_loss)
        if setting.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    # The first step also chooses kernels and takes memory.
    rate = tokens / min(seconds[1:])
    used = (training_flops(trained.model, batch.lengths) or math.nan) / min(seconds[1:])
    yield Row(
        f"training, {length} tokens per sequence, {tokens} per step, checkpointing {'on' if checkpointing else 'off'}",
        f"{rate:,.0f} tokens/s, {utilisation(setting, used)}{peak_memory()}",
    )


def vocabulary(setting: Setting) -> Iterator[Row]:
    """Log-probabilities of a large vocabulary, which are computed in chunks, beside those of whole logits."""
    tokens, part = setting.sized(16_384, 64), setting.sized(1024, 16)
    policy: Any = load_policy(setting.folder / "large", dtype="float32")
    policy.to(setting.device)
    batch = ragged([part] * (tokens // part), setting.large.vocab_size).to(setting.device)
    with torch.no_grad():
        ours_N = logprobs(policy, batch)
        needed = peak_memory()
        first = batch.select([0])
        logits_NV = policy(input_ids=first["tokens"][None], use_cache=False).logits[0].float()
        theirs_N = logits_NV.log_softmax(-1)[:-1].gather(1, first["tokens"][1:, None]).squeeze(1)
    name = f"log-probabilities of {tokens} tokens, vocabulary of {setting.large.vocab_size}"
    yield Row(f"{name}: memory", f"whole logits {tokens * setting.large.vocab_size * 4 / 2**30:.2f} GiB{needed}")
    yield apart(f"{name}: the first {part} beside whole logits", "fp32", ours_N[1:part], theirs_N)


def asleep(setting: Setting, offload: bool) -> Iterator[Row]:
    """A training engine that gives its memory back, and the step after it; how long the optimizer takes."""
    batch, name = uneven(setting), f"training engine, adam_offload {'on' if offload else 'off'}"
    one, other = (engine(setting, adam_offload=offload, learning_rate=1e-3) for _ in range(2))
    for each in (one, other):
        each.train_step(batch, policy_loss)
    held = torch.cuda.memory_allocated() if setting.on_gpu else 0
    freed = one.sleep()
    left = held - torch.cuda.memory_allocated() if setting.on_gpu else 0
    yield inferred(f"{name}: asleep", f"{freed:,} bytes freed, {left:,} by torch's count", "the same", freed <= left)
    one.wake()
    losses = [each.train_step(batch, policy_loss)["loss"] for each in (one, other)]
    gap = abs(losses[0] - losses[1])
    yield inferred(f"{name}: the step after sleep", f"its loss differs by {gap:.1e}", "0", gap == 0)
    for parameter in one.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    began = time.perf_counter()
    one._step(1e-3)
    if setting.on_gpu:
        torch.cuda.synchronize()
    yield Row(f"{name}: optimizer step", f"{(time.perf_counter() - began) * 1e3:.2f} ms")


def memory(setting: Setting, shape: str) -> Iterator[Row]:
    """Two steps of training a large model on one sequence, and what the plan says that they take."""
    folder = setting.folder / shape
    save_random(folder, SHAPES[shape] if setting.on_gpu else TINY, setting.device)
    size = model_size(str(folder))
    context = used_memory()
    policy: Any = load_policy(folder, gradient_checkpointing=True, packing=True, empty=True)
    config = TrainConfig(engine="fsdp", zero_stage=3, precision="bf16", packing=True, gradient_checkpointing=True)
    trained = open_engine(policy, config)
    shutil.rmtree(folder)
    for tokens in (16_384, 32_768):
        batch = ragged([tokens if setting.on_gpu else 64], setting.large.vocab_size)
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            trained.train_step(batch, policy_loss)
        tensors, held = peak_bytes()
        taken = context + held
        planned = planned_training(size, config, 1, tokens=tokens, gpu=setting.on_gpu).total
        yield inferred(
            f"memory: {shape}, one sequence of {tokens} tokens",
            f"{taken / 1e9:.1f} GB, {tensors / 1e9:.1f} GB of them in tensors; planned {planned / 1e9:.1f} GB",
            "the plan within 10 %",
            not setting.on_gpu or abs(planned / taken - 1) < 0.1,
        )


def save_random(folder: Path, config: Qwen2Config, device: str) -> None:
    """Write a model of random weights in bfloat16."""
    with torch.device(device):
        policy: Any = Qwen2ForCausalLM(config).bfloat16()
    with without_progress_bars():
        policy.save_pretrained(folder)
    del policy
    if device == "cuda":
        torch.cuda.empty_cache()


def used_memory() -> int:
    """Bytes of the GPU that are taken beside torch's allocator; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, there = torch.cuda.mem_get_info()
    return there - free - torch.cuda.memory_reserved()


def peak_bytes() -> tuple[int, int]:
    """The most that tensors had at once, and that torch's allocator held for them."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def utilisation(setting: Setting, flops: float) -> str:
    """These operations per second as a share of what the device can do (MFU)."""
    peak = peak_flops(torch.cuda.get_device_name()) if setting.on_gpu else None
    share = "MFU unknown (peak unknown)" if peak is None else f"MFU {flops / peak:.1%}"
    return f"{flops / 1e12:.3g} TFLOP/s, {share}"


def peak_memory() -> str:
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if torch.cuda.is_available() else ""


# --- processes ------------------------------------------------------------------------------------------

Check = Callable[[Setting], Iterator[Row]]
CHECKS: dict[str, list[Check]] = {
    "machine": [machine],
    "training": [partial(training, precision=precision) for precision in ("fp32", "bf16", "bf16_autocast")],
    "packing": [partial(packing, precision=precision) for precision in ("fp32", "bf16")],
    "rounding": [rounding],
    "agreement": [partial(agreement, precision=precision) for precision in ("fp32", "bf16")],
    "vocabulary": [vocabulary],
    "sleep": [partial(asleep, offload=offload) for offload in (False, True)],
    "generation": [generation],
    "memory": [partial(memory, shape=shape) for shape in SHAPES],
    "speed": [partial(speed, length=length, checkpointing=on) for length in (2048, 8192) for on in (False, True)],
}
"""Each entry of a list has a process of its own. The first makes the models."""


def work(check: Check, setting: Setting, connection: Connection) -> None:
    """The process of a check: send its rows, then close."""
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
    """Run a check in a process of its own."""
    # A CUDA process cannot be forked; where there is no CUDA, a fork saves the imports.
    processes: Any = multiprocessing.get_context("spawn" if setting.on_gpu else "fork")
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(check, setting, theirs))
    began = time.monotonic()
    process.start()
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
        late = time.monotonic() - began >= LIMIT_S
        why = f"took more than {LIMIT_S} s" if late else f"its process ended with {process.exitcode}"
        rows.append(Row(name_of(check), why, verdict=FAILED))
    return rows


def main(checks: dict[str, list[Check]]) -> None:
    _, device, *only = sys.argv[1:]
    if device == "cpu":
        # The engines take a GPU where they see one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        setting = Setting(device, Path(folder))
        for name in [name for name in checks if name in ("machine", *only) or not only]:
            for row in (row for check in checks[name] for row in rows_of(check, setting)):
                print(f"row {json.dumps(asdict(row))}", flush=True)
                if name == "machine" and row.verdict == FAILED:
                    return


if __name__ == "__main__":
    main(CHECKS)
