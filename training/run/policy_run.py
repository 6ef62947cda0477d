"""A run that trains a policy on its own rollouts: prompts, rewards, evaluation, and the queue of rollouts.

P: number of prompts. B: number of rollouts (responses or episodes), several per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.batch import Batch
from components.data.samples import add_rewards, for_samples, main_branches, policy_inputs, with_status
from components.data.shown import described
from components.generate.config import SamplingConfig
from components.registry import find, load
from components.rewards.opening import open_reward
from training.run.evaluation import Evaluation
from training.run.failed_rewards import FailedRewards, split_failed
from training.run.policy_calls import PolicyCalls
from training.run.policy_checkpoints import PolicyCheckpoints
from training.run.prompts import describe_prompts, read_prompts, unused_template
from training.run.queue import Stateful, open_queue
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
    """Method of a trainer that generates rollouts for a training step, or with `heldout` for an evaluation."""

    def __call__(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Generate one scored rollout per row of `prompts`. Rollouts whose reward failed are left out."""
        ...


Score = Callable[[Batch], Batch]
"""Method of a trainer that scores rollouts. It leaves out those whose reward failed."""

SHOWN = (
    "reward/score",
    "eval/score",
    "eval/score_greedy",
    "rollout/response_length",
    "actor/approx_kl",
    "actor/entropy",
    "timing_s/step",
)
"""Default metrics of a step that are shown on the terminal."""


class PolicyRun(Run[Batch]):
    """A training run without its algorithm.

    `for rollouts in run.queue(make_rollouts, score)` iterates over the remaining steps. Call `end_step` at the end of
    each step and `finish` at the end of the run. The constructor reads the prompts, loads the models, and resumes from
    a checkpoint if there is one.
    """

    CHECKPOINTS = PolicyCheckpoints
    config: RLOptions
    checkpoints: PolicyCheckpoints  # pyright: ignore[reportIncompatibleVariableOverride] (set once)
    _has_shown_episode = False
    _failed: Batch | None = None
    """Rollouts without a reward of the step that was generated last."""
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
            trainer: trainer that executes the run.
            config: options of the run.
            recipe: folder of the recipe.
            calls: calls to the roles. The default uses the role groups of the trainer.
            shown: metrics of a step that are shown on the terminal.
            parts: additional parts of the trainer that a checkpoint holds, by name.
        """
        super().__init__(trainer, config, recipe, shown)
        self.calls = calls or PolicyCalls(trainer, config)
        self._read_data()
        self._open(parts or {})

    @property
    def version(self) -> int:
        """Version of the weights that the engines sample from: the number of the step that produced them."""
        return self.progress.version

    # --- the loop

    def queue(self, make_rollouts: MakeRollouts, score: Score) -> Iterator[Batch]:
        """Iterate over the remaining steps, and yield the scored rollouts of each.

        The queue resumes from a checkpoint, generates ahead of training, and ends when a stop was requested.

        Args:
            make_rollouts: generates and scores rollouts, in training and in evaluations.
            score: scores rollouts that were generated without `make_rollouts`, such as partial rollouts.
        """
        self._make_rollouts = make_rollouts
        self._score = score
        # A run that was asked to stop should not spend minutes on an evaluation first.
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
        """Wake the engines if they were asleep, and time the block as the phase `generate`."""
        with self._turn("wake"):
            self.calls.begin_generation()
        with self.phase("generate"):
            yield

    def _turn(self, name: str) -> AbstractContextManager[None]:
        """Time the block as a phase, if engines and learners take turns on their devices."""
        return self.phase(name) if self.config.placement.takes_turns else nullcontext()

    def score(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add the columns `reward` and `score` [B], and leave out the rollouts whose reward failed."""
        with self.phase("reward"):
            rollouts = with_status(self.add_rewards(rollouts, heldout))
        return self.drop_failed(rollouts, heldout)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:  # noqa: ARG002 - recipes read it
        """Add `reward`, `score` and `reward_failed` [B], from `reward.source` or from the environment of the agent."""
        # Responses of engines that have scored them already (reward.while_generating). Episodes have `num_turns`.
        if "reward_failed" in rollouts and "num_turns" not in rollouts:
            return rollouts
        return add_rewards(rollouts, self.reward, self.tokenizer, self.info, self.step)

    def drop_failed(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Leave out the rollouts whose reward failed. Those of a training step are counted, and saved in `failed/`."""
        return split_failed(rollouts)[0] if heldout else self.failed_rewards.drop(rollouts)

    def compute_logprobs(self, rollouts: Batch) -> Batch:
        """Add `logprob` (of the policy before the update) and `reference_logprob` [N], in nats, as far as needed."""
        with self.phase("logprobs"):
            return rollouts.with_tokens(**self.calls.old_and_reference_logprobs(policy_inputs(rollouts)))

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
            experience: batch that the step was trained on.
            metrics: metrics by full name. Those of the rollouts, the clock and the queue are added.
            weights_synced: True if the engines have received the weights of this step.
            by_role: metrics of the update of a role, such as `actor=...`, which are logged as `actor/<name>`.
        """
        # Counted before the evaluation, which checks that its responses are from these weights.
        if weights_synced:
            self.progress.version = self.step
        logged = dict(metrics or {})
        for role, role_metrics in by_role.items():
            logged |= {f"{role}/{name}": value for name, value in role_metrics.items()}
        logged = self.rename(logged | self.measure(experience))
        with self.checkpoints.kept_if_rewards_fail():
            is_best = self.checkpoints.record(self._evaluate_and_log, experience, logged)
        self.checkpoints.save_when_due(is_best)

    def measure(self, experience: Batch) -> dict[str, float]:
        """Return the metrics of a step other than those of updates: speed, rollouts, last checkpoint and queue."""
        # Logged without a correction too: the share of tokens outside of the range shows if one is needed.
        low, high = self.config.algorithm.correction_range
        metrics = self.count(experience) | rollout_metrics(experience, low, high, self.failed_rewards.of_step)
        return metrics | self.checkpoints.metrics | self.stream.metrics

    def rename(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics under the names that they are logged with. A recipe may override it."""
        return metrics

    def finish(self) -> None:
        """Save the last checkpoint, write the summary, and close the run."""
        # Saved first: if the last evaluation fails, the trained policy is on the disk.
        self.checkpoints.save()
        if self.is_last_step:
            self._sum_up()
        else:
            self.note_stop()
        self.close()

    def close(self) -> None:
        """Close the reward, the tracker and the roles."""
        if self.reward is not None:
            self.reward.close()
        self.tracker.close()
        self.calls.end()

    # --- generation of rollouts

    def _describe_first(self, rollouts: Batch) -> None:
        """Show the beginning of the first episode, because its environment may have changed the prompt."""
        if self._has_shown_episode or "num_turns" not in rollouts or not len(rollouts):
            return
        self._has_shown_episode = True
        ids = rollouts.lists("tokens")[0][: int(rollouts["prompt_length"][0])]
        self.info(f"first episode begins {described(str(self.tokenizer.decode(ids)), ids)}")

    def respond_to_next(self, count: int, step: int) -> Batch:
        """Generate `samples_per_prompt` rollouts for each of the next `count` prompts. For rollout strategies."""
        prompts = for_samples(self.prompts.take(count), self.config.samples_per_prompt)
        return self._make_rollouts(prompts, self.config.sampling(step))

    def score_rollouts(self, rollouts: Batch) -> Batch:
        """Score rollouts with the method of the trainer. For rollout strategies that do the generation."""
        return self._score(rollouts)

    def _fill_step(self, step: int) -> Batch | None:
        """Generate the rollouts of one step. Return None at the end of the data or if a stop was requested.

        With dynamic sampling, the last step may have fewer prompts than the others.
        """
        # Failed rollouts of a generation that ended with an error would be counted in this step.
        self.failed_rewards.take(None)
        rollouts = self.strategy.fill(step)
        if rollouts is not None:
            self._describe_first(rollouts)
        # The strategy used more prompts than planned, so the run ends with this step.
        if self.strategy.has_ended:
            self.stream.steps = step
        self._failed = self.failed_rewards.take(rollouts)
        return rollouts

    def _checked(self, rollouts: Batch) -> Batch:
        """Check that the rollouts are recent enough, and record the failed rewards of their step."""
        # The limit of the batch, not of the options: a resumed run may have changed how far generation is ahead.
        failed = self.stream.dropped
        rollouts = check_staleness(rollouts, self.version, self.stream.most_stale)
        if failed is not None:
            failed = check_staleness(failed, self.version, self.stream.most_stale)
        self.failed_rewards.record(failed, rollouts, self.tracker, self.step)
        return rollouts

    # --- evaluation

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy after a step. Return the metrics."""
        return self.evaluation.at_step(self.step)

    def _evaluate_at_start(self) -> None:
        """Evaluate the policy before the first step, and log the metrics as step 0."""
        metrics = self.evaluation.start()
        if metrics and not self.step:
            self.tracker.log(0, self.rename(metrics), steps=self.steps)
        elif metrics:  # not logged: the step has its metrics from before, when there were no held-out prompts
            self.info(
                f"before the first resumed step: {console_line(self.step, {'eval/score': metrics['eval/score']})}"
            )

    def describe_heldout(self, rollouts: Batch) -> Mapping[str, float]:  # noqa: ARG002 - for a recipe's own
        """Return additional metrics of the rollouts of an evaluation. A recipe may override it."""
        return {}

    def _evaluate_and_log(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate if it is due, and log the step. Return True if the policy is the best so far."""
        if self.config.evaluation.is_due(self.step, self.is_last_step):
            metrics |= self._evaluate()
        with self.phase("log"):
            record_step(self.tracker, self.step, self.steps, metrics, experience, self.tokenizer)
        self.note_first_step()
        return self.evaluation.is_best(metrics, self.step)

    def _respond_heldout(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate one rollout per prompt, scored by the held-out reward. Rollouts whose reward failed are left out."""
        rollouts = self._make_rollouts(prompts, sampling, heldout=True)
        self._describe_first(rollouts)
        # An episode may have several branches of context. The score of an evaluation counts each episode once.
        return main_branches(check_staleness(rollouts, self.version))

    def _sum_up(self) -> None:
        """Export the policy, and report its scores at the start and at the end."""
        score = self.evaluation.finish(self.step)
        # `finish` may have evaluated this step only now, if it was not known to be the last.
        if self.evaluation.is_best(self.evaluation.scores.get("end", {}), self.step):
            self.checkpoints.store.mark_best(self.step)
        self.export_trained()
        self.note_end("policy", score=score)
        if verdict := find("evaluation", "verdict"):
            verdict(self)

    # --- before the first step

    def _read_data(self) -> None:
        config = self.config
        self.tokenizer = config.model.tokenizer()
        self.prompts = self._open_prompts(self._read_rows())
        for description in describe_prompts(config.data, self.prompts):
            self.info(description)
        if not config.agent.func_path:  # the environment of an agent may build chat messages by itself
            warning = unused_template(config.data, self.prompts.rows[0]["input"], self.tokenizer)
            if warning is not None:
                self.info(warning)
        if self.prompts.too_long:  # so the plan has counted too many prompts
            self.info(config.arithmetic(len(self.prompts)))
        self.reward = self._open_reward()
        self.failed_rewards = FailedRewards(self._least_rewarded, config.ROLLOUTS, self.info)
        self.strategy = self._open_strategy()
        heldout: Batch | None = None
        if rows := self._read_rows(heldout=True):
            source = self._open_prompts(rows, heldout=True)
            heldout = source.take(len(source))
        self.evaluation = Evaluation(
            prompts=heldout,
            response=self.clock.outside_step("evaluate", self._respond_heldout),
            sampling=config.heldout_sampling,
            samples_per_prompt=config.evaluation.samples_per_prompt,
            greedy=config.evaluation.greedy,
            best_metric_key=config.evaluation.best_metric,
            info=self.info,
            further=self.describe_heldout,
        )

    def _read_rows(self, heldout: bool = False) -> list[dict[str, Any]]:
        """Return the rows of the prompts to train on, or of the held-out prompts, which may be empty."""
        data = self.config.data
        return self.config.evaluation.rows(data) if heldout else data.rows(self.config.seed)

    def _open_prompts(self, rows: list[dict[str, Any]], heldout: bool = False) -> PromptSource:
        """Tokenize the rows of prompts."""
        data = self.config.data
        return read_prompts(data, rows, self.tokenizer, self.config.seed, heldout=heldout, info=self.info)

    def _open_reward(self) -> RewardSource | None:
        """Open the source of rewards. Return None if the environment of the agent gives them."""
        source = self.config.reward_source
        return None if source is None else open_reward(source, self.config.reward.settings())

    def _open(self, parts: Mapping[str, Stateful]) -> None:
        """Open the queue of rollouts, resume from a checkpoint, and load the model of every role."""
        if self.config.asynchronous.ahead:
            # A checkpoint holds all columns of the batches generated ahead.
            load("rollout queue", "savable", "asynchronous.enabled=true")(self.prompts)
        stream = open_queue(
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
        self.calls.load(self._count_steps())  # schedules cover the whole run, also after a resume
        if resumed is not None:
            self._restore(resumed)
        elif self.config.train.lora_path:
            # The engines have loaded the base model without the adapters.
            self.calls.sync_weights(self.version)
        self.note_setup()

    def _restore(self, folder: Path) -> None:
        """Resume the roles from a checkpoint, and send the policy to the engines."""
        for note in self.calls.load_state(folder):
            self.info(f"not exactly as before: {note}")
        if self.config.asynchronous.ahead:
            # Generation ahead of training needs a version per step. The previous run may have trained only a critic in
            # its last steps, which publishes no version.
            self.progress.version = self.step
        # At version 0 the policy is the initial model, which the engines have loaded from its files already.
        if self.version or self.config.train.lora_path:
            self.calls.sync_weights(self.version)

    def _count_steps(self) -> int:
        """Return the number of steps that the prompts fill, without those that are too long."""
        steps = self.config.steps(len(self.prompts) * self.config.data.epochs)
        # The plan may have counted prompts that are too long: it tokenizes only the first ones.
        if steps < 1:
            least = f"prompts_per_step={self.config.prompts_per_step}"
            remedy = "raise data.max_prompt_tokens, or lower prompts_per_step"
            raise ValueError(f"{len(self.prompts)} prompts are short enough, fewer than {least}; {remedy}")
        return steps

    def _steps_left(self) -> int:
        """Return the number of steps that the remaining prompts fill."""
        # Prompts that a strategy has taken from the data and not used yet also fill steps.
        prompts = self.prompts.left(self.config.data.epochs) + self.strategy.waiting
        steps = self.config.steps(prompts)
        if self.config.max_steps is None:
            return steps
        return min(steps, max(self.config.max_steps - self.step - self.stream.queued, 0))

    def _least_rewarded(self, count: int) -> int:
        """Minimum number of rollouts with a reward in a step of `count` of them: one per rank and optimizer step."""
        ranks = self.config.placement.actor_ranks or 1
        return ranks * self.config.optimizer_steps(count)

    def _open_strategy(self) -> RolloutStrategy:
        """Open the rollout strategy that the options select."""
        name, option = self.config.rollout_strategy
        if not name:
            return WholeSteps(self.respond_to_next, self.config.prompts_per_step)
        return load("rollout strategy", name, option)(self)

    # --- checkpoints

    def _write_checkpoint(self, folder: Path) -> None:
        """Write the state of the roles and the exported policy into the folder of a step."""
        # A learner that sleeps has no weights on its device to save.
        self.calls.end_generation()
        self.calls.save_state(folder)
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Save the policy and the tokenizer in a folder that `from_pretrained` loads."""
        self.calls.end_generation()
        self.calls.save(folder)
        self.tokenizer.save_pretrained(folder)
