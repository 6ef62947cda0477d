"""Measure small models in the rollout engine `hf` and in the training engine, on a CPU.

The models have random weights and sizes of their own. The time of a run follows from them by interpolation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.rl.aggregation import LossOutput, Totals
from components.train.config import TrainConfig, default_engine
from components.train.opening import open_engine
from plugins.machine_speed.clock import fastest_seconds, is_alone
from plugins.machine_speed.layers import DECODE, FORWARD, TRAIN, EngineSpeed, Passes, Point

WIDTHS = (64, 192, 512)
"""Hidden sizes. A layer has about 15 times the square of it as parameters."""
TOKENS = (32, 256, 2048)
"""Numbers of tokens of a pass, or of rows of a decoding step."""
SHORT, LONG = 12, 28
"""Numbers of new tokens. The difference of two generations has neither the prompt nor the preparation in it."""
VOCABULARY, LARGE_VOCABULARY = 256, 4096
SEQUENCE = 16
_MOST_OPERATIONS = 2e10
"""Operations of a pass above which a point is left out, so that the measurement takes seconds."""
_BUDGET_S = 0.06
Seconds = dict[tuple[str, int], float]


def measure_engines() -> EngineSpeed:
    """Measure all kinds of passes with the current number of threads of torch."""
    transformers_logging.disable_progress_bar()
    points: dict[str, list[Point]] = {FORWARD: [], TRAIN: [], DECODE: []}
    for width in WIDTHS:
        thin, thick = (_seconds(width, layers, VOCABULARY, TOKENS) for layers in (1, 3))
        for (kind, tokens), seconds in thick.items():
            layer = max((seconds - thin[kind, tokens]) / 2, 1e-7)
            rest = max(thin[kind, tokens] - layer, 1e-7)
            points[kind].append(Point(parameters=_parameters(width), tokens=tokens, layer_s=layer, rest_s=rest))
    count = TOKENS[1]
    small, large = (_seconds(WIDTHS[0], 1, size, (count,)) for size in (VOCABULARY, LARGE_VOCABULARY))
    passes: dict[str, Passes] = {}
    for kind, of_kind in points.items():
        logit = max((large[kind, count] - small[kind, count]) / (count * (LARGE_VOCABULARY - VOCABULARY)), 0.0)
        # The time of the small vocabulary is in the logits, so it must not be in the rest as well.
        without = [
            Point(**{**vars(point), "rest_s": max(point.rest_s - logit * VOCABULARY * point.tokens, 1e-7)})
            for point in of_kind
        ]
        passes[kind] = Passes(points=without, logit_s=logit)
    return EngineSpeed(passes=passes)


def _parameters(width: int) -> int:
    # Queries and outputs, keys and values of half the width, and an MLP of four times the width.
    return 3 * width**2 + 12 * width**2


def _seconds(width: int, layers: int, vocabulary: int, tokens: tuple[int, ...]) -> Seconds:
    """Return the seconds of each kind of pass of a model, by kind and number of tokens."""
    seconds: Seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), width, layers, vocabulary)
        operations = 2 * layers * _parameters(width)
        train = open_engine(load_policy(folder, packing=None), TrainConfig(engine=default_engine(), zero_stage=0))
        rollout = HFRolloutEngine(folder, HFRolloutConfig(max_num_seqs=max(tokens)))
        for count in tokens:
            if operations * count > _MOST_OPERATIONS:
                continue
            rows = _rows(count // SEQUENCE, SEQUENCE, vocabulary)
            seconds[FORWARD, count] = _fastest(partial(train.forward, rows, _logprobs))
            if 3 * operations * count <= _MOST_OPERATIONS:
                seconds[TRAIN, count] = _fastest(partial(train.train_step, rows, _loss))
            if operations * count * LONG <= 2 * _MOST_OPERATIONS:
                short, long = (_fastest(partial(_generate, rollout, count, new, vocabulary)) for new in (SHORT, LONG))
                seconds[DECODE, count] = max(long - short, 1e-6) / (LONG - SHORT)
    return seconds


def _write_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _rows(count: int, length: int, vocabulary: int) -> Batch:
    """Return `count` sequences without a common beginning, all of whose tokens but the first are trained on."""
    tokens = torch.randint(3, vocabulary, (count, length))
    mask = [[False, *([True] * (length - 1))]] * count
    return Batch.from_rows({"tokens": tokens.tolist(), "action_mask": mask})


def _logprobs(model: nn.Module, micro: Batch) -> torch.Tensor:
    return token_logprobs(model, micro, mask="action_mask").logprob_N


def _loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    output = token_logprobs(model, micro, with_entropy=True, mask="action_mask")
    ratio_N = (output.logprob_N - output.logprob_N.detach()).exp()
    return LossOutput((ratio_N * micro["action_mask"]).sum() / totals.tokens, {})


def _generate(engine: HFRolloutEngine, rows: int, new: int, vocabulary: int) -> None:
    prompts = Batch.from_rows(
        {"tokens": [[3 + i % (vocabulary - 3), 4] for i in range(rows)]},
        {"prompt_id": list(range(rows)), "sample_id": [0] * rows},
    )
    engine.generate(prompts, SamplingConfig(max_new_tokens=new))


def _fastest(act: Callable[[], object]) -> float:
    return fastest_seconds(act, _BUDGET_S, is_alone("cpu"))
