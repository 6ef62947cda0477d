"""Generation with a transformers model in this process: exact, and fast for tiny models.

Legend: `B` sequences, `N` all tokens of the batch end to end, `R` rows that are generated together, `U`
different prompts among them, `S` longest prompt among them, `A` rows still in the cache, `K` most new tokens,
`V` vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import load_policy
from components.engines.config import HFRolloutConfig, SamplingConfig
from components.engines.decode_attention import use_grouped_decoding
from components.engines.sampling import uniform
from components.engines.weight_sync import WeightHandle, read_weights, weight_shapes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import DynamicCache

__all__ = ["HFRolloutConfig", "HFRolloutEngine", "SamplingConfig"]

# Float64 probabilities of all rows at once would be the largest thing in memory for a large vocabulary.
_CHUNK_ELEMENTS = 2**25
# Finished rows leave when no more than this share of the cache is unfinished: leaving takes a few operations.
_DROP_BELOW = 31 / 32


class _Rows:
    """R rows being generated: what they have, and which of them are still in the cache."""

    def __init__(self, prompts: Batch, max_new_tokens: int, device: torch.device) -> None:
        self.prompt_id_R = prompts["prompt_id"].numpy()
        self.sample_id_R = prompts["sample_id"].numpy()
        self.prompt_length_R = prompts.lengths.numpy()
        self.tokens_RK = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
        self.logprob_RK = torch.zeros(len(prompts), max_new_tokens, device=device)
        self.length_R = torch.full((len(prompts),), max_new_tokens, device=device)
        self.ended_R = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.cached_A = torch.arange(len(prompts), device=device)
        """Places among the R of the A rows in the cache, in the cache's order."""

    def draw(self, logits_AV: Tensor, k: int, sampling: SamplingConfig, end_tokens: Tensor) -> Tensor:
        """Append the k-th new token to the cached rows; returns it, [A]."""
        places = self.cached_A.cpu().numpy()
        uniform_A = uniform(
            sampling.seed,
            sampling.step,
            self.prompt_id_R[places],
            self.sample_id_R[places],
            self.prompt_length_R[places] + k,
        )
        token_A, logprob_A = _draw(logits_AV, sampling.temperature, uniform_A)
        self.tokens_RK[self.cached_A, k] = token_A
        self.logprob_RK[self.cached_A, k] = logprob_A
        # Rows that have ended stay in the cache for a while: what they draw lies beyond their length.
        ends_A = torch.isin(token_A, end_tokens) & ~self.ended_R[self.cached_A]
        self.length_R[self.cached_A[ends_A]] = k + 1
        self.ended_R[self.cached_A[ends_A]] = True
        return token_A

    def unfinished(self) -> Tensor:
        """[A] bool."""
        return ~self.ended_R[self.cached_A]


class HFRolloutEngine:
    """Draws completions; holds its own copy of the weights, replaced by `receive`."""

    def __init__(self, model_path: str | Path, config: HFRolloutConfig | None = None) -> None:
        """
        Args:
            model_path: folder or hub name of a causal model; its generation_config names the end tokens.
            config: of this engine.
        """
        self.config = config or HFRolloutConfig()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = load_policy(model_path, dtype=self.config.dtype)
        self.model.to(self.device).eval()
        self.model.requires_grad_(False)
        use_grouped_decoding(self.model)
        self._weight_version = 0
        self._asleep = False
        end = self.model.generation_config.eos_token_id
        end_tokens = torch.tensor([] if end is None else end, dtype=torch.int64)
        self._end_tokens = end_tokens.view(-1).to(self.device)

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 = as loaded."""
        return self._weight_version

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Draw one completion for each prompt.

        Args:
            prompts: column `tokens`; per sequence `prompt_id` and `sample_id`, int64, which together with
                `sampling.seed` and `.step` fix the random numbers. Other per-sequence and object columns are
                carried through.
            sampling: how to draw.

        Returns:
            Batch in the order of `prompts`. Per token: `tokens` (prompt, completion, end token),
            `action_mask` (True on the completion, end token included), `rollout_logprob` (float32, at the
            sampling temperature; 0 on the prompt). Per sequence: `prompt_length`, `truncated` (no end token
            came), `weight_version`.
        """
        self._check(prompts, sampling)
        order_B = prompts.lengths.argsort(stable=True)
        chunks = order_B.split(self.config.max_rows) if len(prompts) else ()
        with torch.inference_mode():
            parts = [self._generate_rows(prompts.select(index_R), sampling) for index_R in chunks]
        return self._assemble(prompts, order_B, parts, sampling.max_new_tokens)

    def receive(self, handle: WeightHandle) -> None:
        """Copy published weights over the engine's own.

        Raises:
            ValueError: an older version than the one in use, or names or shapes that are not this model's; nothing was
                copied then.
            FileNotFoundError: the version is gone.
        """
        if handle.version < self._weight_version:
            raise ValueError(
                f"version {handle.version} of the weights is older than version {self._weight_version}, "
                "which this engine already uses; publish rising versions and receive the newest"
            )
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        self._check_fit(handle, targets)
        for name, tensor in read_weights(handle):
            targets[name].data.copy_(tensor)
        self._weight_version = handle.version

    def _check_fit(self, handle: WeightHandle, targets: dict[str, nn.Parameter]) -> None:
        """Compare what arrives with the model's parameters under all their names."""
        shapes = weight_shapes(handle)
        # With tied embeddings two names lead to one parameter, and the publisher sends one of them, or both.
        present = {targets[name].data_ptr() for name in shapes.keys() & targets.keys()}
        missing = sorted(name for name, parameter in targets.items() if parameter.data_ptr() not in present)
        unknown = sorted(shapes.keys() - targets.keys())
        misshapen = [
            f"{name} {list(shape)} instead of {list(targets[name].shape)}"
            for name, shape in sorted(shapes.items())
            if name in targets and shape != tuple(targets[name].shape)
        ]
        if missing or unknown or misshapen:
            raise ValueError(
                f"version {handle.version} of the weights at {handle.path} does not fit the engine's model: missing "
                f"{missing or 'nothing'}, unknown {unknown or 'nothing'}, of another shape {misshapen or 'nothing'}; "
                "trainer and engine must load the same architecture (check model paths and tie_word_embeddings)"
            )

    def sleep(self) -> None:
        """Free the accelerator's memory; the weights wait in host memory."""
        self.model.to("cpu")
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self.model.to(self.device)
        self._asleep = False

    def _check(self, prompts: Batch, sampling: SamplingConfig) -> None:
        if self._asleep:
            raise ValueError("this engine sleeps; call wake() before generate()")
        missing = [name for name in ("tokens", "prompt_id", "sample_id") if name not in prompts]
        if missing:
            raise ValueError(
                f"the prompts lack the columns {missing}; every prompt needs `tokens`, and a `prompt_id` and "
                "`sample_id` (int64, per sequence) from which its random numbers are derived"
            )
        if not len(prompts):
            return
        if int(prompts.lengths.min()) == 0:
            row = int(prompts.lengths.argmin())
            raise ValueError(f"prompt {row} has no tokens; begin it with one, such as the start token")
        longest = int(prompts.lengths.max())
        room = getattr(self.model.config, "max_position_embeddings", None)
        if room is not None and longest + sampling.max_new_tokens > room:
            raise ValueError(
                f"prompt {int(prompts.lengths.argmax())} has {longest} tokens; with max_new_tokens="
                f"{sampling.max_new_tokens} that exceeds the model's {room} positions; lower one of the two"
            )

    def _generate_rows(self, prompts: Batch, sampling: SamplingConfig) -> _Rows:
        """Generate all rows together; a row leaves the cache soon after its end token."""
        rows = _Rows(prompts, sampling.max_new_tokens, self.device)
        cache, logits_AV, mask_AS = self._prefill(prompts, sampling.max_new_tokens)
        position_A, longest = prompts.lengths.to(self.device), int(prompts.lengths.max())
        for k in range(sampling.max_new_tokens):
            token_A = rows.draw(logits_AV, k, sampling, self._end_tokens)
            unfinished_A = rows.unfinished()
            remaining = int(unfinished_A.sum())
            if remaining == 0 or k + 1 == sampling.max_new_tokens:
                break
            if remaining <= len(token_A) * _DROP_BELOW:
                keep = _fill_gaps(unfinished_A, remaining)
                cache.batch_select_indices(keep)
                rows.cached_A, token_A, position_A = rows.cached_A[keep], token_A[keep], position_A[keep]
                mask_AS = None if mask_AS is None else mask_AS[keep]
            logits_AV = self.model(
                input_ids=token_A[:, None],
                attention_mask=None if mask_AS is None else mask_AS[:, : longest + k + 1],
                position_ids=(position_A + k)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        return rows

    def _prefill(self, prompts: Batch, max_new_tokens: int) -> tuple[DynamicCache, Tensor, Tensor | None]:
        """Read the prompts, each different one once.

        Returns:
            The cache of all R rows; their logits, [R, V]; their attention mask over the slots of the prompts
            and of all new tokens, [R, S + K], or None when no row is padded.
        """
        from components.engines.decode_cache import roomy_cache

        # Padding is told from token 0 by -1, or [0, 5] and [5] would be the same row.
        tokens_RS = prompts.padded("tokens", -1, side="left").to(self.device, torch.int64)
        tokens_US, place_R = tokens_RS.unique(dim=0, return_inverse=True)
        real_US = tokens_US >= 0
        padded = not bool(real_US.all())
        cache = roomy_cache(self.model)
        logits_U1V = self.model(
            input_ids=tokens_US.clamp(min=0),
            attention_mask=real_US.long() if padded else None,
            position_ids=(real_US.cumsum(1) - 1).clamp(min=0) if padded else None,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        cache.batch_select_indices(place_R)
        mask_RS = nn.functional.pad(real_US[place_R].long(), (0, max_new_tokens), value=1) if padded else None
        return cache, logits_U1V[place_R, -1], mask_RS

    def _assemble(self, prompts: Batch, order_B: Tensor, parts: list[_Rows], max_new_tokens: int) -> Batch:
        """Put prompts and completions together, in the order of the prompts."""
        place_B = order_B.argsort()

        def column(pieces: list[Tensor], empty: Tensor) -> Tensor:
            return torch.cat([piece.cpu() for piece in pieces] or [empty])[place_B]

        none_BK = torch.zeros(0, max_new_tokens)
        tokens_BK = column([part.tokens_RK for part in parts], none_BK.long())
        logprob_BK = column([part.logprob_RK for part in parts], none_BK)
        length_B = column([part.length_R for part in parts], torch.zeros(0, dtype=torch.int64))
        ended_B = column([part.ended_R for part in parts], torch.zeros(0, dtype=torch.bool))

        lengths_B = prompts.lengths + length_B
        start_B = lengths_B.cumsum(0) - lengths_B
        total = int(lengths_B.sum())
        # Where each prompt token, and each new token (row by row), goes in the result.
        prompt_N = torch.arange(prompts.num_tokens) + (start_B - prompts.offsets[:-1])[prompts.sequence_ids]
        inside_BK = torch.arange(max_new_tokens) < length_B[:, None]
        new_N = ((start_B + prompts.lengths)[:, None] + torch.arange(max_new_tokens))[inside_BK]
        tokens_N = torch.zeros(total, dtype=torch.int64)
        tokens_N[prompt_N] = prompts["tokens"].to(torch.int64)
        tokens_N[new_N] = tokens_BK[inside_BK]
        per_token = {
            "tokens": tokens_N,
            "action_mask": torch.zeros(total, dtype=torch.bool).index_fill_(0, new_N, True),
            "rollout_logprob": torch.zeros(total).index_copy_(0, new_N, logprob_BK[inside_BK]),
        }
        version_B = torch.full((len(prompts),), self._weight_version, dtype=torch.int64)
        own = {"prompt_length": prompts.lengths, "truncated": ~ended_B, "weight_version": version_B}
        return Batch(lengths_B, per_token, {**prompts.per_sequence, **own}, prompts.objects)


def _fill_gaps(unfinished_A: Tensor, remaining: int) -> Tensor:
    """[remaining] places of the unfinished rows, so ordered that few rows move: the last ones fill the gaps."""
    keep = torch.arange(remaining, device=unfinished_A.device)
    gaps = (~unfinished_A[:remaining]).nonzero().squeeze(1)
    keep[gaps] = remaining + unfinished_A[remaining:].nonzero().squeeze(1)
    return keep


def _draw(logits_AV: Tensor, temperature: float, uniform_A: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token for each row by inversion of its cumulative distribution, and its float32 log-probability.

    In float64: with 100,000 tokens the steps of a float32 sum are larger than many probabilities.
    """
    logprob_AV = logits_AV.float()
    if temperature not in (0, 1):
        logprob_AV = logprob_AV / temperature
    logprob_AV = logprob_AV.log_softmax(-1)
    if temperature == 0:
        token_A = logprob_AV.argmax(-1)
    else:
        threshold_A = torch.from_numpy(uniform_A).to(logits_AV.device)
        rows = max(1, _CHUNK_ELEMENTS // logits_AV.shape[1])
        pieces = zip(logprob_AV.split(rows), threshold_A.split(rows), strict=True)
        token_A = torch.cat([_invert(logprob, threshold) for logprob, threshold in pieces])
    return token_A, logprob_AV.gather(1, token_A[:, None]).squeeze(1)


def _invert(logprob_AV: Tensor, uniform_A: Tensor) -> Tensor:
    """[A] first token whose cumulative probability exceeds the uniform number: never an impossible one."""
    cumulative_AV = logprob_AV.double().exp().cumsum(-1)
    threshold_A1 = (uniform_A * cumulative_AV[:, -1])[:, None]
    return torch.searchsorted(cumulative_AV, threshold_A1, right=True).squeeze(1)
