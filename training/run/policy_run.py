"""A run that trains a policy on its own rollouts: prompts, rewards, evaluation, and the queue that the loop reads.

`P` prompts, `B` rollouts: responses or episodes, several of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.batch import Batch
from components.data.samples import add_rewards, for_samples, main_branches, with_status
from components.data.shown import described
from components.generate.config import SamplingConfig
from components.registry import load
from components.rewards.opening import open_reward
from training.run.evaluation import Evaluation
from training.run.failed_rewards import FailedRewards, split_failed
from training.run.policy_calls import PolicyCalls
from training.run.prompts import describe_prompts, read_prompts, unused_template
from training.run.queue import RolloutQueue, Stateful
from training.run.rollouts import check_staleness, record_step, rollout_metrics
from training.run.run import Run
from training.run.strategies import RolloutStrategy, WholeSteps
from training.tracking import console_line

if TYPE_CHECKING:
    from components.data.prompts import PromptSource
    from components.rewards.base import RewardSource
    from core import BaseTrainer
    from training.options.rl_options import RLOptions


class MakeRollouts(Protocol):
    """The method of a trainer that makes rollouts, for a training step or (`heldout`) for an evaluation."""

    def __call__(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Generate one scored rollout for each row of `prompts`; those whose reward failed are left out."""
        ...


Score = Callable[[Batch], Batch]
"""The method of a trainer that scores rollouts, and leaves out those whose reward failed."""

SHOWN = (
    "reward/score",
    "eval/score",
    "eval/score_greedy",
    "rollout/response_length",
    "actor/approx_kl",
    "actor/entropy",
    "timing_s/step",
)
"""What a person sees of a step, unless a recipe sets otherwise."""


class PolicyRun(Run[Batch]):
    """Everything of a training run but its algorithm.

    `for rollouts in run.queue(make_rollouts, score)` runs the steps that are left, `end_step` ends each, and `finish`
    the run. The constructor reads the prompts, loads the models, and resumes from a checkpoint, if there is one.
    """

    config: RLOptions
    _has_shown_episode = False
    _failed: Batch | None = None
    """Rollouts without a reward of the step that was made last."""
    _make_rollouts: MakeRollouts
    _score: Score

    def __init__(
        self,
        trainer: BaseTrainer,
        config: RLOptions,
        recipe: Path,
        *,
        calls: PolicyCalls | None = None,
        shown: Sequence[str] = SHOWN,
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        """
        Args:
            trainer: whose run it is.
            config: in the shared groups of options.
            recipe: the folder of the recipe.
            calls: how roles are reached. Default: by the trainer's role groups.
            shown: metrics that a person sees of a step.
            parts: what else of the trainer a checkpoint holds, by name.
        """
        super().__init__(trainer, config, recipe, shown)
        self.calls = calls or PolicyCalls(trainer, config)
        self._read_data()
        self._open(parts or {})

    @property
    def version(self) -> int:
        """Of the weights that the engines sample from: the step that made them."""
        return self.progress.version

    # --- the loop

    def queue(self, make_rollouts: MakeRollouts, score: Score) -> Iterator[Batch]:
        """Iterate over the steps that are left, and hand out the scored rollouts of each.

        The queue resumes, generates ahead of training, and ends when the run is to stop.

        Args:
            make_rollouts: generates and scores rollouts, in training and in evaluations.
            score: scores rollouts that were generated without `make_rollouts`, as by partial rollouts.
        """
        self._make_rollouts = make_rollouts
        self._score = score
        if self.config.evaluation.at_start and not self.trainer.stop_requested:
            self._evaluate_at_start()
        with self.checkpoints.kept_if_rewards_fail():
            self.checkpoints.log_unlogged_step(self._evaluate_and_log)
            for rollouts in self.stream:
                with self._turn("sleep"):
                    self.calls.end_generation()
                yield self._checked(rollouts)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Wake the engines if they sleep while the policy trains, and time what happens inside as `generate`."""
        with self._turn("wake"):
            self.calls.begin_generation()
        with self.phase("generate"):
            yield

    def _turn(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside as a phase, if engines and learners take turns on their devices."""
        return self.phase(name) if self.config.placement.takes_turns else nullcontext()

    def score(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward` and `score` [B], and leave out the rollouts whose reward failed."""
        with self.phase("reward"):
            rollouts = with_status(self.add_rewards(rollouts, heldout))
        return self.drop_failed(rollouts, heldout)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:  # noqa: ARG002 - recipes read it
        """Add `reward`, `score` and `reward_failed` [B], as `reward.source` or the agent's environment says."""
        return add_rewards(rollouts, self.reward, self.tokenizer, self.info, self.step)

    def drop_failed(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Leave out the rollouts whose reward failed. Those of a training step are counted, and saved in `failed/`."""
        return split_failed(rollouts)[0] if heldout else self.failed_rewards.drop(rollouts)

    def compute_logprobs(self, rollouts: Batch) -> Batch:
        """Add `logprob`, of the policy before the update, and `reference_logprob` [N], in nats, where needed."""
        tokens = rollouts.only("tokens")
        with self.phase("logprobs"):
            return rollouts.with_tokens(**self.calls.old_and_reference_logprobs(tokens))

    def end_step(
        self,
        experience: Batch,
        metrics: Mapping[str, float] | None = None,
        *,
        weights_synced: bool = True,
        **by_role: Mapping[str, float],
    ) -> None:
        """Log the step, evaluate the policy and write a checkpoint when they are due.

        Args:
            experience: what the step was trained on.
            metrics: with their whole names; those of the rollouts, the clock and the queue are added.
            weights_synced: the engines were given the weights of this step.
            by_role: metrics of a role's update, as `actor=...`; they are logged as `actor/<name>`.
        """
        if weights_synced:
            self.progress.version = self.step
        found = dict(metrics or {})
        for role, own in by_role.items():
            found |= {f"{role}/{name}": value for name, value in own.items()}
        found = self.rename(found | self.measure(experience))
        with self.checkpoints.kept_if_rewards_fail():
            is_best = self.checkpoints.record(self._evaluate_and_log, experience, found)
        self.checkpoints.save_when_due(is_best)

    def measure(self, experience: Batch) -> dict[str, float]:
        """Metrics of a step beside those of the updates: its speed, its rollouts, the last checkpoint and the queue."""
        low, high = self.config.algorithm.correction_range
        found = self.count(experience) | rollout_metrics(experience, low, high, self.failed_rewards.of_step)
        return found | self.checkpoints.metrics | self.stream.metrics

    def rename(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a step under the names that they are logged with."""
        return metrics

    def finish(self) -> None:
        """Save what is not yet saved, sum up what was gained, and let go of everything."""
        self.checkpoints.save()
        if self.is_last_step:
            self._sum_up()
        else:
            self.note_stop()
        self.close()

    def close(self) -> None:
        """End what the run has started, and let the roles know that no call will follow."""
        if self.reward is not None:
            self.reward.close()
        self.tracker.close()
        self.calls.end()

    # --- how rollouts are made

    def _describe_first(self, rollouts: Batch) -> None:
        """Show what the first episode of the run begins with, which its environment may have written."""
        if self._has_shown_episode or "num_turns" not in rollouts or not len(rollouts):
            return
        self._has_shown_episode = True
        ids = rollouts.lists("tokens")[0][: int(rollouts["prompt_length"][0])]
        self.info(f"first episode begins {described(str(self.tokenizer.decode(ids)), ids)}")

    def respond_to_next(self, count: int, step: int) -> Batch:
        """Make the rollouts of the next `count` prompts, `samples_per_prompt` of each. For rollout strategies."""
        prompts = for_samples(self.prompts.take(count), self.config.samples_per_prompt)
        return self._make_rollouts(prompts, self.config.sampling(step))

    def score_rollouts(self, rollouts: Batch) -> Batch:
        """Score rollouts as the trainer does. For rollout strategies that generate by themselves."""
        return self._score(rollouts)

    def _fill_step(self, step: int) -> Batch | None:
        """Make the rollouts of one step, or return None at the end of the data or if the run is to stop.

        With dynamic sampling, the last step may have fewer prompts than the others.
        """
        self.failed_rewards.take(None)  # of a generation that an error has ended
        rollouts = self.strategy.fill(step)
        if rollouts is not None:
            self._describe_first(rollouts)
        if self.strategy.has_ended:
            self.stream.steps = step
        self._failed = self.failed_rewards.take(rollouts)
        return rollouts

    def _checked(self, rollouts: Batch) -> Batch:
        """Check that the rollouts are recent enough, and record the failed rewards of their step."""
        failed = self.stream.dropped
        rollouts = check_staleness(rollouts, self.version, self.stream.most_stale)
        if failed is not None:
            failed = check_staleness(failed, self.version, self.stream.most_stale)
        self.failed_rewards.record(failed, rollouts, self.tracker, self.step)
        return rollouts

    # --- evaluation

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy after a step; returns metrics."""
        return self.evaluation.at_step(self.step)

    def _evaluate_at_start(self) -> None:
        """Evaluate the policy before the first step, and log that as step 0."""
        found = self.evaluation.start()
        if found and not self.step:
            self.tracker.log(0, self.rename(found), steps=self.steps)
        elif found:  # its step has a line of metrics, from before the held-out prompts were named
            self.info(f"as it was resumed: {console_line(self.step, {'eval/score': found['eval/score']})}")

    def describe_heldout(self, rollouts: Batch) -> Mapping[str, float]:  # noqa: ARG002 - for a recipe's own
        """Metrics of an evaluation's rollouts beside those that every run has."""
        return {}

    def _evaluate_and_log(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate when it is due, and log the step; returns whether the policy is the best so far."""
        if self.config.evaluation.is_due(self.step, self.is_last_step):
            metrics |= self._evaluate()
        with self.phase("log"):
            record_step(self.tracker, self.step, self.steps, metrics, experience, self.tokenizer)
        self.note_first_step()
        return self.evaluation.is_best(metrics, self.step)

    def _respond_heldout(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Make one rollout of each prompt, scored by the held-out reward; those whose reward failed are left out."""
        rollouts = self._make_rollouts(prompts, sampling, heldout=True)
        self._describe_first(rollouts)
        return main_branches(check_staleness(rollouts, self.version))

    def _sum_up(self) -> None:
        """Compare the policy with what it was at the start."""
        if self.config.checkpoint.export_path:
            self.export(Path(self.config.checkpoint.export_path).expanduser())
        score = self.evaluation.finish(self.step)
        # It may not have been known that this step is the last.
        if self.evaluation.is_best(self.evaluation.scores.get("end", {}), self.step):
            self.checkpoints.store.mark_best(self.step)
        self.note_end("policy", score=score)
        if verdict := self.evaluation.verdict(self.checkpoints.store.folder):
            self.info(verdict)

    # --- before the first step

    def _read_data(self) -> None:
        config = self.config
        self.tokenizer = config.model.tokenizer()
        self.prompts = self._open_prompts(self._read_rows())
        for line in describe_prompts(config.data, self.prompts):
            self.info(line)
        if not config.agent.func_path:  # whose environments may write messages
            warning = unused_template(config.data, self.prompts.rows[0]["input"], self.tokenizer)
            if warning is not None:
                self.info(warning)
        if self.prompts.too_long:  # fewer than the plan has counted
            self.info(config.arithmetic(len(self.prompts)))
        self.reward = self._open_reward()
        self.failed_rewards = FailedRewards(self._least_rewarded, config.ROLLOUTS, self.info)
        self.strategy = self._open_strategy()
        rows = self._read_rows(heldout=True)
        heldout = self._open_prompts(rows, heldout=True) if rows else None
        self.evaluation = Evaluation(
            prompts=None if heldout is None else heldout.take(len(heldout)),
            response=self.clock.outside_step("evaluate", self._respond_heldout),
            sampling=config.heldout_sampling,
            samples_per_prompt=config.evaluation.samples_per_prompt,
            greedy=config.evaluation.greedy,
            best_metric_key=config.evaluation.best_metric,
            info=self.info,
            further=self.describe_heldout,
        )

    def _read_rows(self, heldout: bool = False) -> list[dict[str, Any]]:
        """The rows of the prompts to train on, or of the held-out ones, of which there may be none."""
        data = self.config.data
        return self.config.evaluation.rows(data) if heldout else data.rows(self.config.seed)

    def _open_prompts(self, rows: list[dict[str, Any]], heldout: bool = False) -> PromptSource:
        """Rows as token ids."""
        config = self.config
        return read_prompts(config.data, rows, self.tokenizer, config.seed, heldout=heldout, info=self.info)

    def _open_reward(self) -> RewardSource | None:
        """What gives rewards; None: the agent's environment does."""
        source = self.config.reward_source
        return None if source is None else open_reward(source, self.config.reward.settings())

    def _open(self, parts: Mapping[str, Stateful]) -> None:
        """Open the queue of rollouts, resume, and let every role load its model."""
        if self.config.asynchronous.ahead:
            self.prompts.check_savable()  # of what is generated ahead a checkpoint holds all columns
        stream = RolloutQueue(
            self._fill_step,
            self._count_steps(),
            self.config.asynchronous.ahead,
            stopped=lambda: self.trainer.stop_requested,
            sources={"prompts": self.prompts, **self.strategy.sources()},
            clock=self.clock,
            metrics=lambda: self.strategy.metrics,
            dropped=lambda: self._failed,
            most_stale=self.config.asynchronous.most_stale,
        )
        resumed = self.open(stream, {"heldout": self.evaluation, **parts}, self._write_checkpoint, self._steps_left)
        self.calls.load(self._count_steps())  # of the whole run, also where it was resumed
        if resumed is not None:
            self._restore(resumed)
        elif self.config.train.lora_path:
            # The engines have loaded the model alone.
            self.calls.sync_weights(self.version)
        self.note_setup()

    def _restore(self, folder: Path) -> None:
        """Let the roles resume from a step's checkpoint, and bring the policy to the engines."""
        for line in self.calls.load_state(folder):
            self.info(f"not exactly as before: {line}")
        if self.config.asynchronous.ahead:
            # Each step has a version of its own; the run before may have trained a critic alone, with none.
            self.progress.version = self.step
        if self.version or self.config.train.lora_path:
            self.calls.sync_weights(self.version)

    def _count_steps(self) -> int:
        """Steps that the prompts fill, once the long ones are left out."""
        steps = self.config.steps(len(self.prompts) * self.config.data.epochs)
        if steps < 1:
            least = f"prompts_per_step={self.config.prompts_per_step}"
            remedy = "raise data.max_prompt_tokens, or lower prompts_per_step"
            raise ValueError(f"{len(self.prompts)} prompts are left, fewer than {least}; {remedy}")
        return steps

    def _steps_left(self) -> int:
        """Steps that the prompts fill which were not yet trained on."""
        prompts = self.prompts.left(self.config.data.epochs) + self.strategy.waiting
        steps = self.config.steps(prompts)
        if self.config.max_steps is None:
            return steps
        return min(steps, max(self.config.max_steps - self.step - self.stream.queued, 0))

    def _least_rewarded(self, count: int) -> int:
        """Minimum number of rollouts with a reward in a step of `count` of them: one per rank and optimizer step."""
        return (self.config.placement.actor_ranks or 1) * self.config.optimizer_steps(count)

    def _open_strategy(self) -> RolloutStrategy:
        """Open what collects the rollouts of a step."""
        name, option = self.config.rollout_strategy
        if not name:
            return WholeSteps(self.respond_to_next, self.config.prompts_per_step)
        return load("rollout strategy", name, option)(self)

    # --- checkpoints

    def _write_checkpoint(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.calls.end_generation()
        self.calls.save_state(folder)
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer as a folder that from_pretrained loads."""
        self.calls.end_generation()
        self.calls.save(folder)
        self.tokenizer.save_pretrained(folder)
