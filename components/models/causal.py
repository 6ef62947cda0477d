"""Causal language models over ragged batches: log-probabilities of tokens, and values of states.

Legend: `B` sequences, `T` longest sequence, `N` all tokens of the batch end to end, `M = N - B` tokens that
have a token before them, `U` places of a row in which sequences share what they begin with, `E` what is read of it,
`V` vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from components.batch import Batch
from components.models.disk.empty_model import empty_model, model_folder, small_copy
from components.models.disk.tensor_file import TensorReader
from components.models.disk.weight_files import ReadWhole
from components.models.end_tokens import use_end_tokens
from components.models.head import has_plain_head, logprobs_for_logits, mark_plain_head, plain_head
from components.models.logprobs import label_logprobs
from components.models.packing.packed_model import packed_inputs, packs, use_packing
from components.process.heartbeat import beat
from plugins.parallel.context import Context, context_of
from plugins.prefix_sharing.shared_prompts import SHORTEST, shares_prompts

_log = logging.getLogger(__name__)

# Options of mallopt, by their numbers in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SMALL = 2**25
"""Parameters of a model, at most, of which memory that is freed is kept."""


@dataclass(frozen=True)
class TokenOutput:
    """What a policy gives for the tokens of a batch."""

    logprob_N: Tensor
    """[N] float32, in nats; 0 for the first token of a sequence."""
    entropy_N: Tensor | None
    """[N] float32, in nats, of the distribution the token was drawn from; None unless asked for."""


def load_policy(
    path: str | Path,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    attn_implementation: str | None = None,
    packing: bool | None = False,
    empty: bool = False,
) -> PreTrainedModel:
    """A causal language model from a folder or a hub name.

    Args:
        path: what `from_pretrained` takes.
        dtype: of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        attn_implementation: as transformers names it, such as "sdpa" or "flash_attention_2"; None: its own choice.
        packing: compute the sequences of a batch end to end in one row, without padding, each for itself; with an
            attention of ours, unless `attn_implementation` is flash attention. None: if it can, and a warning is logged
            that says why it cannot.
        empty: leave the parameters on the meta device; a training engine, or `fill`, reads what a rank keeps. A model
            that cannot be read in parts is loaded whole, and a warning with the reason is logged.

    Raises:
        ValueError: its files lack some of its weights, it cannot be packed, or its attention is more than sdpa, which
            was asked for, computes.
    """
    model, probe = _open(AutoModelForCausalLM, path, dtype, attn_implementation, empty)
    keep_freed_memory(model)
    use_end_tokens(model, path)
    own: Any = probe.config._attn_implementation
    # Flash attention is for GPUs, and the model is not on one yet.
    probe.set_attn_implementation("eager")
    mark_plain_head(model, has_plain_head(probe))
    probe.set_attn_implementation(own)
    _fit(model, probe, attn_implementation, packing, gradient_checkpointing)
    return model


def _open(
    kind: Any, path: str | Path, dtype: str, attention: str | None, empty: bool
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model; and one of its kind that can compute already, which is itself where it has weights."""
    if empty:
        try:
            model = empty_model(kind, path, _torch_dtype(dtype), attention)
            return model, small_copy(model)
        except ReadWhole as why:
            _log.warning("every process loads %s whole, which takes more host memory: %s", path, why)
    with without_progress_bars():
        model, found = kind.from_pretrained(
            path, dtype=_torch_dtype(dtype), attn_implementation=attention, output_loading_info=True
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} among them, which would "
            "be random; give a folder that save_pretrained wrote whole"
        )
    return model, model


def _fit(
    model: PreTrainedModel, probe: PreTrainedModel, asked: str | None, packing: bool | None, checkpointing: bool
) -> None:
    """Let `model` pack, or see to it that its attention computes what the model is; and checkpoint its layers."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own: Any = model.config._attn_implementation
    if packing is not False:
        try:
            use_packing(model, probe)
            return
        except ValueError as why:
            if packing:
                raise
            _log.warning("sequences are padded: %s", why)
            model.set_attn_implementation(own)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap is None or model.config._attn_implementation != "sdpa":
        return
    if asked == "sdpa":
        raise ValueError(
            f"attention of {type(model).__name__} has a soft cap, which sdpa leaves out; set attn_implementation to "
            "eager or flash_attention_2, or packing=True"
        )
    model.set_attn_implementation("eager")


class ValueModel(nn.Module):
    """A transformer with one number per state instead of a distribution over the next token."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        seed: int = 0,
        value_head_prefix: str = "score",
        statistics: tuple[float, float] | None = None,
    ) -> None:
        """
        Args:
            backbone: the transformer without its head.
            seed: of the first weights of the head.
            value_head_prefix: the head's weights are saved as `<prefix>.weight`.
            statistics: (mean, std), by which the values are (score - mean) / std; None: the scores themselves.
        """
        super().__init__()
        self.backbone = backbone
        self.value_head_prefix = value_head_prefix
        self.statistics = statistics
        hidden = _state_size(backbone.config)
        self.score = nn.Linear(hidden, 1, bias=False, dtype=backbone.dtype)
        # Small, so that the first values are near 0 and advantages are the rewards; the same on all ranks.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.score.weight.copy_(torch.randn(1, hidden, generator=generator) / (hidden + 1))

    @property
    def packs_sequences(self) -> bool:
        """As `packs` asks it."""
        return packs(self.backbone)

    @property
    def shares_prompts(self) -> bool:
        """As `shares_prompts` of shared_prompts.py asks it."""
        return shares_prompts(self.backbone)

    @property
    def context(self) -> Context | None:
        """As `context_of` asks it."""
        return context_of(self.backbone)

    def forward(self, **inputs: Any) -> Tensor:
        """[B, T] float32 values of the states after each input token."""
        score_BT1 = self.score(self.backbone(**inputs).last_hidden_state)
        # A copy: the hooks that fully_shard puts on a model's output get lost when it is a view.
        score_BT = score_BT1.squeeze(-1).to(torch.float32, copy=True)
        if self.statistics is None:
            return score_BT
        mean, std = self.statistics
        return (score_BT - mean) / std

    def save_pretrained(self, path: str | Path) -> None:
        """Write the folder that `load_value_model` loads, with the same prefix of the head and the same `normalize`.

        With the prefix "score" transformers' `...ForSequenceClassification` loads it too, to give the scores before
        they are normalised.

        Args:
            path: folder, made when missing.
        """
        from safetensors.torch import save_file

        self.save_config(path, self.backbone.dtype)
        weights = {self.stored_name(name): tensor.detach().cpu() for name, tensor in self.named_parameters()}
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})

    def stored_name(self, name: str) -> str:
        """What a parameter is called in the files."""
        prefixes = {"backbone": self.backbone.base_model_prefix, "score": self.value_head_prefix}
        part, _, rest = name.partition(".")
        return f"{prefixes[part]}.{rest}"

    def save_config(self, path: str | Path, dtype: torch.dtype) -> None:
        """Write the config.json of that folder, for weights of this type."""
        config = copy.deepcopy(self.backbone.config)
        config.num_labels = 1
        config.dtype = dtype
        classifier: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        # Under another name it would not find the head, and make up a random one.
        config.architectures = [classifier.__name__] if classifier and self.value_head_prefix == "score" else None
        for name in ("mean", "std"):
            # Those of the reward model that this one started from say nothing about these scores.
            vars(config).pop(name, None)
        if self.statistics is not None:
            config.mean, config.std = self.statistics
        config.save_pretrained(path)


def load_value_model(
    path: str | Path,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    attn_implementation: str | None = None,
    value_head_prefix: str = "score",
    normalize: bool = False,
    needs_head: bool = False,
    packing: bool | None = False,
    empty: bool = False,
) -> ValueModel:
    """A value model from a value model's folder, a reward model's, or any policy's.

    Args:
        path: what `from_pretrained` takes.
        dtype: of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: as in `load_policy`.
        seed: of the value head, where the folder has none.
        attn_implementation: as in `load_policy`.
        value_head_prefix: the folder keeps the head as `<prefix>.weight`.
        normalize: subtract the `mean` and divide by the `std` that a reward model has in its config.json.
        needs_head: no random head where the folder has none.
        packing: as in `load_policy`.
        empty: as in `load_policy`; the head is whole.

    Raises:
        ValueError: the folder's head does not fit, is missing though it is needed, or mean and std are; or the model
            cannot be packed.
    """
    # All that is small is checked before the weights are read, which may take minutes.
    config = AutoConfig.from_pretrained(path)
    statistics = score_statistics(config, path) if normalize else None
    head_1H = _stored_head(path, value_head_prefix)
    if head_1H is None and needs_head:
        raise ValueError(
            f"{path} has no {value_head_prefix}.weight in its safetensors files, so it is no reward model, or its head "
            "has another name; set value_head_prefix to what stands before .weight there"
        )
    if head_1H is not None and list(head_1H.shape) != [1, _state_size(config)]:
        raise ValueError(
            f"{value_head_prefix}.weight of {path} has shape {list(head_1H.shape)}, not {[1, _state_size(config)]}: "
            "it scores several classes; use a model with num_labels=1"
        )
    backbone, probe = _open(AutoModel, path, dtype, attn_implementation, empty)
    keep_freed_memory(backbone)
    _fit(backbone, probe, attn_implementation, packing, gradient_checkpointing)
    model = ValueModel(backbone, seed, value_head_prefix, statistics)
    if head_1H is not None:
        with torch.no_grad():
            model.score.weight.copy_(head_1H)
    return model


def token_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0, with_entropy: bool = False) -> TokenOutput:
    """Log-probability of each token of `batch` given the tokens before it.

    They are computed from the states that the output layer is given, so that the logits of all tokens never exist;
    from the logits where the model changes them, where the output layer has an adapter, and where the model was not
    loaded by `load_policy`.

    Args:
        model: causal language model, or an engine around one; gradients flow where they are enabled.
        batch: with column `tokens`; only padding is made here, so the batch should be one micro-batch.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        with_entropy: also compute the entropy, which costs a second pass over the logits.
    """
    context, scale = context_of(model), temperature or 1.0
    # Whole logits are read once at each place, as is a row that ranks share.
    one_follower = context is not None or plain_head(model) is None
    inputs, state_M, follower_M = _predecessors(model, batch, one_follower)
    label_M, places = batch["tokens"].to(state_M.device, torch.int64)[follower_M], inputs["input_ids"].numel()
    row_M = state_M if context is not None or places < len(state_M) else None
    if row_M is not None:
        state_M, label_M, row_M = _once_per_place(row_M, label_M, inputs["input_ids"].shape[1])
    if context is None:
        columns = _columns(model, inputs, state_M, label_M, scale, with_entropy)
    else:
        label_S = context.stretch(label_M[None])[0]
        own = _columns(model, context.inputs(inputs), state_M[: len(label_S)], label_S, scale, with_entropy)
        columns = [None if x_S is None else context.whole(x_S, places) for x_S in own]
    if row_M is not None:
        columns = [None if x_M is None else x_M[row_M] for x_M in columns]
    output_N = [None if x_M is None else _scatter(x_M, follower_M, batch.num_tokens) for x_M in columns]
    assert output_N[0] is not None
    return TokenOutput(logprob_N=output_N[0], entropy_N=output_N[1] if with_entropy else None)


def _once_per_place(place_M: Tensor, label_M: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """What sequences share is read once: every place of the row has one label, and where sequences go on differently
    after it, the other labels follow behind.

    Returns:
        [E] places; [E] their labels; [M] which of these entries each of the [M] pairs of place and label is.
    """
    place_U = torch.arange(places, device=place_M.device)
    label_U = torch.zeros_like(place_U).scatter_(0, place_M, label_M)
    is_other_M = label_U[place_M] != label_M
    place_E, label_E = torch.cat([place_U, place_M[is_other_M]]), torch.cat([label_U, label_M[is_other_M]])
    behind = torch.arange(places, len(place_E), device=place_M.device)
    return place_E, label_E, place_M.masked_scatter(is_other_M, behind)


def _columns(
    model: nn.Module, inputs: dict[str, Any], state_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
) -> list[Tensor | None]:
    """[M] log-probabilities of the labels after these states of a call of the model, and [M] entropies or None."""
    head = plain_head(model)
    if head is None:
        logits_RV = model(**inputs).logits.flatten(0, 1)
        return list(label_logprobs(logits_RV, state_M, label_M, scale=scale, with_entropy=with_entropy))
    with logprobs_for_logits(head, state_M, label_M, scale, with_entropy):
        return list(model(**inputs).logits[0].unbind(-1))


def policy_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """[N] of `token_logprobs` alone."""
    return token_logprobs(model, batch, temperature).logprob_N


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """[N] float32: value of the state before each token; 0 for the first token of a sequence."""
    inputs, state_M, follower_M = _predecessors(model, batch)
    return _scatter(_row_values(model, inputs)[state_M], follower_M, batch.num_tokens)


def state_values(model: nn.Module, batch: Batch) -> Tensor:
    """[N] float32: value of the state after each token."""
    if packs(model):
        inputs, place_N = packed_inputs(batch, SHORTEST if shares_prompts(model) else None)
        value_U = _row_values(model, inputs)
        return value_U if place_N is None else value_U[place_N]
    return batch.unpad(model(**_padded_inputs(batch.padded("tokens", 0))), batch.lengths)


def _row_values(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Values of all states of a call, laid flat."""
    context = context_of(model)
    if context is None:
        return model(**inputs).flatten()
    return context.whole(model(**context.inputs(inputs))[0], inputs["input_ids"].numel())


def evaluate(
    batch: Batch, plan: list[Tensor], device: torch.device | str, compute: Callable[[Batch], Tensor]
) -> Tensor:
    """Apply `compute` to a batch in micro-batches, without gradients.

    Args:
        batch: B sequences.
        plan: positions of each micro-batch, together every sequence once.
        device: where `compute` wants its micro-batch.
        compute: micro-batch of n tokens -> [n].

    Returns:
        [N] on the CPU, in the order of `batch`.
    """
    if not plan:
        return torch.zeros(0)
    parts = list[Tensor]()
    with torch.no_grad():
        for index in plan:
            parts.append(compute(batch.select(index).to(device)).cpu())
            beat()
    order_B = torch.cat(plan)
    shuffled = Batch(batch.lengths[order_B], {"result": torch.cat(parts)})
    return shuffled.select(order_B.argsort())["result"]


def _padded_inputs(tokens_BT: Tensor) -> dict[str, Any]:
    # No attention mask: the padding is on the right, where a causal model's real tokens cannot see it, and
    # without a mask the fast causal kernels apply. No position_ids either: with them transformers looks for
    # packed sequences.
    return {"input_ids": tokens_BT, "use_cache": False}


def _predecessors(model: nn.Module, batch: Batch, one_follower: bool = False) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What `model` is called with, and for each token that has one before it the place of the predecessor's state.

    The last token of a sequence predicts nothing, and is left out where that saves something. For `one_follower` see
    `runs_of`.

    Returns:
        The arguments of the call; [M] places among all states; [M] places of the tokens among all tokens.
    """
    tokens_N = batch["tokens"]
    sequence_N, position_N = batch.sequence_ids, batch.packed().positions
    follower_M = (position_N > 0).nonzero().squeeze(1)
    if packs(model):
        lengths_B = batch.lengths - 1
        before = Batch(lengths_B[lengths_B > 0], {"tokens": tokens_N[follower_M - 1]})
        if not len(follower_M):
            # The model is still called: where it is partitioned, other ranks wait for this one.
            before = Batch.from_rows({"tokens": [[0]]}).to(tokens_N.device)
        shortest = SHORTEST if shares_prompts(model) else None
        inputs, place_M = packed_inputs(before, shortest, one_follower=one_follower)
        in_order_M = torch.arange(len(follower_M), device=tokens_N.device)
        return inputs, in_order_M if place_M is None else place_M, follower_M
    longest = int(batch.lengths.max()) if len(batch) else 0
    tokens_BT = batch.padded("tokens", 0)[:, : max(1, longest - 1)]
    state_M = sequence_N[follower_M] * tokens_BT.shape[1] + position_N[follower_M] - 1
    return _padded_inputs(tokens_BT), state_M, follower_M


def _scatter(x_M: Tensor, follower_M: Tensor, num_tokens: int) -> Tensor:
    return x_M.new_zeros(num_tokens).index_copy(0, follower_M, x_M)


def keep_freed_memory(model: nn.Module) -> None:
    """Let this process use again what its tensors leave free, up to a gigabyte, where a small model computes on a CPU,
    and give back to the system every megabyte that a large one does.

    glibc gives every block of 32 MB or more back to the system and asks for it anew, empty: the activations of a
    training step then cost a page fault for each 4 KB. Measured: 12% of the CPU time of a step of 11,000 tokens, with
    0.4 million parameters. The wider a model, the less: the bytes of a token grow with the width, its computation with
    the square of that. But the gradients of a large model, which stay, would lie in what is left free of the large
    blocks that they are reduced from, and the next layer's block would not fit there. (A gigabyte written into new
    blocks of 8 MiB took 0.97 CPU seconds, and 0.19 into kept ones.)
    """
    if torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    kept = 2**30 if sum(parameter.numel() for parameter in model.parameters()) <= _SMALL else 2**20
    # Older versions refuse more than 32 MB. Only then the other: alone it would freeze this one where it is.
    if library.mallopt(_MMAP_THRESHOLD, kept) or library.mallopt(_MMAP_THRESHOLD, 2**25):
        library.mallopt(_TRIM_THRESHOLD, kept)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, transformers draws no bars, which would fill the logs of many processes, and reports no weights that a
    backbone leaves unread, such as a head that we read ourselves.
    """
    from transformers.utils import logging

    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]


def _state_size(config: PretrainedConfig) -> int:
    """Numbers in the state that a backbone gives per token; OPT may project it to the size of its embeddings."""
    text: Any = config.get_text_config()
    return getattr(text, "word_embed_proj_dim", None) or text.hidden_size


def score_statistics(config: PretrainedConfig, path: str | Path) -> tuple[float, float]:
    """Mean and standard deviation of the scores, as the training of the reward model wrote them down.

    Raises:
        ValueError: they are not in the model's config.json, or cannot be used.
    """
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    is_mean = isinstance(mean, int | float) and math.isfinite(mean)
    is_std = isinstance(std, int | float) and 0 < std < math.inf
    if not (is_mean and is_std):
        raise ValueError(
            f"config.json of {path} has mean={mean} and std={std}; to normalise takes a finite mean and a positive "
            "std, as a reward model's training writes them there; set them there, or do not normalise"
        )
    return float(mean), float(std)  # pyright: ignore[reportArgumentType]: they are numbers


def _stored_head(path: str | Path, prefix: str) -> Tensor | None:
    """The value head of a saved value or reward model, [1, H]; None when there is none."""
    for file in sorted(model_folder(path).glob("*.safetensors")):
        with TensorReader(file) as weights:
            if f"{prefix}.bias" in weights:
                raise ValueError(
                    f"{path} has a {prefix}.bias: a head of another kind, whose scores would be wrong here; use "
                    "a model that AutoModelForSequenceClassification of a causal architecture wrote"
                )
            if f"{prefix}.weight" in weights:
                return weights.whole(f"{prefix}.weight")
    return None
