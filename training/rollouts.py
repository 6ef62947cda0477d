"""What a step's scored answers look like: as numbers for the metrics, as text for a person. B answers, N tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.rl.advantages import group_std
from components.rl.correction import importance_weights, mismatch_metrics
from training.tracking import Tracker

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch
    from components.data.rewards import RewardOutput, RewardSource

NAMED_FAILURES = 3
"""So many answers of a batch whose reward failed are named on the terminal; all are counted."""
SHOW_SAMPLES_EVERY = 10
SHOWN_SAMPLES = 8
"""How many answers W&B and TensorBoard show, and of how many steps one."""
FIRST = ("ratio_mean", "engine_gap")
"""Metrics whose value in the first optimizer step of a batch is told apart."""
STATUSES = ("finished", "truncated", "aborted", "error")
"""How an episode may have ended."""


def for_samples(prompts: Batch, count: int) -> Batch:
    """Each prompt `count` times, side by side, told apart by `sample_id`."""
    import torch

    return prompts.repeat(count).with_sequences(sample_id=torch.arange(count).repeat(len(prompts)))


def score_answers(
    samples: Batch, source: RewardSource | None, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> Batch:
    """Let reward code read the answers as text.

    Args:
        samples: with `tokens` and `prompt_length`, and the objects `prompt` and `label`.
        source: of the rewards; None: the answers are episodes, whose worlds have rewarded them.
        tokenizer: of the policy.
        say: told which answers have no reward, the first few by name.

    Returns:
        With `reward`, `score`, `reward_failed` (1 where there is none and the other two are 0), and a `log_<name>` for
        whatever else the source gives.
    """
    if source is None:
        check_rewarded(samples)
        say_failures({i: reason for i, reason in enumerate(samples["error"]) if reason}, say)
        return samples
    queries = tokenizer.batch_decode(samples.lists("tokens"), skip_special_tokens=False)
    output = source(queries, samples["prompt"], samples["label"], responses=answer_texts(samples, tokenizer))
    return with_rewards(samples, output, say)


def answer_texts(samples: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What follows each prompt, without special tokens."""
    starts = samples["prompt_length"].tolist()
    answers = [row[start:] for row, start in zip(samples.lists("tokens"), starts, strict=True)]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def with_rewards(samples: Batch, output: RewardOutput, say: Callable[[str], None], what: str = "reward") -> Batch:
    """With the columns of `score_answers`; failures are said to be of `what`."""
    import torch

    say_failures(output.failures, say, what)
    failed_B = torch.zeros(len(samples))
    failed_B[list(output.failures)] = 1.0
    logs = {f"log_{name}": value_B for name, value_B in output.logs.items()}
    return samples.with_sequences(reward=output.reward_B, score=output.score_B, reward_failed=failed_B, **logs)


def check_rewarded(samples: Batch) -> None:
    """ValueError unless an agent's executor has rewarded its episodes."""
    if "reward" not in samples:
        raise ValueError(
            "the agent's episodes have no reward; let its executor give them one (a SingleTurnAgentExecutor takes a "
            "function), or leave agent_func_path out and set a reward"
        )


def say_failures(failures: Mapping[int, str], say: Callable[[str], None], what: str = "reward") -> None:
    """Name the first few answers that have no reward, and say how many more there are."""
    for index, reason in list(failures.items())[:NAMED_FAILURES]:
        say(f"answer {index} gets {what} 0, because its {what} failed: {reason}")
    if len(failures) > NAMED_FAILURES:
        say(f"and {len(failures) - NAMED_FAILURES} more failed")


def with_status(samples: Batch) -> Batch:
    """With `status`, in words for people: finished or truncated, where it does not say more already."""
    if "status" in samples:
        return samples
    return samples.with_objects(status=["truncated" if cut else "finished" for cut in samples["truncated"].tolist()])


def record_step(
    tracker: Tracker,
    step: int,
    steps: int,
    metrics: dict[str, float],
    samples: Batch,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write one step down, and tell those who watch.

    Args:
        tracker: of the run.
        step: its number.
        steps: how many the run is to have.
        metrics: of the step. Where no pass was made for the trainer's log-probabilities, their gap to the engine's in
            the first optimizer step, which is of the same weights, is told as `rollout/logprob_gap_mean` too.
        samples: what it was trained on, scored, with `status`.
        tokenizer: turns one of them into text, and now and then a few, for whoever shows samples.
    """
    if (gap := metrics.get("actor/first_engine_gap")) is not None:
        metrics = {"rollout/logprob_gap_mean": gap} | metrics
    tracker.log(step, metrics, steps=steps, sample=lambda: readable(samples, tokenizer, 1)[0])
    tracker.rollouts(step, samples)
    tracker.keep_tokenizer(tokenizer)
    if step % SHOW_SAMPLES_EVERY == 1:
        tracker.samples(step, lambda: readable(samples, tokenizer, SHOWN_SAMPLES))
    tracker.update_summary(steps=step)


def keep_failed(run_dir: str, step: int, role: str, minibatch: Batch, rank: int) -> str:
    """Write a batch that could not be trained on to the run folder, once; says where."""
    path = Path(run_dir) / "failed" / f"step_{step:06d}-{role.lower()}.parquet"
    if rank == 0:
        minibatch.save(path)
    return f"the batch is in {path}"


def over_updates(history: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step: means over its optimizer steps, and of the first one `first_ratio_mean`.

    On the first the policy is the one that made the old log-probabilities, so the ratio is 1 there.
    """
    means = {name: sum(entry[name] for entry in history) / len(history) for name in history[0]}
    return means | {f"first_{name}": history[0][name] for name in FIRST if name in history[0]}


def rollout_metrics(samples: Batch, low: float | None = None, high: float | None = None) -> dict[str, float]:
    """Means over one step's answers, and how far the engine's log-probabilities are from the trainer's.

    Args:
        samples: with `tokens`, `action_mask`, `rollout_logprob` (the engine's) and, where there was a pass for them,
            `logprob` (the trainer's) per token;
            `reward`, `score`, `shaped_reward`, `reward_failed`, `truncated`, `prompt_id` and any `log_...` per answer,
            NaN where an answer lacks it; of episodes `num_turns` and `status`; and what `check_staleness` adds.
        low: of the importance weights, beyond which a token counts as outside; None: not counted.
        high: the same, above.

    Returns:
        reward/: `reward`, `score`, `shaped`, `failed` (a count) and the logged ones that are there; where prompts have
        several answers `group_std`, and `zero_variance_share` of answers whose prompt's answers all earned the same.
        actor/: `kl_to_reference` in nats, where there is one.
        rollout/: `response_length` in tokens, `truncated_share`, `logprob_gap_mean` and `_max` in nats, and the
        `mismatch_metrics`; of episodes a share for each status, and `turns_mean`; in versions that the weights were
        behind `staleness_mean` and `_max`, by answers, whose oldest token counts, and `token_staleness_mean`.
    """
    mask_N, reward_B = samples["action_mask"], samples["reward"]
    metrics = {
        "reward/reward": float(reward_B.mean()),
        "reward/score": float(samples["score"].mean()),
        "reward/shaped": float(samples["shaped_reward"].mean()),
        "reward/failed": float(samples["reward_failed"].sum()),
        "rollout/response_length": float(mask_N.sum() / len(samples)),
        "rollout/truncated_share": float(samples["truncated"].float().mean()),
    }
    if len(samples["prompt_id"].unique()) < len(samples):
        std_B = group_std(reward_B, samples["prompt_id"])
        metrics["reward/group_std"] = float(std_B.mean())
        metrics["reward/zero_variance_share"] = float((std_B == 0).float().mean())
    if "logprob" in samples:
        columns = (samples["logprob"], samples["rollout_logprob"], mask_N)
        gap_N = (columns[0] - columns[1]).abs()[mask_N]
        mismatch = mismatch_metrics(*columns, samples.lengths, low=low, high=high)
        mismatch |= {"logprob_gap_mean": float(gap_N.mean()), "logprob_gap_max": float(gap_N.max())}
        metrics |= {f"rollout/{name}": value for name, value in mismatch.items()}
        if "reference_logprob" in samples:
            metrics["actor/kl_to_reference"] = float((samples["logprob"] - samples["reference_logprob"])[mask_N].mean())
    return metrics | _logged(samples) | _episode_metrics(samples) | _staleness_metrics(samples)


def _logged(samples: Batch) -> dict[str, float]:
    means = {name: float(samples[name].nanmean()) for name in samples.names if name.startswith("log_")}
    return {f"reward/{name.removeprefix('log_')}": mean for name, mean in means.items() if not math.isnan(mean)}


def _episode_metrics(samples: Batch) -> dict[str, float]:
    if "num_turns" not in samples:
        return {}
    shares = {f"rollout/{status}_share": samples["status"].count(status) / len(samples) for status in STATUSES}
    return shares | {"rollout/turns_mean": float(samples["num_turns"].float().mean())}


def _staleness_metrics(samples: Batch) -> dict[str, float]:
    if "staleness" not in samples:
        return {}
    stale_B = samples["staleness"]
    metrics = {"rollout/staleness_mean": float(stale_B.float().mean()), "rollout/staleness_max": float(stale_B.max())}
    if "token_version" in samples:
        version_N, trained_B = samples["token_version"], samples["weight_version"] + stale_B
        stale_N = (trained_B[samples.sequence_ids] - version_N)[version_N >= 0]
        metrics["rollout/token_staleness_mean"] = float(stale_N.float().mean())
    return metrics


def readable(samples: Batch, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first answers of a step as text, with what they were worth."""
    some = samples.select(slice(0, count))
    rows = []
    for i in range(len(some)):
        tokens = some.row(i, "tokens").tolist()[int(some["prompt_length"][i]) :]
        numbers = {name: float(some[name][i]) for name in ("reward", "score")}
        texts = {"prompt": some["prompt"][i], "answer": tokenizer.decode(tokens), "label": str(some["label"][i])}
        rows.append(texts | numbers | {"status": some["status"][i]})
    return rows


def check_staleness(samples: Batch, version: int, most: int = 0) -> Batch:
    """Find out how far behind `version` the weights were that drew each answer.

    Args:
        samples: with `weight_version`, of the oldest token of an answer.
        version: of the weights that are trained, or of those that every engine should have.
        most: so many versions may they be behind.

    Returns:
        With `staleness`, that number for each answer.

    Raises:
        RuntimeError: they are further behind. A sampler that missed an update would quietly train the wrong policy.
    """
    stale_B = version - samples["weight_version"]
    wrong_B = (stale_B > most) | (stale_B < 0)
    if bool(wrong_B.any()):
        found = sorted(set(samples["weight_version"][wrong_B].tolist()))
        allowed = f", of which they may be {most} behind" if most else ""
        raise RuntimeError(
            f"{int(wrong_B.sum())} answers were sampled from weights of version {found}, but the trainer is at version "
            f"{version}{allowed}; a rollout engine missed an update"
        )
    return samples.with_sequences(staleness=stale_B)


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


def main_branches(samples: Batch) -> Batch:
    """The main sequence of each sample, `branch` 0; all of them where none can have several."""
    return samples.select(samples["branch"] == 0) if "branch" in samples else samples
