"""A tiny policy whose tokens differ from the encoding of their text, and runners for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from agents.episode import AgentExecutorBase
from agents.options import AgentOptions
from agents.runner import EpisodeRunner
from components.batch import Batch
from components.data.text import TextEncoder, load_tokenizer
from components.generate.batched_engine import BatchedEngine
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from plugins.demo.tiny_model import learnt_tokenizer, tiny_model

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Chat template in the form of ChatML, with the end token as every mark."""
POSITIONS = 256
TEXTS = ["What is 3 + 4?", "Guess the number: higher, lower, or right?", "hello hello hello world"]


def write_policy(folder: Path, seed: int = 1) -> Path:
    """Write an untrained model with a byte-pair tokenizer of 300 tokens. A tenth of its samples are end tokens."""
    tokenizer = learnt_tokenizer(TEXTS * 4, 300)
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(tokenizer, seed, hidden=64, layers=1, heads=2, key_value_heads=1, max_positions=POSITIONS)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(2, 32))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Rig:
    """An engine with runners. `close` closes all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = HFRolloutEngine(folder, HFRolloutConfig())
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)
        self.encoder = TextEncoder(self.tokenizer)
        self._runners: list[EpisodeRunner] = []

    def runner(self, executor: AgentExecutorBase | None = None, **options: Any) -> EpisodeRunner:
        """Return a runner with default options, except for the arguments."""
        runner = EpisodeRunner(BatchedEngine(self.engine), executor, AgentOptions(**options), self.tokenizer)
        self._runners.append(runner)
        return runner

    def close(self) -> None:
        """Close all runners."""
        for runner in self._runners:
            runner.close()
        self._runners = []

    def decode(self, tokens: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens))

    def prompts(self, count: int = 3, samples: int = 2, labels: Sequence[Any] = ()) -> Batch:
        """Return prompts from TEXTS, repeated from the beginning, each with several samples in adjacent rows."""
        texts = [TEXTS[i % len(TEXTS)] for i in range(count)]
        ids = torch.arange(count)
        batch = Batch.from_rows(
            {"tokens": [self.encoder.encode_prompt(text) for text in texts]},
            {"prompt_id": 10 + ids, "sample_id": torch.zeros_like(ids)},
            {"prompt": texts, "label": list(labels) or [f"label {i}" for i in range(count)]},
        )
        return batch.repeat(samples).with_sequences(sample_id=torch.arange(samples).repeat(count))

    def training_logprobs(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probabilities [N] of the trainer's forward pass."""
        with torch.no_grad():
            return token_logprobs(load_policy(self.folder), batch, temperature).logprob_N


def sampling(max_new_tokens: int = 6, **more: Any) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=max_new_tokens, **more)


def turns_of(batch: Batch, row: int) -> list[list[int]]:
    """Return the tokens of each turn of a sequence."""
    tokens = batch.row(row, "tokens")
    turn = batch.row(row, "turn")
    return [tokens[turn == number].tolist() for number in range(int(batch["num_turns"][row]))]
