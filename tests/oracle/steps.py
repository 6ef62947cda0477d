"""Input of both sides (a tiny model, three steps of responses), and the differences of two results.

B responses; N all tokens end to end; T tokens of the longest response; S tokens of the longest prompt.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from components.batch import Batch
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
SEED = int(os.environ.get("ORACLE_SEED", "11"))
PROMPTS, SAMPLES, LONGEST = (int(n) for n in os.environ.get("ORACLE_SHAPE", "4x4x8").split("x"))
"""Number of prompts of a step (even), number of responses to each, and maximum length."""
SIZE = PROMPTS * SAMPLES
EPS = 1e-6
"""Epsilon of Adam on both sides. A smaller one would scale rounding errors up to the size of gradients."""


@dataclass
class Trace:
    """Results of three steps on one side."""

    advantages: list[Tensor] = field(default_factory=list)
    """Advantages of each step, at the tokens that are trained on."""
    losses: list[float] = field(default_factory=list)
    """Policy loss of each step: mean over its optimizer steps."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norm of each step before clipping: mean over its optimizer steps."""
    value_losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the last step."""


@dataclass
class Apart:
    """Maximum differences of two traces. Those of gradients and weights are relative."""

    advantages: float | None
    """None for algorithms without advantages."""
    losses: float
    gradients: float
    weights: float

    @classmethod
    def of(cls, ours: Trace, theirs: Trace, start: dict[str, Tensor]) -> Apart:
        assert len(ours.losses) == len(theirs.losses) == STEPS
        assert ours.weights.keys() <= theirs.weights.keys()
        numbers = list(zip(ours.losses, theirs.losses, strict=True))
        numbers += zip(ours.value_losses, theirs.value_losses, strict=True)
        norms = zip(ours.grad_norms, theirs.grad_norms, strict=True)
        moved = max(float((theirs.weights[name] - start[name]).abs().max()) for name in ours.weights)
        assert moved > 0
        gap = max(float((w - theirs.weights[name]).abs().max()) for name, w in ours.weights.items())
        advantages = zip(ours.advantages, theirs.advantages, strict=True)
        return cls(
            max((float((a - b).abs().max()) for a, b in advantages), default=None),
            max(abs(a - b) / max(abs(b), 1.0) for a, b in numbers),
            max(abs(a - b) / max(b, 1e-12) for a, b in norms),
            gap / moved,
        )


@contextmanager
def roles(folder: Path) -> Iterator[Any]:
    """Return the roles of recipes in this process, as scripts/golden.py creates them."""
    spec = importlib.util.spec_from_file_location("golden", ROOT / "scripts" / "golden.py")
    assert spec is not None and spec.loader is not None
    golden = importlib.util.module_from_spec(spec)
    sys.modules["golden"] = golden
    spec.loader.exec_module(golden)
    with golden.Stage(folder) as stage:
        yield stage


def make_model(folder: Path) -> str:
    """Write a model of the task `sort` with random weights to a folder."""
    tokenizer = task_tokenizer(get_task("sort"))
    model = tiny_model(tokenizer, SEED, hidden=32, layers=1, intermediate=64)
    with torch.no_grad():  # large weights, so that ratios and divergences are not trivial
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def make_steps(model_path: str, *, holes: bool = False, count: int = STEPS) -> list[Batch]:
    """Return responses of 1 to `LONGEST` tokens. The first has one token, the second has `LONGEST`. The rewards of one
    prompt are equal.

    `rollout_logprob` differs from the policy's by about a third of a nat. With `holes`, some of the tokens in between
    are environment tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    most = model.config.vocab_size
    generator = torch.Generator().manual_seed(SEED)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator)

    steps = []
    for number in range(count):
        prompts = [integers(3, most - 1, int(n)) for n in integers(2, 5, PROMPTS)]
        lengths = integers(1, LONGEST, SIZE)
        lengths[0] = 1
        lengths[1] = LONGEST
        rows, masks, engine = [], [], []
        for i, length in enumerate(lengths.tolist()):
            prompt = prompts[i // SAMPLES]
            row = torch.cat([prompt, integers(3, most - 1, length)])
            acts = torch.arange(len(row)) >= len(prompt)
            if holes and length > 3:
                acts[len(prompt) + 1 : len(prompt) + 1 + int(integers(1, length - 2, 1))] = False
            with torch.no_grad():
                logprob = response_logprobs(model(row[None]).logits[0], row)
            engine.append(logprob + torch.randn(len(row), generator=generator) * 0.3)
            rows.append(row)
            masks.append(acts)
        reward_B = integers(-8, 8, SIZE).float() / 8
        reward_B[SAMPLES : 2 * SAMPLES] = 0.5
        columns = {"tokens": torch.cat(rows), "action_mask": torch.cat(masks), "rollout_logprob": torch.cat(engine)}
        per_sequence = {
            "prompt_id": torch.arange(PROMPTS).repeat_interleave(SAMPLES) + 10 * number,
            "sample_id": torch.arange(SAMPLES).repeat(PROMPTS),
            "prompt_length": torch.tensor([len(p) for p in prompts]).repeat_interleave(SAMPLES),
            "truncated": lengths == LONGEST,
            "reward": reward_B,
            "score": reward_B,
            "greedy_reward": (integers(-8, 8, PROMPTS).float() / 8).repeat_interleave(SAMPLES),
        }
        steps.append(Batch([len(row) for row in rows], columns, per_sequence))
    return steps


def response_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Return the log-probability [T] of each token of one sequence given the previous ones, and 0 for the first
    token.
    """
    logprob_T = logits_TV[:-1].float().log_softmax(-1).gather(-1, tokens_T[1:, None]).squeeze(-1)
    return torch.cat([logprob_T.new_zeros(1), logprob_T])


class Padded:
    """A step in a padded layout: prompts padded on the left, responses on the right."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.prompt_B = batch["prompt_length"]
        self.length_B = batch.lengths - self.prompt_B
        self.S, self.T = int(self.prompt_B.max()), LONGEST
        self.mask_BT = self.of("action_mask").bool()
        rows = batch.lists("tokens")
        self.ids = torch.zeros(len(batch), self.S + self.T, dtype=torch.int64)
        self.attention = torch.zeros_like(self.ids)
        for i, row in enumerate(rows):
            start = self.S - int(self.prompt_B[i])
            self.ids[i, start : start + len(row)] = torch.tensor(row)
            self.attention[i, start : start + len(row)] = 1

    def of(self, name: str) -> Tensor:
        """Return a column of the batch at the response tokens, [B, T]."""
        column = self.batch[name]
        padded_BT = torch.zeros(len(self.batch), self.T, dtype=column.dtype)
        for i, part in enumerate(column.split(self.batch.lengths.tolist())):
            response = part[int(self.prompt_B[i]) :]
            padded_BT[i, : len(response)] = response
        return padded_BT

    def last(self, x_B: Tensor) -> Tensor:
        """Return a number per response at its last token, [B, T]."""
        padded_BT = torch.zeros(len(self.batch), self.T)
        padded_BT[torch.arange(len(self.batch)), self.length_B - 1] = x_B.float()
        return padded_BT

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits [B, T, V] that predict the response tokens."""
        position = (self.attention.cumsum(1) - 1).clamp(min=0)
        output: Any = model(input_ids=self.ids, attention_mask=self.attention, position_ids=position)
        return output.logits[:, self.S - 1 : -1].float()

    def logprobs(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [B, T] of the response tokens, and the entropies."""
        logprob_BTV = self.logits(model).log_softmax(-1)
        entropy_BT = -(logprob_BTV.exp() * logprob_BTV).sum(-1)
        return logprob_BTV.gather(-1, self.ids[:, self.S :, None]).squeeze(-1), entropy_BT

    def values(self, model: nn.Module) -> Tensor:
        """Return the hidden states [B, T] before the response tokens."""
        value_N = token_values(model, self.batch)
        rows = value_N.split(self.batch.lengths.tolist())
        responses = [row[int(n) :] for row, n in zip(rows, self.prompt_B, strict=True)]
        return torch.stack([torch.nn.functional.pad(row, (0, self.T - len(row))) for row in responses])


def value_model(path: str) -> nn.Module:
    """Return the initial critic of both sides, with its new head."""
    return load_value_model(path, seed=42)
