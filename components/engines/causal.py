"""Causal language models over ragged batches: log-probabilities of tokens, and values of states.

Legend: `B` sequences, `T` longest sequence, `N` all tokens of the batch end to end, `M = N - B` tokens that
have a token before them, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from components.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Logits in float32 are the largest thing in memory; beyond this many elements they are handled in pieces.
_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class TokenOutput:
    """What a policy says about the tokens of a batch."""

    logprob_N: Tensor
    """[N] float32, in nats; 0 for the first token of a sequence."""
    entropy_N: Tensor | None
    """[N] float32, in nats, of the distribution the token was drawn from; None unless asked for."""


def load_policy(path: str | Path, dtype: str = "float32", gradient_checkpointing: bool = False) -> PreTrainedModel:
    """A causal language model from a folder or a hub name.

    Args:
        path: what `from_pretrained` takes.
        dtype: of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
    """
    from transformers import AutoModelForCausalLM

    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=_torch_dtype(dtype))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class ValueModel(nn.Module):
    """A transformer with one number per state instead of a distribution over the next token."""

    def __init__(self, backbone: PreTrainedModel, seed: int = 0) -> None:
        super().__init__()
        self.backbone = backbone
        hidden = backbone.config.hidden_size
        self.score = nn.Linear(hidden, 1, bias=False, dtype=backbone.dtype)
        # Small, so that the first values are near 0 and advantages are the rewards; the same on all ranks.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.score.weight.copy_(torch.randn(1, hidden, generator=generator) / (hidden + 1))

    def forward(self, **inputs: Any) -> Tensor:
        """[B, T] float32 values of the states after each input token."""
        return self.score(self.backbone(**inputs).last_hidden_state).squeeze(-1).float()

    def save_pretrained(self, path: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the folder that `load_value_model` and transformers' `...ForSequenceClassification` load.

        Args:
            path: folder, made when missing.
            state_dict: written instead of the model's own parameters (partitioned ones are empty).
        """
        from safetensors.torch import save_file
        from transformers import AutoModelForSequenceClassification

        prefix = self.backbone.base_model_prefix
        weights = {
            name.replace("backbone.", f"{prefix}.", 1): tensor.detach().cpu().contiguous()
            for name, tensor in (state_dict or dict(self.named_parameters())).items()
        }
        config = copy.deepcopy(self.backbone.config)
        config.num_labels = 1
        classifier: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        config.architectures = [classifier.__name__] if classifier else None
        Path(path).mkdir(parents=True, exist_ok=True)
        config.save_pretrained(path)
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})


def load_value_model(
    path: str | Path, dtype: str = "float32", gradient_checkpointing: bool = False, seed: int = 0
) -> ValueModel:
    """A value model from a value model's folder, a reward model's, or any policy's.

    Args:
        path: what `from_pretrained` takes.
        dtype: of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: as in `load_policy`.
        seed: of the value head, where the folder has none.
    """
    from transformers import AutoModel

    with without_progress_bars():
        backbone = AutoModel.from_pretrained(path, dtype=_torch_dtype(dtype))
    if gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = ValueModel(backbone, seed=seed)
    head_1H = _stored_head(path)
    if head_1H is not None:
        if head_1H.shape != model.score.weight.shape:
            raise ValueError(
                f"score.weight of {path} has shape {list(head_1H.shape)}, not {list(model.score.weight.shape)}: "
                "it scores several classes; use a model with num_labels=1"
            )
        with torch.no_grad():
            model.score.weight.copy_(head_1H)
    return model


def token_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0, with_entropy: bool = False) -> TokenOutput:
    """Log-probability of each token of `batch` given the tokens before it.

    Args:
        model: causal language model, or an engine around one; gradients flow where they are enabled.
        batch: with column `tokens`; only padding is made here, so the batch should be one micro-batch.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        with_entropy: also compute the entropy, which costs a second pass over the logits.
    """
    scale = temperature or 1.0
    tokens_BT = batch.padded("tokens", 0)
    logits_BTV = _forward(model, tokens_BT).logits
    state_M, follower_M = _predecessors(batch, tokens_BT)
    logits_MV = logits_BTV.flatten(0, 1)[state_M]
    label_M = batch["tokens"].to(tokens_BT.device, torch.int64)[follower_M]
    rows = max(1, _CHUNK_ELEMENTS // logits_MV.shape[1])
    if len(label_M) <= rows:
        logprob_M, entropy_M = _label_logprobs(logits_MV, label_M, scale, with_entropy)
    else:
        # Checkpointed, or autograd would keep each piece's float32 copy and the pieces would save nothing.
        pieces = [
            checkpoint(_label_logprobs, logits, label, scale, with_entropy, use_reentrant=False)
            for logits, label in zip(logits_MV.split(rows), label_M.split(rows), strict=True)
        ]
        logprob_M, entropy_M = (torch.cat(column) for column in zip(*pieces, strict=True))
    entropy_N = _scatter(entropy_M, follower_M, batch.num_tokens) if with_entropy else None
    return TokenOutput(logprob_N=_scatter(logprob_M, follower_M, batch.num_tokens), entropy_N=entropy_N)


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """[N] float32: value of the state before each token; 0 for the first token of a sequence."""
    tokens_BT = batch.padded("tokens", 0)
    value_BT = _forward(model, tokens_BT)
    state_M, follower_M = _predecessors(batch, tokens_BT)
    return _scatter(value_BT.flatten()[state_M], follower_M, batch.num_tokens)


def evaluate(batch: Batch, max_tokens: int, device: torch.device | str, compute: Callable[[Batch], Tensor]) -> Tensor:
    """Apply `compute` to a batch in micro-batches, without gradients.

    Args:
        batch: B sequences.
        max_tokens: of a micro-batch, its padding included.
        device: where `compute` wants its micro-batch.
        compute: micro-batch of n tokens -> [n].

    Returns:
        [N] on the CPU, in the order of `batch`.
    """
    plan = batch.micro_batch_indices(max_tokens)
    if not plan:
        return torch.zeros(0)
    with torch.no_grad():
        parts = [compute(batch.select(index).to(device)).cpu() for index in plan]
    order_B = torch.cat(plan)
    shuffled = Batch(batch.lengths[order_B], {"result": torch.cat(parts)})
    return shuffled.select(order_B.argsort())["result"]


def _forward(model: nn.Module, tokens_BT: Tensor) -> Any:
    # No attention mask: the padding is on the right, where a causal model's real tokens cannot see it, and
    # without a mask the fast causal kernels apply. No position_ids either: with them transformers looks for
    # packed sequences.
    return model(input_ids=tokens_BT, use_cache=False)


def _predecessors(batch: Batch, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """For each token that has one before it: the predecessor's place in [B*T], and the token's in [N]."""
    device = tokens_BT.device
    sequence_N = batch.sequence_ids.to(device)
    position_N = torch.arange(batch.num_tokens, device=device) - batch.offsets.to(device)[sequence_N]
    follower_M = (position_N > 0).nonzero().squeeze(1)
    return sequence_N[follower_M] * tokens_BT.shape[1] + position_N[follower_M] - 1, follower_M


def _label_logprobs(logits_MV: Tensor, label_M: Tensor, scale: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    logits_MV = logits_MV.float()
    if scale != 1.0:
        logits_MV = logits_MV / scale
    logprob_MV = logits_MV.log_softmax(-1)
    logprob_M = logprob_MV.gather(1, label_M[:, None]).squeeze(1)
    if not with_entropy:
        return logprob_M, logprob_M
    # A token that a logits mask made impossible has probability 0 and log-probability -inf; it adds nothing.
    probability_MV = logprob_MV.exp()
    entropy_M = -torch.where(probability_MV > 0, probability_MV * logprob_MV, 0.0).sum(-1)
    return logprob_M, entropy_M


def _scatter(x_M: Tensor, follower_M: Tensor, num_tokens: int) -> Tensor:
    return x_M.new_zeros(num_tokens).index_copy(0, follower_M, x_M)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, transformers draws no bars: many processes that load and save would fill the logs with them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]


def _stored_head(path: str | Path) -> Tensor | None:
    """The value head of a saved value or reward model, [1, H]; None when there is none."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    # A hub name: its files are in the cache by now, because the backbone was loaded from them.
    folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=["*.safetensors"]))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            if "score.weight" in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                return weights.get_tensor("score.weight")
    return None
