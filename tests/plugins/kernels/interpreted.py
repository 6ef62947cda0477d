"""Fused kernels in Triton's interpreter: the work of the processes of the tests in this folder, as JSON on stdout.

`python interpreted.py WORK [argument ...]` prints the result of a function. It needs TRITON_INTERPRET=1.

Legend: `M` states with a label, `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb
from triton import language

from components.models import head as head_logprobs
from components.models.head import plain_head, state_logprobs
from components.models.vocabulary import WHOLE_VOCABULARY, Vocabulary, vocabulary_of
from plugins.kernels import softmax
from plugins.kernels.vocabulary import FusedVocabulary
from plugins.layer_kernels.gate import GatedActivation
from plugins.layer_kernels.norm import RMSNorm
from plugins.layer_kernels.rotary import apply_rotary, rotate

Operation = Callable[..., Tensor]
SIZES = {"M": 6, "V": 100, "H": 8}
SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PACKED: dict[str, dict[str, Any]] = {"packed": {"packing": True}}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": PACKED
    | {
        "padded": {"packing": False},
        "recomputed": {"packing": True, "gradient_checkpointing": True},
        "adapters": {"packing": True, "lora_rank": 2},
    },
}
"""Cases of `trained` by model type: options of the engine. The other types have the case `PACKED`."""
WAYS: dict[str, Vocabulary] = {"plain": WHOLE_VOCABULARY, "fused": FusedVocabulary()}


def round_to_nearest() -> None:
    """Round to bfloat16 as a GPU does. The interpreter truncates."""
    convert = interpreter._convert_float

    def rounded(values: Any, before: Any, after: Any, mode: Any) -> Any:
        if (before, after) != (language.float32, language.bfloat16):
            return convert(values, before, after, mode)
        bits = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(values.shape)

    interpreter._convert_float = rounded


def layer(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, weights, bias and labels. The numbers of all dtypes are the same."""
    generator = torch.Generator().manual_seed(1)
    rows, vocabulary, hidden = SIZES.values()
    shapes = (rows, hidden), (vocabulary, hidden), (vocabulary,)
    tensors = [torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    return tensors[0], tensors[1], tensors[2], torch.randint(vocabulary, (rows,), generator=generator)


def results(way: Vocabulary, dtype: torch.dtype, rows: int, *, with_entropy: bool, with_loss: bool) -> list[Tensor]:
    """Return log-probabilities and entropies, and the gradients of states, weights and bias.

    Args:
        way: computation.
        dtype: dtype of states and weights.
        rows: rows of a chunk.
        with_entropy: compute entropies.
        with_loss: the entropies have a gradient.
    """
    head_logprobs._CHUNK = {"cpu": (1, rows)}
    state_MH, weight_VH, bias_V, label_M = layer(dtype)
    logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, 0.7, with_entropy, way)
    generator = torch.Generator().manual_seed(2)
    factor_2M = torch.randn(2, len(label_M), generator=generator).to(logprob_M)
    # A label without any gradient.
    factor_2M[:, 1] = 0.0
    loss = (logprob_M * factor_2M[0]).sum()
    if entropy_M is not None and with_loss:
        loss = loss + (entropy_M * factor_2M[1]).sum()
    loss.backward()
    tensors = [logprob_M, entropy_M, state_MH.grad, weight_VH.grad, bias_V.grad]
    return [tensor.detach().double() for tensor in tensors if tensor is not None]


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the largest error of each tensor, as a share of its largest element."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True)]


def write_model(family: str, folder: str) -> None:
    """Write a small model with random weights, also of the norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def head() -> dict[str, Any]:
    """Return the errors of plain and fused kernels by case, compared with the plain ones in float64."""
    record: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (4, 100):
            for name, entropy in (("logprob", (False, False)), ("read", (True, False)), ("trained", (True, True))):
                options = dict(zip(("with_entropy", "with_loss"), entropy, strict=True))
                expected = results(WHOLE_VOCABULARY, torch.float64, rows, **options)
                case = {way: errors(results(kind, dtype, rows, **options), expected) for way, kind in WAYS.items()}
                record[f"{str(dtype).removeprefix('torch.')} {rows} {name}"] = case
    return record


def edges() -> dict[str, Any]:
    """Return results of unusual layers, each of plain and fused kernels."""
    record: dict[str, Any] = {}
    for way, vocabulary in WAYS.items():
        state_MH, weight_VH, bias_V, label_M = layer(torch.float32)
        logprob_M, _ = state_logprobs(state_MH, weight_VH.detach(), None, label_M, 1.0, False, vocabulary)
        logprob_M.sum().backward()
        frozen = state_MH.grad
        # All logits of the first block, and some others.
        with torch.no_grad():
            bias_V[:32] = bias_V[50:60] = -torch.inf
        # The labels are a column, so they are not contiguous.
        label_M = label_M.clamp(min=60)[:, None].repeat(1, 3)[:, 0]
        logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, 1.3, True, vocabulary)
        assert entropy_M is not None
        (logprob_M + entropy_M).sum().backward()
        none_M, _ = state_logprobs(state_MH[:0], weight_VH, None, label_M[:0], 1.0, True, vocabulary)
        none_M.sum().backward()
        tensors = {"frozen": frozen, "logprob": logprob_M, "entropy": entropy_M, "weight": weight_VH.grad}
        record[way] = {name: tensor.tolist() for name, tensor in tensors.items() if tensor is not None}
    return record


def parts(rank: str, port: str) -> dict[str, Any]:
    """Return the results of one of two ranks that share the vocabulary, and of one rank with all of it."""
    import torch.distributed as dist

    from plugins.parallel.vocabulary import VocabularyPart

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=2)
    group = dist.group.WORLD
    assert group is not None
    record: dict[str, Any] = {}
    half = SIZES["V"] // 2
    part = VocabularyPart(group, int(rank) * half, half)
    for way, vocabulary in (("plain", part), ("fused", WAYS["fused"].within(part))):
        for rows in (4, 100):
            head_logprobs._CHUNK = {"cpu": (1, rows)}
            columns = layer(torch.float32)
            state_MH, label_M = columns[0], columns[3]
            weight_VH, bias_V = (x.detach()[part.first : part.first + half].requires_grad_() for x in columns[1:3])
            logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, 0.7, True, vocabulary)
            assert entropy_M is not None
            (logprob_M - 0.5 * entropy_M).sum().backward()
            tensors = [logprob_M, entropy_M, state_MH.grad, weight_VH.grad, bias_V.grad]
            record[f"{way} {rows}"] = [tensor.tolist() for tensor in tensors if tensor is not None]
    columns = layer(torch.float32)
    logprob_M, entropy_M = state_logprobs(*columns, 0.7, True)
    assert entropy_M is not None
    (logprob_M - 0.5 * entropy_M).sum().backward()
    tensors = [logprob_M, entropy_M, *(x.grad for x in columns[:3])]
    for index in (3, 4):
        tensors[index] = tensors[index][part.first : part.first + half]
    dist.barrier()
    dist.destroy_process_group()
    return record | {"whole": [tensor.tolist() for tensor in tensors]}


def layers() -> dict[str, Any]:
    """Return the errors of plain and fused layers by operation and dtype, compared with float64."""
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": compared(*ways, dtype)
        for name, ways in OPERATIONS.items()
        for dtype in (torch.float32, torch.bfloat16)
    }


def compared(
    shapes: list[tuple[int, ...]], exact: Operation, plain: Operation, fused: Operation, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Return the errors of results and gradients of two implementations.

    Args:
        shapes: shapes of the arguments.
        exact: the operation for float64.
        plain: the operation of torch and transformers.
        fused: the fused operation.
        dtype: dtype of the arguments.
    """

    def computed(operation: Operation, kind: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        tensors = [torch.randn(shape, generator=generator).to(dtype).to(kind).requires_grad_() for shape in shapes]
        result = operation(*tensors)
        factor = torch.randn(result.shape, generator=generator).to(dtype).to(result.dtype)
        (result * factor).sum().backward()
        return [x.detach().double() for x in (result, *(tensor.grad for tensor in tensors)) if x is not None]

    expected = computed(exact, torch.float64)
    return {"plain": errors(computed(plain, dtype), expected), "fused": errors(computed(fused, dtype), expected)}


def rotated(rotate: Any) -> Operation:
    """Return the sum of rotated queries and keys. Their memory has the order of transformers' layers."""

    def compute(q: Tensor, k: Tensor) -> Tensor:
        angle = torch.arange(5)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01]).repeat(2)
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), angle.cos().to(q), angle.sin().to(q))
        return torch.cat([q, k], 1)

    return compute


def far() -> list[float]:
    """Return the sums of heads of ones, twos and threes that are 2^30 numbers apart in memory, rotated by 0."""
    # Memory that is not written is not allocated by the kernel of the operating system.
    memory = torch.empty(2**31 + 8, dtype=torch.bfloat16)
    x_BHTD = memory.as_strided((1, 3, 1, 8), (8, 2**30, 8, 1))
    x_BHTD[:] = torch.arange(1, 4)[None, :, None, None]
    angle = torch.zeros(1, 1, 8)
    return rotate(x_BHTD, angle.cos(), angle.sin(), torch.float32, False).sum((0, 2, 3)).tolist()


def norm(offset: float) -> Operation:
    """Return the RMS norm with weights in any dtype."""
    return lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (w + offset)


def norm_of(kind: Any) -> Operation:
    """Return the forward function of a norm of transformers, as a function of its input and its weights."""

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        module = kind(x.shape[-1], eps=1e-6)
        del module.weight
        module.weight = weight
        return module(x)

    return compute


def fused_norm(offset: float) -> Operation:
    """Return the fused norm."""
    return lambda x, w: RMSNorm.apply(x, w, 1e-6, offset, x.dtype)


OPERATIONS: dict[str, tuple[list[tuple[int, ...]], Operation, Operation, Operation]] = {
    "norm": ([(3, 7, 24), (24,)], norm(0.0), norm_of(Qwen2RMSNorm), fused_norm(0.0)),
    "shifted norm": ([(70, 10), (10,)], norm(1.0), norm_of(GemmaRMSNorm), fused_norm(1.0)),
    "silu": (
        [(2, 5, 40)] * 2,
        lambda g, u: silu(g) * u,
        lambda g, u: silu(g) * u,
        lambda g, u: GatedActivation.apply(g, u, False),
    ),
    "gelu": (
        [(2, 5, 40)] * 2,
        lambda g, u: gelu(g, approximate="tanh") * u,
        lambda g, u: gelu(g, approximate="tanh") * u,
        lambda g, u: GatedActivation.apply(g, u, True),
    ),
    "rotary": (
        [(2, 5, 3, 10), (2, 5, 1, 10)],
        rotated(apply_rotary_pos_emb),
        rotated(apply_rotary_pos_emb),
        rotated(partial(apply_rotary, plain=None)),
    ),
}
"""Operation -> shapes of its arguments, and its implementations: for float64, plain and fused."""


def trained(family: str, folder: str) -> dict[str, Any]:
    """Return the largest differences between training with fused and with plain kernels, by case.

    Prompts are shared, sequences are packed or padded, and the temperature is 0.7.

    Args:
        family: model type.
        folder: folder for the model.
    """
    from components.models.loading import load_policy
    from components.train.opening import open_engine
    from tests.components.helpers import train_cases as cases
    from tests.components.helpers.shared_cases import groups, nll_and_entropy

    write_model(family, folder)
    record: dict[str, Any] = {}
    for name, options in CASES.get(family, PACKED).items():
        metrics, weights = list[dict[str, float]](), list[dict[str, Tensor]]()
        for kernels in ("plain", "fused"):
            torch.manual_seed(3)
            settings = {"engine": "fsdp", "zero_stage": 2, "max_tokens": 60, "kernels": kernels} | options
            config = cases.config(**settings)
            model = load_policy(folder, packing=config.packing, gradient_checkpointing=config.gradient_checkpointing)
            engine = open_engine(model, config)
            output_layer = plain_head(model)
            assert (output_layer is None) == (family == "gemma2"), "only Gemma 2 changes its logits"
            if output_layer is not None:
                assert isinstance(vocabulary_of(output_layer), FusedVocabulary) == (kernels == "fused")
            assert any("forward" in vars(module) for module in model.modules()) == (kernels == "fused")
            steps = [engine.train_step(groups(seed, 2, 2, prompt=6), nll_and_entropy) for seed in (1, 2)]
            metrics.append({f"{name} {step}": values[name] for step, values in enumerate(steps) for name in values})
            weights.append(cases.weights(engine))
        changed = [float((a - b).abs().max()) for a, b in zip(weights[0].values(), weights[1].values(), strict=True)]
        record[name] = {
            "metrics": max(abs(metrics[0][key] - metrics[1][key]) for key in metrics[0]),
            "weights": max(changed),
        }
    return record


if __name__ == "__main__":
    torch.set_num_threads(1)
    softmax.FORWARD_BLOCK = softmax.BACKWARD_BLOCK = 32
    round_to_nearest()
    np.seterr(all="ignore")
    work, *arguments = sys.argv[1:]
    functions = {"head": head, "edges": edges, "parts": parts, "layers": layers, "trained": trained, "far": far}
    json.dump(functions[work](*arguments), sys.stdout)
    sys.stdout.flush()
    os._exit(0)
