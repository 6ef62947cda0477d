"""The cases of scripts/race.py: sizes, models with random weights, prompts and reward."""

from __future__ import annotations

import json
import random
import string
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from components.models.loading import without_progress_bars  # noqa: E402 (the project may not be installed)
from components.models.sources import resolve_model  # noqa: E402
from plugins.demo.tasks import get_task  # noqa: E402

SHARE_OF_A = """
def reward_func(queries, prompts, labels, **kwargs):
    texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [text.count("a") / max(1, len(text)) for text in texts]}
"""
"""A reward that differs within a group from the first step on, so that every step changes the weights."""
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""Shapes of Qwen2.5 models, with tied embeddings."""


@dataclass(frozen=True)
class Case:
    """Sizes of a race."""

    title: str
    max_new_tokens: int
    steps: int
    prompts: int = 64
    """Number of prompts per step."""
    samples: int = 8
    """Number of responses per prompt."""
    fixed_length: bool = False
    """True if every response has the maximum length, because the model never samples its end token."""
    warm_start: bool = False
    """True for the demonstration task `sort` from its warm start, False for random weights."""
    prompt_tokens: int = 0
    """Length of random prompts. 0: the prompts of the task sort."""
    shape: str = ""
    """Key of SHAPES. "": a model of 0.4 million parameters with one token per letter."""
    trl_rows: tuple[int, ...] = field(default=(128, 512))
    """Sizes of micro-batches that TRL may use. The one with the shorter step races."""


CASES = {
    "tiny": Case("tiny", 8, 4, prompts=4, samples=4, fixed_length=True, prompt_tokens=16, trl_rows=(16,)),
    "fixed16": Case("fixed length 16", 16, 8, fixed_length=True),
    "fixed64": Case("fixed length 64", 64, 7, fixed_length=True),
    "natural": Case("natural lengths, at most 128", 128, 7),
    "sort": Case("sort, at most 8", 8, 10, warm_start=True),
    "long_prompts": Case("prompts of 128, length 64", 64, 6, fixed_length=True, prompt_tokens=128),
    "0.5b": Case(
        "0.5 B, 256 x 8, 100 + 200 tokens",
        200,
        7,
        prompts=256,
        prompt_tokens=100,
        shape="0.5b",
        trl_rows=(16, 32),
    ),
    "1.5b": Case(
        "1.5 B, 256 x 8, 100 + 200 tokens",
        200,
        6,
        prompts=256,
        prompt_tokens=100,
        shape="1.5b",
        trl_rows=(8, 16),
    ),
}


def prompts_file(case: Case, folder: Path) -> Path:
    """Return the file with the prompts of a case, written if missing."""
    count = case.prompts * case.steps
    path = folder / f"prompts-{case.prompt_tokens}-{count}.jsonl"
    if not path.exists():
        # The same seed in every race, so that races on different days have the same prompts.
        letters = random.Random(0)
        records = [dict(row) for row in get_task("sort").rows("train", count, seed=0)]
        for row in records:
            if case.prompt_tokens:
                row["input"] = "".join(letters.choices(string.ascii_lowercase, k=case.prompt_tokens))
        path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    return path


def reward_file(folder: Path) -> Path:
    """Return the file with the reward of our side, written if missing."""
    path = folder / "reward.py"
    path.write_text(SHARE_OF_A, encoding="utf-8")
    return path


def model_path(case: Case, folder: Path) -> str:
    """Return the folder of the model of both sides, written if missing."""
    if case.warm_start:
        return resolve_model("warm_start:sort")
    path = folder / f"model-{case.shape or 'tiny'}-{'fixed' if case.fixed_length else 'natural'}"
    if not path.exists():
        write_model(case, path)
    return str(path)


def write_model(case: Case, path: Path) -> None:
    """Write a model with random weights and its tokenizer."""
    from plugins.demo.tiny_model import character_tokenizer, tiny_model

    if case.shape:
        tokenizer = wide_tokenizer(SHAPES[case.shape]["vocab_size"])
        model: Any = random_model(case.shape)
    else:
        tokenizer = character_tokenizer(string.ascii_lowercase + string.digits + ">+")
        model = tiny_model(tokenizer, 0)
    if case.fixed_length:
        suppress_end_token(model, tokenizer)
    with without_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def suppress_end_token(model: Any, tokenizer: Any) -> None:
    """Change a model with random float32 weights so that it never samples its end token.

    All embeddings get a common component, and the end token the opposite one. The final states have the common
    component too, so the logit of the end token is far below all others, which keep their differences. Every engine and
    trainer needs an end token, so it cannot be left out.
    """
    import torch

    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        raise ValueError("the model has an output layer of its own; set tie_word_embeddings=True")
    common = 32 / embedding.shape[1]  # the logits then differ by about 64 at any width
    with torch.no_grad():
        embedding += common
        embedding[tokenizer.eos_token_id] = -common


def random_model(shape: str) -> Any:
    """Return a Qwen2 model with random bfloat16 weights. Its end token is one of a large vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes: dict[str, Any] = {**SHAPES[shape], **ids, "tie_word_embeddings": True, "max_position_embeddings": 32_768}
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes)).bfloat16()
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model.cpu()


def wide_tokenizer(size: int) -> Any:
    """Return a tokenizer of `size` tokens, of which each byte is one. Every id decodes to text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġw{number}" for number in range(size - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
