"""Generation on a GPU without waiting for it at every token.

The host reads one small tensor every `CHECK_EVERY` tokens: the rows that are unfinished. It removes finished rows then,
and ends the loop if there are none. Between these reads it only queues kernels.

A token is drawn by the Gumbel-max trick in float32: the argument of the maximum of log-probability plus Gumbel noise.
The noise is a hash of (seed, step, prompt, sample, position, token), so tokens do not depend on the batch. They differ
from the tokens that the hf engine draws on a CPU. The inversion of the cumulative distribution, which it uses there,
needs float64 sums over the vocabulary.

Legend: `R` rows, `A` rows in the cache, `K` maximum number of new tokens, `J` following tokens, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from components.generate.hf_engine import Rows, likeliest
from components.generate.sampling import request_seeds
from components.process.heartbeat import beat
from plugins.fast_decode.attention import uses_grouped_decoding
from plugins.fast_decode.cache import is_plain

if TYPE_CHECKING:
    from components.batch import Batch
    from components.generate.config import SamplingConfig
    from components.generate.hf_engine import HFRolloutEngine

CHECK_EVERY = 16
"""Number of tokens between two reads of the device. Up to this number of steps are computed in vain at the end."""
_DROP_BELOW = 31 / 32
"""Share of unfinished rows at or below which finished rows are removed from the cache."""
_AHEAD = 32
"""Number of token positions whose hashes are computed together."""
_CHUNK_ELEMENTS = 2**26
"""Maximum number of random numbers that are in memory at a time."""
_GOLDEN = 0x9E3779B9 - 2**32
_MULTIPLIERS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
"""Constants of the 32-bit finaliser of MurmurHash3 (Appleby, public domain), as signed numbers."""


class DeviceRows(Rows):
    """State of rows that are being generated, which stays on the device."""

    def __init__(self, prompts: Batch, sampling: SamplingConfig, device: torch.device) -> None:
        super().__init__(prompts, sampling, device)
        self._has_nan = torch.zeros(1, dtype=torch.bool, device=device)

    def draw(self, logits_AV: Tensor, k: int, sampling: SamplingConfig, end_tokens: Tensor) -> Tensor:
        if k % _AHEAD == 0:
            ids = self.prompt_id_R[:, None], self.sample_id_R[:, None]
            positions = self.prompt_length_R[:, None] + range(k, k + _AHEAD)
            seed_RJ = request_seeds(sampling.seed, sampling.step, *ids, positions)
            # Hashed on the host, 32 positions at a time, and copied without waiting for the kernels before.
            halves = torch.from_numpy(seed_RJ.view(np.int32)).unflatten(1, (_AHEAD, 2))
            self._seed_RJ2 = halves.to(logits_AV.device, non_blocking=True)
        logprob_AV = logits_AV.float()
        if sampling.temperature not in (0, 1):
            logprob_AV = logprob_AV / sampling.temperature
        if not sampling.is_full_vocabulary:
            logprob_AV = likeliest(logprob_AV, sampling.top_p, sampling.top_k)
        logprob_AV = logprob_AV.log_softmax(-1)
        # A single NaN makes its whole row NaN in log_softmax. The flag is read at the next check.
        self._has_nan |= logprob_AV[:, 0].isnan().any()
        if sampling.temperature == 0:
            token_A = logprob_AV.argmax(-1)
        else:
            token_A = gumbel_max(logprob_AV, self._seed_RJ2[self.cached_A, k % _AHEAD])
        # Further tokens of finished rows are beyond their length, and are ignored.
        self.tokens_RK[self.cached_A, k] = token_A
        self.logprob_RK[self.cached_A, k] = logprob_AV.gather(1, token_A[:, None]).squeeze(1)
        ends_A = torch.isin(token_A, end_tokens) & self.unfinished(k)
        # A boolean index would make the host wait for the number of rows that end.
        self.length_R[self.cached_A] = torch.where(ends_A, k + 1, self.length_R[self.cached_A])
        self.ended_R[self.cached_A] = self.ended_R[self.cached_A] | ends_A
        return token_A

    def rows_to_keep(self, k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the indices of the rows in the cache that need a k-th new token. The last ones fill the gaps.

        Raises:
            FloatingPointError: a logit was not a number.
        """
        flags = torch.cat([self._has_nan, self.unfinished(k)]).cpu().numpy()
        if flags[0]:
            raise FloatingPointError(
                "the policy's logits are not finite: its weights have diverged, or were damaged; go back to an earlier "
                "checkpoint, and lower train.learning_rate"
            )
        unfinished = flags[1:]
        keep = np.arange(int(unfinished.sum()))
        gaps = np.flatnonzero(~unfinished[: len(keep)])
        keep[gaps] = len(keep) + np.flatnonzero(unfinished[len(keep) :])
        return keep


def generate_rows(engine: HFRolloutEngine, prompts: Batch, sampling: SamplingConfig) -> Rows:
    """Generate all rows together. Finished rows are removed from the cache at the next check."""
    rows = DeviceRows(prompts, sampling, engine.device)
    cache, logits_AV, mask_AS = engine.prefill(prompts, sampling.max_new_tokens)
    position_A = prompts.lengths.to(engine.device)
    longest = int(prompts.lengths.max())
    if mask_AS is not None and is_plain(cache) and uses_grouped_decoding(engine.model):
        # From a mask of two dimensions transformers makes one of four for each token, and reads it.
        mask_AS = mask_AS.bool()[:, None, None]
    for k in range(sampling.max_new_tokens):
        token_A = rows.draw(logits_AV, k, sampling, engine.end_tokens)
        # A long generation must not look like a hung worker.
        beat()
        is_last = k + 1 == sampling.max_new_tokens
        if is_last or (k + 1) % CHECK_EVERY == 0:
            rows_kept = rows.rows_to_keep(k + 1)
            if is_last or not len(rows_kept):
                break
            # Removing rows copies the cache, so removing each row at once would cost more than it saves.
            if len(rows_kept) <= len(token_A) * _DROP_BELOW:
                keep = torch.from_numpy(rows_kept).to(engine.device)
                cache.batch_select_indices(keep)
                rows.cached_A, token_A, position_A = rows.cached_A[keep], token_A[keep], position_A[keep]
                if mask_AS is not None:
                    mask_AS = mask_AS[keep]
        mask = mask_AS
        if mask is not None:
            mask = mask[..., : longest + k + 1]
        # Finished rows that remain in the cache may exceed the positions of the model.
        position = (position_A + k).clamp(max=(engine.positions or 2**31) - 1)
        logits_AV = next_logits(engine.model, token_A, mask, position, cache)
    return rows


def next_logits(model: Any, token_A: Tensor, mask_AS: Tensor | None, position_A: Tensor, cache: Any) -> Tensor:
    """Compute the logits after one more token of each row, [A, V]. A CUDA graph would replace this function."""
    return model(
        input_ids=token_A[:, None],
        attention_mask=mask_AS,
        position_ids=position_A[:, None],
        past_key_values=cache,
        use_cache=True,
    ).logits[:, -1]


def gumbel_max(logprob_AV: Tensor, seed_A2: Tensor) -> Tensor:
    """Draw one token for each row, [A] int64.

    Args:
        logprob_AV: [A, V] float32 log-probabilities.
        seed_A2: [A, 2] int32 hash of the position at which the token is drawn.
    """
    rows = max(1, _CHUNK_ELEMENTS // logprob_AV.shape[1])
    pieces = zip(logprob_AV.split(rows), seed_A2.split(rows), strict=True)
    return torch.cat([(logprob - log_exponential(seed, logprob.shape[1])).argmax(-1) for logprob, seed in pieces])


def log_exponential(seed_A2: Tensor, vocabulary: int) -> Tensor:
    """Return the logarithm of exponential random numbers, [A, V] float32, which is Gumbel noise with the other sign.

    The largest noise decides, and belongs to the smallest exponential number. It is computed from the smallest uniform
    number, where float32 has the most digits: multiples of 2**-31 near 0 are exact.
    """
    token_V = torch.arange(vocabulary, dtype=torch.int32, device=seed_A2.device) * _GOLDEN
    # Two rounds, because the seeds of neighbouring positions and the numbers of tokens are mixed separately.
    bits_AV = _mixed(_mixed(token_V + seed_A2[:, :1]) ^ seed_A2[:, 1:])
    uniform_AV = ((bits_AV & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return uniform_AV.neg_().log1p_().neg_().log_()


def _mixed(bits: Tensor) -> Tensor:
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        # The shift keeps the sign of int32, so the copies of the sign bit are masked out.
        bits = (bits ^ ((bits >> shift) & (2 ** (32 - shift) - 1))) * multiplier
    return bits ^ ((bits >> 16) & 0xFFFF)
