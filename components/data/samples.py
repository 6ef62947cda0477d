"""Rollouts as a batch: repeated prompts, reward columns, corrections, comparisons within a prompt, and mini-batches.

Shape suffixes: B responses or episodes; N all their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from components.models.routers import route_columns
from components.registry import load
from components.rewards.names import metric_names

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch
    from components.rewards.base import RewardOutput, RewardSource

NAMED_FAILURES = 3
"""Maximum number of responses with a failed reward that are reported one by one. The others are only counted."""


def for_samples(prompts: Batch, count: int) -> Batch:
    """Repeat each prompt `count` times, with adjacent copies, and add the column `sample_id` (0 to count - 1)."""
    import torch

    return prompts.repeat(count).with_sequences(sample_id=torch.arange(count).repeat(len(prompts)))


def add_rewards(
    samples: Batch,
    source: RewardSource | None,
    tokenizer: PreTrainedTokenizerBase,
    info: Callable[[str], None],
    step: int = 0,
) -> Batch:
    """Compute the rewards of responses and add them as columns.

    Args:
        samples: batch with the columns `tokens` and `prompt_length`, and the objects `prompt` and `label`. Reward
            functions of files can also read `datasource` and `extra_info` (the other columns of the data) if present.
        source: source of the rewards. None if the responses are episodes with rewards from their environments.
        tokenizer: tokenizer of the policy.
        info: called with messages about responses without a reward, see `log_failures`.
        step: number of the training step, which reward functions of files can read.

    Returns:
        The batch with the per-sequence columns `reward`, `score`, `reward_failed` (1 for a failed reward, where the
        other two are 0; see `drop_unrewarded`), and `log_<name>` for all other numbers of the source; see
        `metric_names`.

    Raises:
        ValueError: there is no source, and the episodes have no rewards.
    """
    if source is None:
        check_rewarded(samples)
        log_failures({i: reason for i, reason in enumerate(samples["error"]) if reason}, info)
        return samples
    return with_rewards(samples, ask_for_rewards(samples, source, tokenizer, step), info)


def ask_for_rewards(
    samples: Batch, source: RewardSource, tokenizer: PreTrainedTokenizerBase, step: int = 0
) -> RewardOutput:
    """Return the rewards of responses; see `add_rewards`."""
    queries = [""] * len(samples)
    # Queries keep special tokens, because reward models read the chat template. Responses have none, for scorers.
    if source.reads_queries:
        queries = tokenizer.batch_decode(samples.lists("tokens"), skip_special_tokens=False)
    texts = tokenizer.batch_decode(_response_tokens(samples), skip_special_tokens=True)
    return source(queries, samples["prompt"], samples["label"], responses=texts, rows=_rows(samples, step))


def _rows(samples: Batch, step: int) -> list[dict[str, Any]]:
    """Return the values of each response, besides its text, that reward functions can read; see `by_names`."""
    extra_infos = samples.objects.get("extra_info", [None] * len(samples))
    sources = samples.objects.get("datasource", [""] * len(samples))
    rows: list[dict[str, Any]] = []
    for source, extra_info, ids in zip(sources, extra_infos, _response_tokens(samples), strict=True):
        rows.append({"data_source": source, "columns": extra_info or {}, "completion_ids": ids, "step": step})
    return rows


def _response_tokens(samples: Batch) -> list[list[int]]:
    return [row[start:] for row, start in zip(samples.lists("tokens"), samples["prompt_length"].tolist(), strict=True)]


def with_rewards(samples: Batch, output: RewardOutput, info: Callable[[str], None], quantity: str = "reward") -> Batch:
    """Add the columns of `add_rewards` to a batch.

    An episode that ended with an error counts as failed, whatever its reward is.

    Args:
        samples: batch of responses.
        output: their rewards.
        info: called with messages about failures.
        quantity: name of the failed quantity in these messages.
    """
    import torch

    errors = samples.objects.get("error", [])
    failures = output.failures | {i: reason for i, reason in enumerate(errors) if reason}
    log_failures(failures, info, quantity)
    failed_B = torch.zeros(len(samples))
    failed_B[list(failures)] = 1.0
    # 0 instead of the NaN of a failed reward, which would spread to the means of other responses.
    reward_B = torch.where(failed_B > 0, 0.0, output.reward_B)
    score_B = torch.where(failed_B > 0, 0.0, output.score_B)
    metric_of = metric_names(output.logs)
    logs = {f"log_{metric_of[name]}": value_B for name, value_B in output.logs.items()}
    return samples.with_sequences(reward=reward_B, score=score_B, reward_failed=failed_B, **logs)


def drop_unrewarded(samples: Batch) -> Batch:
    """Return the responses that have a reward. The others take part in no baseline, no mean and no loss."""
    failed_B = samples["reward_failed"] > 0
    # `select` copies all columns, and in most steps no reward has failed.
    if not bool(failed_B.any()):
        return samples
    return samples.select(~failed_B)


def check_rewarded(samples: Batch) -> None:
    """Raise a ValueError unless the executor of an agent has given its episodes a reward."""
    if "reward" not in samples:
        raise ValueError(
            "the agent's episodes have no reward; let its executor give them one (a SingleTurnAgentExecutor takes a "
            "function), or leave agent_func_path out and set a reward"
        )


def log_failures(failures: Mapping[int, str], info: Callable[[str], None], quantity: str = "reward") -> None:
    """Report the first few responses without a reward one by one, and the number of all others."""
    for index, reason in list(failures.items())[:NAMED_FAILURES]:
        info(f"response {index} has no {quantity}: {reason}")
    if len(failures) > NAMED_FAILURES:
        info(f"and {len(failures) - NAMED_FAILURES} more failed")


def with_status(samples: Batch) -> Batch:
    """Add the column `status` for display, "finished" or "truncated", unless the batch has one already."""
    if "status" in samples:
        return samples
    is_truncated = samples["truncated"].tolist()
    return samples.with_objects(status=["truncated" if truncated else "finished" for truncated in is_truncated])


def compare_samples(samples: Batch, reward_B: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compare rewards within each prompt, counting a sample once even if it has several sequences (branches).

    Args:
        samples: batch with `prompt_id`, and `branch` if samples can branch. Branches follow their main sequence.
        reward_B: [B] reward, the same for all sequences of a sample.
        compare: function of rewards [B] and group ids [B] that returns advantages [B].

    Returns:
        [B] advantages. A branch has the advantage of its main sequence.
    """
    # Only agents branch. Their branches must not count as further samples in the mean of a group.
    if "branch" not in samples:
        return compare(reward_B, samples["prompt_id"])
    is_main_B = samples["branch"] == 0
    # One entry per main sequence. The running count of main sequences maps each branch to its own.
    advantage_M = compare(reward_B[is_main_B], samples["prompt_id"][is_main_B])
    return advantage_M[is_main_B.cumsum(0) - 1]


def with_correction(samples: Batch, kind: str, low: float, high: float) -> Batch:
    """Add the column `correction` [N], the factor of each token's loss for the mismatch with the rollout engine.

    The factor is exp(logprob - rollout_logprob). It corrects for an engine that computes other probabilities than the
    trainer, or that sampled with older weights.

    Args:
        samples: batch with `logprob`, `rollout_logprob` and `action_mask`.
        kind: "tis" clamps the factor to low and high; "icepop" sets it to 0 outside; "none" adds no column. See
            plugins/loss_correction for further kinds.
        low: minimum factor.
        high: maximum factor.
    """
    if kind == "none":
        return samples
    # The value of the option names the plug-in, so that a further correction needs no change here.
    weights_of = load("loss correction", kind, f"algorithm.correction={kind}")
    columns = (samples["logprob"], samples["rollout_logprob"], samples["action_mask"], samples.lengths)
    return samples.with_tokens(correction=weights_of(*columns, low=low, high=high))


def policy_inputs(samples: Batch) -> Batch:
    """Return the columns that a pass for the policy's log-probabilities reads: tokens, and routes if there are any."""
    return samples.only("tokens", *route_columns(samples.per_token))


def old_logprobs(micro: Batch, logprob_N: Tensor, column: str = "logprob") -> Tensor:
    """Return the log-probabilities of the old policy for the ratio of a loss.

    In the first optimizer step on a batch, the policy is the old policy. The batch then has no such column, and the
    ratio is exactly 1.

    Args:
        micro: the micro-batch.
        logprob_N: [N] current log-probabilities of the policy, in nats.
        column: name of the column with the log-probabilities before the update.

    Returns:
        [N] without gradient.
    """
    if column in micro:
        return micro[column]
    # In the first optimizer step the policy is still the one before the update, so the ratio is exactly 1.
    return logprob_N.detach()


def main_branches(samples: Batch) -> Batch:
    """Return the main sequence of each sample (`branch` 0), which is all sequences without a column `branch`."""
    if "branch" not in samples:
        return samples
    return samples.select(samples["branch"] == 0)
