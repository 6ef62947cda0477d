"""Character and byte-pair tokenizers, and a model of 0.4 million parameters, for runs that need no download."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from plugins.demo.tasks import Task

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template that concatenates the turns and ends each assistant turn with the end token. The alphabet of a task has
no tokens for role names. A single user turn is rendered like the plain prompt."""

LEARNT_FROM = 2_000
"""Number of demonstrations on which the byte-pair vocabulary of a task is trained."""


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of `alphabet`, after pad, bos and eos.

    It neither adds nor merges tokens, so decoding returns the original text. Characters outside the alphabet have no
    token and are dropped: `components.data.text.TextEncoder` rejects them.

    Args:
        alphabet: ASCII characters without repeats. Token ids follow their order.

    Raises:
        ValueError: the alphabet is empty, has repeats or has other characters than ASCII.
    """
    wrong = sorted({c for c in alphabet if not c.isascii() or alphabet.count(c) > 1})
    if wrong or not alphabet:
        raise ValueError(f"alphabet={alphabet!r} must be ASCII characters without repeats; look at {wrong}")
    # The loader of this model family (AutoTokenizer) puts any saved vocabulary into a byte-level BPE of its own. A
    # byte-level BPE without merges is saved here, so that the loaded tokenizer gives the same tokens.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [byte_level.pre_tokenize_str(character)[0][0] for character in alphabet]
    vocabulary = {piece: index for index, piece in enumerate([PAD, BOS, EOS, *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend)


def learnt_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of `size` tokens: pad, bos and eos, all bytes, and the frequent pieces of the texts.

    Every digit is a token. Decoding returns the original text if it is in Unicode's composed form (NFC). The same texts
    give the same tokenizer.

    Raises:
        ValueError: `size` is too small for the special tokens and the bytes.
    """
    smallest = 3 + 256
    if size < smallest:
        raise ValueError(f"size={size} does not hold pad, bos, eos and the 256 bytes; set it to {smallest} or more")
    backend = Tokenizer(models.BPE())
    # These are the steps that the loader of this model family applies to a vocabulary, as above.
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _wrapped(backend)


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a task. It is the same every time."""
    if task.alphabet:
        return character_tokenizer(task.alphabet)
    rows = task.demonstrations(LEARNT_FROM, seed=0)
    return learnt_tokenizer((text for row in rows for text in row.values()), task.vocabulary)


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        # Without this, the loader would add an unknown token with an id beyond the model's embedding.
        unk_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int = 2,
    intermediate: int = 384,
    max_positions: int = 512,
) -> Qwen2ForCausalLM:
    """Make an untrained float32 Qwen2 model with tied embeddings that fits the tokenizer.

    The same seed gives the same weights. The random state of the process is restored.
    """
    special_tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=intermediate,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        dtype="float32",
        **special_tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.update(**special_tokens)
    return model
