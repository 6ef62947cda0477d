"""Rollout engine `hf`: a transformers model in this process. It is exact, and fast for tiny models.

Legend: `B` sequences, `N` all tokens of the batch end to end, `R` rows that are generated together, `U`
distinct prompts among them, `S` length of the longest prompt among them, `A` rows still in the cache, `K` maximum
number of new tokens, `J` following tokens, `V` vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.decoding import Decoding
from components.generate.engine import Completions, RolloutEngine, limits
from components.generate.sampling import uniform
from components.models.device import compute_device
from components.models.end_tokens import listed_ids
from components.models.loading import load_policy
from components.models.precision import compute_in, round_products
from components.process.heartbeat import beat
from components.registry import find, load
from components.weights.publisher import WeightHandle, read_weights
from components.weights.verification import open_digests

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import DynamicCache

# Maximum number of float64 probabilities that are computed at a time. With a large vocabulary, those of all rows
# together would be the largest tensor in memory.
_CHUNK_ELEMENTS = 2**25
# Finished rows are removed from the cache when at most this share of its rows is unfinished. Removing rows copies the
# cache, so removing each row at once would cost more than it saves.
_DROP_BELOW = 31 / 32
# Number of token positions for which random numbers are computed together. One call per token would take longer.
_AHEAD = 32


class Rows:
    """State of R rows that are being generated: their tokens, and the rows that are still in the cache."""

    def __init__(self, prompts: Batch, sampling: SamplingConfig, device: torch.device) -> None:
        self.prompt_id_R = prompts["prompt_id"].numpy()
        self.sample_id_R = prompts["sample_id"].numpy()
        self.prompt_length_R = prompts.lengths.numpy()
        self.tokens_RK = torch.zeros(len(prompts), sampling.max_new_tokens, dtype=torch.int64, device=device)
        self.logprob_RK = torch.zeros(len(prompts), sampling.max_new_tokens, device=device)
        self.length_R = limits(prompts, sampling).to(device, copy=True)
        # Without limits of single rows the comparison in `unfinished`, at every token, is left out.
        self.limit_R = self.length_R.clone() if "max_new_tokens" in prompts else None
        self.ended_R = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.cached_A = torch.arange(len(prompts), device=device)
        """[A] int64, indices among the R rows of the rows in the cache, in the order of the cache."""

    def draw(self, logits_AV: Tensor, k: int, sampling: SamplingConfig, end_tokens: Tensor) -> Tensor:
        """Sample the k-th new token of each row in the cache, append it, and return the tokens, [A] int64."""
        if k % _AHEAD == 0:
            ids = self.prompt_id_R[:, None], self.sample_id_R[:, None]
            positions = self.prompt_length_R[:, None] + range(k, k + _AHEAD)
            self.uniform_RJ = uniform(sampling.seed, sampling.step, *ids, positions)
        uniform_A = self.uniform_RJ[self.cached_A.cpu().numpy(), k % _AHEAD]
        token_A, logprob_A = _draw(logits_AV, sampling, uniform_A)
        self.tokens_RK[self.cached_A, k] = token_A
        self.logprob_RK[self.cached_A, k] = logprob_A
        # Finished rows remain in the cache for a while. Their further tokens are beyond their length and are ignored.
        ends_A = torch.isin(token_A, end_tokens) & self.unfinished(k)
        self.length_R[self.cached_A[ends_A]] = k + 1
        self.ended_R[self.cached_A[ends_A]] = True
        return token_A

    def unfinished(self, k: int) -> Tensor:
        """Return [A] bool, True for the rows that need a k-th new token."""
        open_A = ~self.ended_R[self.cached_A]
        if self.limit_R is not None:
            open_A &= self.limit_R[self.cached_A] > k
        return open_A


class HFRolloutEngine(RolloutEngine):
    """Rollout engine that generates with a transformers model in this process."""

    def __init__(self, model_path: str | Path, config: HFRolloutConfig | None = None) -> None:
        """
        Args:
            model_path: folder or hub name of a causal model. See end_tokens.py for the tokens that end a response.
            config: configuration of the engine. Default: `HFRolloutConfig()`.
        """
        super().__init__()
        self.config = config or HFRolloutConfig()
        # With its index, because the engine may run in another thread with another current device.
        self.device = compute_device()
        self.model: Any = load_policy(model_path, dtype=self.config.weights_dtype).eval().requires_grad_(False)
        round_products(self.model, self.config.precision)
        compute_in(self.model, self.config.precision, self.device)
        self.model.to(self.device)
        self._decoding: Decoding = (find("decoding", "fast") or Decoding)()
        self._decoding.prepare(self.model)
        end_tokens = listed_ids(self.model.generation_config.eos_token_id)
        self.end_tokens = torch.tensor(end_tokens, dtype=torch.int64, device=self.device)
        self.positions = getattr(self.model.config, "max_position_embeddings", None)

    def _complete(self, prompts: Batch, sampling: SamplingConfig) -> Completions:
        # Rows of similar length are generated together, so that little of a chunk is padding.
        order_B = prompts.lengths.argsort(stable=True)
        chunks = order_B.split(self.config.max_num_seqs)
        with torch.inference_mode():
            # Without prompts, `split` returns a single empty chunk, which cannot be generated.
            parts = [self._generate_rows(prompts.select(index_R), sampling) for index_R in chunks if len(index_R)]
        place_B = order_B.argsort()

        def column(pieces: list[Tensor], empty: Tensor) -> Tensor:
            return torch.cat([piece.cpu() for piece in pieces] or [empty])[place_B]

        none_BK = torch.zeros(0, sampling.max_new_tokens)
        return Completions(
            tokens_BK=column([part.tokens_RK for part in parts], none_BK.long()),
            logprob_BK=column([part.logprob_RK for part in parts], none_BK),
            length_B=column([part.length_R for part in parts], torch.zeros(0, dtype=torch.int64)),
            ended_B=column([part.ended_R for part in parts], torch.zeros(0, dtype=torch.bool)),
        )

    def _load(self, handle: WeightHandle, with_digests: bool) -> dict[str, str]:
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        digests = open_digests() if with_digests else None
        for name, tensor in read_weights(handle, writable=False):
            target = targets[name].data.copy_(tensor)
            if digests is not None:
                # The digest of the weights in use also detects an error of the copy. With another dtype it would always
                # differ, so the received tensor is used then.
                digests.add(name, target if target.dtype == tensor.dtype else tensor)
        return {} if digests is None else digests.result()

    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        targets = self.model.named_parameters(remove_duplicate=False)
        return {name: (tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in targets}

    def _sleep(self, level: int) -> int:
        held = list(self.model.buffers())
        discarded = list(self.model.parameters())
        if level == 1:
            held += discarded
            discarded = []
        # Loaded at the first sleep, because most engines never sleep.
        host_copies = load("sleep", "host copies", "placement.engines_sleep=true")
        self._copies = host_copies(held, discarded, self.device.type)
        return self._copies.nbytes

    def _wake(self, for_weights: bool) -> None:  # noqa: ARG002 - the weights are all it has
        self._copies.restore()

    def _generate_rows(self, prompts: Batch, sampling: SamplingConfig) -> Rows:
        """Generate all rows together. A row is removed from the cache soon after its last token."""
        if loop := self._decoding.loop(self):
            return loop(prompts, sampling)
        rows = Rows(prompts, sampling, self.device)
        cache, logits_AV, mask_AS = self.prefill(prompts, sampling.max_new_tokens)
        position_A = prompts.lengths.to(self.device)
        longest = int(prompts.lengths.max())
        for k in range(sampling.max_new_tokens):
            token_A = rows.draw(logits_AV, k, sampling, self.end_tokens)
            # A long generation must not look like a hung worker.
            beat()
            unfinished_A = rows.unfinished(k + 1)
            remaining = int(unfinished_A.sum())
            if remaining == 0 or k + 1 == sampling.max_new_tokens:
                break
            if remaining <= len(token_A) * _DROP_BELOW:
                keep = _fill_gaps(unfinished_A, remaining)
                cache.batch_select_indices(keep)
                rows.cached_A, token_A, position_A = rows.cached_A[keep], token_A[keep], position_A[keep]
                if mask_AS is not None:
                    mask_AS = mask_AS[keep]
            logits_AV = self.model(
                input_ids=token_A[:, None],
                attention_mask=None if mask_AS is None else mask_AS[:, : longest + k + 1],
                # Finished rows that remain in the cache may exceed the positions of the model.
                position_ids=(position_A + k).clamp(max=(self.positions or 2**31) - 1)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        return rows

    def prefill(self, prompts: Batch, max_new_tokens: int) -> tuple[DynamicCache, Tensor, Tensor | None]:
        """Compute the prompts, each distinct one once.

        Returns:
            The cache of all R rows; the logits after their last tokens, [R, V]; the attention mask over the positions
            of the prompts and of all new tokens, [R, S + K], or None if no row is padded.
        """
        # Padding is -1, because with 0 the left-padded rows [0, 5] and [5] would be the same.
        tokens_RS = prompts.padded("tokens", -1, side="left").to(self.device, torch.int64)
        tokens_US, place_R = tokens_RS.unique(dim=0, return_inverse=True)
        real_US = tokens_US >= 0
        mask_US = position_US = mask_RS = None
        if not bool(real_US.all()):
            mask_US = real_US.long()
            position_US = (real_US.cumsum(1) - 1).clamp(min=0)
            mask_RS = nn.functional.pad(mask_US[place_R], (0, max_new_tokens), value=1)
        cache = self._decoding.new_cache(self.model)
        logits_U1V = self.model(
            input_ids=tokens_US.clamp(min=0),
            attention_mask=mask_US,
            position_ids=position_US,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        # The samples of a prompt share its computation: the cache of each distinct prompt is copied to its rows.
        cache.batch_select_indices(place_R)
        return cache, logits_U1V[place_R, -1], mask_RS


def _fill_gaps(unfinished_A: Tensor, remaining: int) -> Tensor:
    """Return the indices of the unfinished rows, [remaining] int64. The last rows fill the gaps of finished ones, so
    that few rows move.
    """
    keep = torch.arange(remaining, device=unfinished_A.device)
    gaps = (~unfinished_A[:remaining]).nonzero().squeeze(1)
    keep[gaps] = remaining + unfinished_A[remaining:].nonzero().squeeze(1)
    return keep


def _draw(logits_AV: Tensor, sampling: SamplingConfig, uniform_A: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Sample one token for each row, by inversion of its cumulative distribution.

    The distribution is summed in float64. With 100,000 tokens, the rounding error of a float32 sum exceeds many of the
    probabilities.

    Args:
        logits_AV: [A, V] logits.
        sampling: sampling parameters.
        uniform_A: [A] uniform random numbers in [0, 1).

    Returns:
        [A] int64 tokens, and [A] float32 log-probabilities in nats.

    Raises:
        FloatingPointError: a row has a logit that is not a number.
    """
    logprob_AV = logits_AV.float()
    if sampling.temperature not in (0, 1):
        logprob_AV = logprob_AV / sampling.temperature
    if not sampling.is_full_vocabulary:
        logprob_AV = likeliest(logprob_AV, sampling.top_p, sampling.top_k)
    logprob_AV = logprob_AV.log_softmax(-1)
    # A single NaN makes its whole row NaN in log_softmax, so the first column shows it.
    if bool(logprob_AV[:, 0].isnan().any()):
        raise FloatingPointError(
            "the policy's logits are not finite: its weights have diverged, or were damaged; go back to an earlier "
            "checkpoint, and lower train.learning_rate"
        )
    if sampling.temperature == 0:
        token_A = logprob_AV.argmax(-1)
    else:
        rows = max(1, _CHUNK_ELEMENTS // logits_AV.shape[1])
        thresholds = torch.from_numpy(uniform_A).to(logits_AV.device).split(rows)
        pieces = zip(logprob_AV.split(rows), thresholds, strict=True)
        token_A = torch.cat([_invert(logprob, threshold) for logprob, threshold in pieces])
    return token_A, logprob_AV.gather(1, token_A[:, None]).squeeze(1)


def likeliest(logits_AV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return [A, V] logits with -inf for the tokens that top_k excludes, and that top_p then excludes among the
    rest.
    """
    sorted_AV, token_AV = logits_AV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_AV[:, top_k:] = -torch.inf
    # A token is kept while the sum of the more likely tokens is below top_p, so the most likely token is always kept.
    before_AV = sorted_AV.softmax(-1).cumsum(-1).roll(1, -1)
    before_AV[:, 0] = 0
    sorted_AV[before_AV >= top_p] = -torch.inf
    return torch.empty_like(sorted_AV).scatter_(-1, token_AV, sorted_AV)


def _invert(logprob_AV: Tensor, uniform_A: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the uniform number, [A] int64.

    A token with probability 0 is never returned.
    """
    cumulative_AV = logprob_AV.double().exp().cumsum(-1)
    threshold_A1 = (uniform_A * cumulative_AV[:, -1])[:, None]
    return torch.searchsorted(cumulative_AV, threshold_A1, right=True).squeeze(1)
