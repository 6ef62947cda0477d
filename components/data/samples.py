"""Rollouts as a batch: prompts repeated for their samples, rewards as columns, samples compared within a prompt.

B responses or episodes, N all their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from components.rewards.names import metric_names
from components.rl.correction import importance_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch
    from components.rewards.base import RewardOutput, RewardSource

NAMED_FAILURES = 3
"""So many responses of a batch whose reward failed are named on the terminal; all are counted."""


def for_samples(prompts: Batch, count: int) -> Batch:
    """Each prompt `count` times, side by side, distinguished by `sample_id`."""
    import torch

    return prompts.repeat(count).with_sequences(sample_id=torch.arange(count).repeat(len(prompts)))


def add_rewards(
    samples: Batch,
    source: RewardSource | None,
    tokenizer: PreTrainedTokenizerBase,
    info: Callable[[str], None],
    step: int = 0,
) -> Batch:
    """Let reward code read the responses as text.

    Args:
        samples: with `tokens` and `prompt_length`, and the objects `prompt` and `label`; reward functions of files also
            read `datasource` and `extra_info`, the data's other columns, where they are there.
        source: of the rewards; None: the responses are episodes, whose environments have rewarded them.
        tokenizer: of the policy.
        info: is given which responses have no reward, the first few by name.
        step: of training; such functions may read it.

    Returns:
        With `reward`, `score`, `reward_failed` (1 where there is none and the other two are 0: see `drop_unrewarded`),
        and a `log_<name>` for whatever else the source gives; see `metric_names`.
    """
    if source is None:
        check_rewarded(samples)
        log_failures({i: reason for i, reason in enumerate(samples["error"]) if reason}, info)
        return samples
    return with_rewards(samples, ask_for_rewards(samples, source, tokenizer, step), info)


def ask_for_rewards(
    samples: Batch, source: RewardSource, tokenizer: PreTrainedTokenizerBase, step: int = 0
) -> RewardOutput:
    """What reward code says of the responses; see `add_rewards`."""
    queries = tokenizer.batch_decode(samples.lists("tokens"), skip_special_tokens=False)
    texts, rows = response_texts(samples, tokenizer), _rows(samples, step)
    return source(queries, samples["prompt"], samples["label"], responses=texts, rows=rows)


def _rows(samples: Batch, step: int) -> list[dict[str, Any]]:
    """What reward functions may read of each response beside its text; see `by_names`."""
    others = samples["extra_info"] if "extra_info" in samples else [None] * len(samples)
    sources = samples["datasource"] if "datasource" in samples else [""] * len(samples)
    about = zip(sources, others, _response_tokens(samples), strict=True)
    names = ("data_source", "columns", "completion_ids")
    return [dict(zip(names, (source, of or {}, ids))) | {"step": step} for source, of, ids in about]


def response_texts(samples: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What follows each prompt, without special tokens."""
    return tokenizer.batch_decode(_response_tokens(samples), skip_special_tokens=True)


def _response_tokens(samples: Batch) -> list[list[int]]:
    starts = samples["prompt_length"].tolist()
    return [row[start:] for row, start in zip(samples.lists("tokens"), starts, strict=True)]


def with_rewards(samples: Batch, output: RewardOutput, info: Callable[[str], None], what: str = "reward") -> Batch:
    """Add the columns of `add_rewards`; failures are said to be of `what`. An episode that ended as an error has
    failed, whatever its text is worth.
    """
    import torch

    errors = samples["error"] if "error" in samples else [""] * len(samples)
    failures = output.failures | {i: reason for i, reason in enumerate(errors) if reason}
    log_failures(failures, info, what)
    failed_B = torch.zeros(len(samples))
    failed_B[list(failures)] = 1.0
    reward_B, score_B = (torch.where(failed_B > 0, 0.0, x_B) for x_B in (output.reward_B, output.score_B))
    metric_of = metric_names(output.logs)
    logs = {f"log_{metric_of[name]}": value_B for name, value_B in output.logs.items()}
    return samples.with_sequences(reward=reward_B, score=score_B, reward_failed=failed_B, **logs)


def drop_unrewarded(samples: Batch) -> Batch:
    """Return the responses that have a reward; the others are in no baseline, no mean and no loss."""
    failed_B = samples["reward_failed"] > 0
    return samples.select(~failed_B) if bool(failed_B.any()) else samples


def check_rewarded(samples: Batch) -> None:
    """ValueError unless an agent's executor has rewarded its episodes."""
    if "reward" not in samples:
        raise ValueError(
            "the agent's episodes have no reward; let its executor give them one (a SingleTurnAgentExecutor takes a "
            "function), or leave agent_func_path out and set a reward"
        )


def log_failures(failures: Mapping[int, str], info: Callable[[str], None], what: str = "reward") -> None:
    """Name the first few responses that have no reward, and how many more there are."""
    for index, reason in list(failures.items())[:NAMED_FAILURES]:
        info(f"response {index} has no {what}: {reason}")
    if len(failures) > NAMED_FAILURES:
        info(f"and {len(failures) - NAMED_FAILURES} more failed")


def with_status(samples: Batch) -> Batch:
    """With `status`, in words for people: finished or truncated, where it does not say more already."""
    if "status" in samples:
        return samples
    return samples.with_objects(status=["truncated" if cut else "finished" for cut in samples["truncated"].tolist()])


def compare_samples(samples: Batch, reward_B: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What becomes of rewards that are compared within a prompt, each sample once however many sequences it has.

    Args:
        samples: with `prompt_id`, and `branch` where samples may have branched, each beside its main sequence.
        reward_B: [B], the same for all sequences of a sample.
        compare: (rewards, groups) -> what each is worth beside the others of its group.

    Returns:
        [B], of a branch what its main sequence has.
    """
    if "branch" not in samples:
        return compare(reward_B, samples["prompt_id"])
    is_main_B = samples["branch"] == 0
    worth = compare(reward_B[is_main_B], samples["prompt_id"][is_main_B])
    return worth[is_main_B.cumsum(0) - 1]


def with_correction(samples: Batch, kind: Literal["none", "tis", "icepop"], low: float, high: float) -> Batch:
    """With `correction` [N], times which each token's loss counts for what the engine that sampled it computed
    otherwise, or with older weights: exp(logprob - rollout_logprob), cut to low and high (tis), or 0 beyond (icepop).
    """
    if kind == "none":
        return samples
    columns = (samples["logprob"], samples["rollout_logprob"], samples["action_mask"], samples.lengths)
    outside = "zero" if kind == "icepop" else "clamp"
    weight_N = importance_weights(*columns, level="token", low=low, high=high, outside=outside)
    return samples.with_tokens(correction=weight_N)


def old_logprobs(micro: Batch, logprob_N: Tensor, column: str = "logprob") -> Tensor:
    """Return the log-probabilities of the policy that a loss compares itself with.

    The first optimizer step of a batch is taken by that policy itself. There the role leaves the column out, or it was
    never computed, and the ratio is exactly 1.

    Args:
        micro: the micro-batch.
        logprob_N: [N] log-probabilities of the policy now, in nats.
        column: name of the log-probabilities before the update.

    Returns:
        [N], without a gradient.
    """
    return micro[column] if column in micro else logprob_N.detach()


def main_branches(samples: Batch) -> Batch:
    """The main sequence of each sample, `branch` 0; all of them where none can have several."""
    return samples.select(samples["branch"] == 0) if "branch" in samples else samples
