"""What a step's scored answers look like: as numbers for the metrics, as text for a person. B answers, N tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.rl.advantages import group_std
from components.rl.correction import mismatch_metrics
from components.tracking import Tracker, console_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch
    from components.data.rewards import RewardSource

NAMED_FAILURES = 3
"""So many answers of a batch whose reward failed are named on the terminal; all are counted."""
SHOW_SAMPLES_EVERY = 10
SHOWN_SAMPLES = 8
"""How many answers W&B and TensorBoard show, and of how many steps one."""
FIRST = ("ratio_mean", "engine_gap")
"""Metrics whose value in the first optimizer step of a batch is told apart."""


def for_samples(prompts: Batch, count: int) -> Batch:
    """Each prompt `count` times, side by side, told apart by `sample_id`."""
    import torch

    return prompts.repeat(count).with_sequences(sample_id=torch.arange(count).repeat(len(prompts)))


def score_answers(
    samples: Batch, source: RewardSource, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> Batch:
    """Let reward code read the answers as text.

    Args:
        samples: with `tokens` and `prompt_length`, and the objects `prompt` and `label`.
        source: of the rewards.
        tokenizer: of the policy.
        say: told which answers have no reward, the first few by name.

    Returns:
        With `reward`, `score`, `reward_failed` (1 where there is none and the other two are 0), and a `log_<name>` for
        whatever else the source gives.
    """
    import torch

    rows = [samples.row(i, "tokens").tolist() for i in range(len(samples))]
    starts = samples["prompt_length"].tolist()
    answers = [row[start:] for row, start in zip(rows, starts, strict=True)]
    output = source(
        tokenizer.batch_decode(rows, skip_special_tokens=False),
        samples["prompt"],
        samples["label"],
        responses=tokenizer.batch_decode(answers, skip_special_tokens=True),
    )
    for index, reason in list(output.failures.items())[:NAMED_FAILURES]:
        say(f"answer {index} gets reward 0, because its reward failed: {reason}")
    if len(output.failures) > NAMED_FAILURES:
        say(f"and {len(output.failures) - NAMED_FAILURES} more failed")
    failed_B = torch.zeros(len(samples))
    failed_B[list(output.failures)] = 1.0
    logs = {f"log_{name}": value_B for name, value_B in output.logs.items()}
    return samples.with_sequences(reward=output.reward_B, score=output.score_B, reward_failed=failed_B, **logs)


def with_status(samples: Batch) -> Batch:
    """With `status`, in words for people: finished or truncated."""
    return samples.with_objects(status=["truncated" if cut else "finished" for cut in samples["truncated"].tolist()])


def record_step(
    tracker: Tracker,
    step: int,
    metrics: dict[str, float],
    samples: Batch,
    tokenizer: PreTrainedTokenizerBase,
    shown: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Write one step down, and show it.

    Args:
        tracker: of the run.
        step: its number.
        metrics: of the step.
        samples: what it was trained on, scored, with `status`.
        tokenizer: turns a few of them into text, now and then, for whoever shows samples.
        shown: which metrics a person sees, and under which name.
        say: shows a line to the user.
    """
    tracker.log(step, metrics)
    tracker.rollouts(step, samples)
    if tracker.wants_samples and step % SHOW_SAMPLES_EVERY == 1:
        tracker.samples(step, readable(samples, tokenizer, SHOWN_SAMPLES))
    say(console_line(step, {label: metrics[name] for name, label in shown.items() if name in metrics}))
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
            `reward`, `score`, `shaped_reward`, `reward_failed`, `truncated`, `prompt_id` and any `log_...` per answer.
        low: of the importance weights, beyond which a token counts as outside; None: not counted.
        high: the same, above.

    Returns:
        reward/: `reward`, `score`, `shaped`, `failed` (a count) and the logged ones; where prompts have several
        answers `group_std`, and `zero_variance_share` of answers whose prompt's answers all earned the same.
        actor/: `kl_to_reference` in nats, where there is one.
        rollout/: `response_length` in tokens, `truncated_share`, `logprob_gap_mean` and `_max` in nats, and the
        `mismatch_metrics`.
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
    logged = [name for name in samples.names if name.startswith("log_")]
    return metrics | {f"reward/{name.removeprefix('log_')}": float(samples[name].mean()) for name in logged}


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


def check_version(samples: Batch, version: int) -> None:
    """RuntimeError unless all answers were sampled from weights of this version.

    A sampler that is behind would quietly train the wrong policy.
    """
    behind = samples["weight_version"] != version
    if bool(behind.any()):
        found = sorted(set(samples["weight_version"][behind].tolist()))
        raise RuntimeError(
            f"{int(behind.sum())} answers were sampled from weights of version {found}, but the trainer is at version "
            f"{version}; a rollout engine missed an update"
        )
