"""Stage a of check_gpu.py: the CUDA side of `components`, by torch alone. Stage b is check_gpu_weights.py.

    python scripts/check_gpu_engines.py a cuda             all checks
    python scripts/check_gpu_engines.py a cpu packing      some of them, with tiny sizes

Needs torch (2.11 or newer), transformers, safetensors and numpy; neither Ray, vLLM nor DeepSpeed. Prints a line of JSON
for each row. Each check runs in a process of its own with a time limit, so that one that fails is a row.

Legend: `B` sequences, `N` all tokens of a batch end to end.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from check_gpu_memory import SHAPES, memory
from check_gpu_parts import (
    EXACT,
    ROUNDED,
    Attentions,
    Check,
    Row,
    Setting,
    apart,
    engine,
    gradients,
    grpo_loss,
    inferred,
    logprobs,
    main,
    peak_memory,
    policy_loss,
    questions,
    ragged,
    same_prompts,
    uneven,
)
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.causal import token_logprobs
from components.models.loading import load_policy, without_progress_bars
from components.models.packing.layout import ComputedTokens
from components.rl.aggregation import LossOutput, Totals
from components.weights.publisher import WeightPublisher
from plugins.kernels.choice import why_plain
from plugins.kernels.install import use_kernels
from plugins.utilisation.utilisation import peak_flops, training_flops

LOSSES = {"plain": policy_loss, "grpo": grpo_loss}
"""Losses of the speed check: PPO's clipped loss, and that of recipes/grpo, which also computes the entropy."""
OPTIMIZER_BYTES = 28
"""Bytes per parameter that AdamW reads and writes in float32: gradient, weight and both moments."""


def machine(setting: Setting) -> Iterator[Row]:
    """Report the machine, and create the models."""
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
    """Return the version of the GPU driver, or the reason why it is unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    return done.stdout.partition("\n")[0].strip() or f"unknown (nvidia-smi ended with {done.returncode})"


def training(setting: Setting, precision: str) -> Iterator[Row]:
    """Train with a policy loss. Compare the loss and gradient of the first step with plain autograd in float32."""
    plain = setting.model()
    batch = uneven(setting)
    # The old policy is the policy, as in the first optimizer step of a run.
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
    first = steps[0]["loss"], steps[0]["grad_norm"]
    gap = max(abs(a / b - 1) for a, b in zip(first, expected, strict=True))
    bar = EXACT if precision == "fp32" else ROUNDED
    name = f"FSDP2 training, {precision}"
    yield inferred(
        f"{name}: first step",
        f"loss {first[0]:.5f}, gradient {first[1]:.4f}; {gap:.1e} from autograd",
        f"relative < {bar}",
        gap < bar,
    )
    fell = steps[0]["loss"] - steps[-1]["loss"]
    yield inferred(f"{name}: 4 steps", f"the loss falls by {fell:.4f}", "> 0.01", fell > 0.01)


def packing(setting: Setting, precision: str) -> Iterator[Row]:
    """Compare packed sequences with separate ones: log-probabilities, gradients, and independence."""
    name = f"packing, {precision}"
    batch = uneven(setting).to(setting.device)
    packed, separate = setting.model(precision, packing=True), setting.model(precision)
    with Attentions() as attentions:
        yield from beside_separate(name, precision, packed, separate, batch)
    names = ", ".join(sorted(attentions.names))
    if setting.on_gpu and precision == "bf16":
        yield inferred(f"{name}: attention", names, "a variable-length kernel", "varlen" in names)
    else:
        yield Row(f"{name}: attention", names)
    shared = same_prompts(setting).to(setting.device)
    yield from beside_separate(f"{name}, shared prompts", precision, packed, separate, shared)
    first, last = batch.offsets[1:3].tolist()
    changed_N = batch["tokens"].clone()
    changed_N[first:last] = 1
    # If attention crossed the borders of sequences, the change would reach the others.
    with torch.no_grad():
        again_N = logprobs(packed, batch.with_tokens(tokens=changed_N))
        base_N = logprobs(packed, batch)
    is_other_N = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch["tokens"].device)
    is_other_N[first:last] = False
    leak = float((again_N - base_N)[is_other_N].abs().max())
    yield inferred(f"{name}: one sequence changed", f"the others move by {leak:.1e} nats", "0", leak == 0)


def beside_separate(name: str, precision: str, packed: nn.Module, separate: nn.Module, batch: Batch) -> Iterator[Row]:
    """Compare log-probabilities and gradients of packed sequences with those of separate ones."""
    packed.zero_grad()
    separate.zero_grad()
    ours_N = logprobs(packed, batch)
    ours_N.sum().backward()
    theirs = []
    for i in range(len(batch)):
        theirs.append(logprobs(separate, batch.select([i])))
        theirs[-1].sum().backward()
    yield apart(f"{name}: log-probabilities beside separate sequences", precision, ours_N, torch.cat(theirs))
    one, other = gradients(packed), gradients(separate)
    gap = float((one - other).norm() / other.norm())
    bar = EXACT if precision == "fp32" else ROUNDED
    yield inferred(f"{name}: gradient beside separate sequences", f"{gap:.1e}", f"relative < {bar}", gap < bar)


def rounding(setting: Setting) -> Iterator[Row]:
    """Compare log-probabilities in bfloat16 with float32, for the same weights."""
    batch = uneven(setting)
    exact_N = engine(setting).forward(batch, logprobs)
    for precision in ("bf16", "bf16_autocast"):
        rounded_N = engine(setting, precision=precision).forward(batch, logprobs)
        yield apart(f"{precision} beside fp32", precision, rounded_N, exact_N)


def agreement(setting: Setting, precision: str) -> Iterator[Row]:
    """Compare the log-probabilities of sampled tokens between the hf engine and the trainer."""
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
    """Measure tokens per second of the hf engine with the large model."""
    rows, length, new = setting.sized(256, 4), setting.sized(128, 8), setting.sized(128, 8)
    precision = "bf16" if setting.on_gpu else "fp32"
    rollout = HFRolloutEngine(setting.folder / "large", HFRolloutConfig(precision=precision))
    prompts = questions(setting, [length] * rows)
    # A warm-up: the first generation selects kernels and allocates memory.
    rollout.generate(prompts, SamplingConfig(max_new_tokens=4))
    began = time.perf_counter()
    drawn = rollout.generate(prompts, SamplingConfig(max_new_tokens=new))
    took = time.perf_counter() - began
    rate = int(drawn["action_mask"].sum()) / took
    yield Row(f"hf generation: {rows} prompts of {length}, {new} new tokens", f"{rate:,.0f} tokens/s{peak_memory()}")


def speed(setting: Setting, length: int, checkpointing: bool, loss: str = "plain") -> Iterator[Row]:
    """Measure the training of the large model in bf16 on packed sequences of one length.

    Args:
        setting: device and sizes.
        length: number of tokens of each sequence.
        checkpointing: recompute activations.
        loss: key of LOSSES.
    """
    if not setting.on_gpu:
        length //= 64
    tokens = setting.sized(16_384, 512)
    batch = ragged([length] * (tokens // length), setting.large.vocab_size)
    batch = batch.with_tokens(rollout_logprob=batch["old_logprob"])
    options = {"precision": "bf16", "packing": True, "max_tokens": tokens}
    trained = engine(setting, "large", checkpointing, **options)
    seconds = []
    for _ in range(setting.sized(5, 2)):
        began = time.perf_counter()
        trained.train_step(batch, LOSSES[loss])
        if setting.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    # The first step is excluded: it also selects kernels and allocates memory.
    rate = tokens / min(seconds[1:])
    computed = ComputedTokens(batch.num_tokens, int(batch.lengths.square().sum()))
    used = (training_flops(trained.model, computed) or math.nan) / min(seconds[1:])
    name = (
        f"training, {length} tokens per sequence, {tokens} per step, checkpointing {'on' if checkpointing else 'off'}"
    )
    if loss != "plain":
        name += f", {loss}'s loss"
    yield Row(
        name,
        f"{rate:,.0f} tokens/s, {utilisation(setting, used)}{peak_memory()}",
    )


def kernels(setting: Setting) -> Iterator[Row]:
    """Compare fused with plain kernels of the large model: log-probabilities, gradients, and seconds of a step."""
    why = why_plain("auto", "qwen2", setting.on_gpu)
    if why is not None:
        yield Row("fused kernels", why)
        return
    tokens = 16_384
    batch = ragged([2048] * (tokens // 2048), setting.large.vocab_size)
    batch = batch.with_tokens(rollout_logprob=batch["old_logprob"])
    results: dict[str, tuple[Tensor, Tensor, float, str]] = {}
    for name in ("plain", "fused"):
        torch.cuda.reset_peak_memory_stats()
        trained = engine(setting, "large", precision="bf16", packing=True, max_tokens=tokens, kernels=name)
        logprob_N = trained.forward(batch, logprobs)
        seconds, norm = [], 0.0
        for _ in range(5):
            began = time.perf_counter()
            norm = trained.train_step(batch, grpo_loss)["grad_norm"]
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        results[name] = (logprob_N, torch.tensor(norm), min(seconds[1:]), peak_memory())
        del trained
        torch.cuda.empty_cache()
    (plain_N, plain_norm, plain_s, plain_peak), (fused_N, fused_norm, fused_s, fused_peak) = results.values()
    yield apart("fused kernels: log-probabilities and those of plain ones, bf16", "bf16", fused_N, plain_N)
    change = float((fused_norm / plain_norm - 1).abs())
    yield inferred("fused kernels: gradient norm after 5 steps, bf16", f"{change:.1e} apart", "< 0.01", change < 0.01)
    yield Row(
        f"training step of {tokens} tokens, grpo's loss: fused and plain kernels",
        f"{fused_s * 1e3:.0f} ms{fused_peak}; {plain_s * 1e3:.0f} ms{plain_peak}",
    )


def kernel_gradients(setting: Setting, precision: str) -> Iterator[Row]:
    """Compare the gradients of the small model with fused and with plain kernels."""
    why = why_plain("auto", "qwen2", setting.on_gpu)
    if why is not None:
        yield Row(f"fused kernels: gradients, {precision}", why)
        return
    batch = same_prompts(setting).to(setting.device)
    dtype = "float32" if precision == "fp32" else "bfloat16"
    both = []
    for kernel in ("plain", "fused"):
        policy: Any = load_policy(setting.folder / "small", dtype=dtype, packing=True)
        policy.to(setting.device)
        if kernel == "fused":
            use_kernels(policy, kernel, torch.device(setting.device))
        output = token_logprobs(policy, batch, 0.7, with_entropy=True)
        assert output.entropy_N is not None
        (output.logprob_N - 0.1 * output.entropy_N).mean().backward()
        both.append(gradients(policy))
    apart_by = float((both[1] - both[0]).norm() / both[0].norm())
    most = 1e-4 if precision == "fp32" else 0.03
    name = f"fused kernels: gradients and those of plain ones, {precision}"
    yield inferred(name, f"{apart_by:.1e} of their norm", f"< {most}", apart_by < most)


def vocabulary(setting: Setting) -> Iterator[Row]:
    """Compare log-probabilities of a large vocabulary, computed in chunks, with those of the full logits."""
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
    """Check the sleep of a training engine and the step after it."""
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


def optimizer(setting: Setting, offload: bool) -> Iterator[Row]:
    """Measure the optimizer step of the large model: the norm of the gradients, clipping, and AdamW."""
    precision = "bf16" if setting.on_gpu else "fp32"
    trained = engine(setting, "large", precision=precision, adam_offload=offload, learning_rate=1e-6)
    seconds: list[float] = []
    for _ in range(setting.sized(7, 3)):
        for parameter in trained.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        if setting.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        # The private methods, because a training step also includes forward and backward passes.
        trained._read(torch.zeros(1, dtype=torch.float64, device=setting.device))
        trained._step(1e-6)
        if setting.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    # The first step allocates the optimizer states.
    took = statistics.median(seconds[1:])
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    yield Row(
        f"optimizer step, {count / 1e6:.1f} M parameters, adam_offload {'on' if offload else 'off'}",
        f"{took * 1e3:.2f} ms, {count * OPTIMIZER_BYTES / took / 1e9:,.0f} GB/s{peak_memory()}",
    )


def waits(setting: Setting) -> Iterator[Row]:
    """Check the calls in a training step that make the host wait for the GPU. Only the read of the metrics may."""
    trained: Any = engine(setting, precision="bf16", packing=True, max_tokens=setting.sized(1024, 128))
    trained.train_step(uneven(setting), policy_loss)
    step, passes = "training: calls in a step that wait for the GPU", "training: passes that refuse such calls"
    if not setting.on_gpu:
        yield from (Row(check, "no GPU") for check in (step, passes))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trained.train_step(uneven(setting), policy_loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)]
    yield inferred(step, ", ".join(places) or "none", "1 at most", len(places) <= 1)
    # From the first micro-batch on, torch raises an error at such a call, until the engine reads the metrics.
    read = trained._read

    def refusing(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
        torch.cuda.set_sync_debug_mode("error")
        return policy_loss(model, batch, totals)

    def read_metrics(values: Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        return read(values)

    trained._read = read_metrics
    error = ""
    try:
        trained.train_step(uneven(setting), refusing)
    except RuntimeError as refused:
        error = str(refused).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield inferred(passes, error or "none", "none", not error)


def utilisation(setting: Setting, flops: float) -> str:
    """Return operations per second, also as a share of the device's peak (MFU)."""
    peak = peak_flops(torch.cuda.get_device_name()) if setting.on_gpu else None
    share = "MFU unknown (peak unknown)" if peak is None else f"MFU {flops / peak:.1%}"
    return f"{flops / 1e12:.3g} TFLOP/s, {share}"


CHECKS: dict[str, list[Check]] = {
    "machine": [machine],
    "training": [partial(training, precision=precision) for precision in ("fp32", "bf16", "bf16_autocast")],
    "packing": [partial(packing, precision=precision) for precision in ("fp32", "bf16")],
    "rounding": [rounding],
    "agreement": [partial(agreement, precision=precision) for precision in ("fp32", "bf16")],
    "vocabulary": [vocabulary],
    "kernels": [kernels, *(partial(kernel_gradients, precision=precision) for precision in ("fp32", "bf16"))],
    "sleep": [partial(asleep, offload=offload) for offload in (False, True)],
    "generation": [generation],
    "memory": [partial(memory, shape=shape) for shape in SHAPES],
    "waits": [waits],
    "optimizer": [partial(optimizer, offload=offload) for offload in (False, True)],
    "speed": [
        *(partial(speed, length=length, checkpointing=on) for length in (2048, 8192) for on in (False, True)),
        *(partial(speed, length=2048, checkpointing=on, loss="grpo") for on in (False, True)),
    ],
}
"""Name -> checks, each run in a separate process. The first one creates the models."""


if __name__ == "__main__":
    main(CHECKS)
