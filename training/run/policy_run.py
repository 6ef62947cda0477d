"""A run that trains a policy on its own rollouts: prompts, rewards, evaluation, and the queue that the loop reads.

`P` prompts, `B` rollouts: responses or episodes, several of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from components.data.samples import add_rewards, drop_unrewarded, for_samples, main_branches, with_status
from components.data.shown import described
from components.generate.config import SamplingConfig
from components.rewards.base import RewardError
from components.rewards.opening import open_reward
from plugins.dynamic_sampling.sampler import PromptFilter
from plugins.partial_rollouts.buffer import GroupsInFlight
from training.launch.inputs import describe_prompts, read_prompts, unused_template
from training.run.evaluation import Evaluation
from training.run.policy_calls import PolicyCalls
from training.run.queue import SampleStream, Stateful
from training.run.rollouts import check_staleness, record_step, rollout_metrics
from training.run.run import Run
from training.tracking import console_line
from training.tracking.tracker import UNREWARDED

if TYPE_CHECKING:
    from components.data.prompts import PromptSource
    from components.rewards.base import RewardSource
    from core import BaseTrainer
    from training.options.rl_options import RLOptions

Generate = Callable[[Batch, SamplingConfig], Batch]
Score = Callable[[Batch], Batch]

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

    `for rollouts in run.rollouts(generate, score)` runs the steps that are left, `end_step` ends each, and `finish` the
    run. What the trainer's `init` has to do is done by the constructor: prompts are read, models loaded, and a
    checkpoint resumed from, if there is one.
    """

    config: RLOptions
    generate: Generate
    """As the recipe does; known from `rollouts` on, like the scores."""
    _has_shown_episode = False
    failed: Batch | None = None
    """The step's rollouts without a reward; they are not trained on."""
    _scores: Sequence[Score]
    _score_heldout: Score

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

    def rollouts(self, generate: Generate, *scores: Score, score_heldout: Score | None = None) -> Iterator[Batch]:
        """Generate and score the rollouts of each step that is left; none are older than they may be.

        Args:
            generate: (prompts, sampling) -> a response, or an episode, to each prompt.
            scores: add `reward` and `score`, one after the other. Default: `add_rewards`.
            score_heldout: the same in evaluations, alone. Default: `scores`.
        """
        self.generate = self.awake(generate)
        self._scores = scores or (self.add_rewards,)
        self._score_heldout = score_heldout or self._score
        if self.config.evaluation.at_start and not self.trainer.stop_requested:
            self._evaluate_at_start()
        with self.checkpoints.kept_if_rewards_fail():
            self.checkpoints.catch_up(self._evaluate_and_log)
            for drawn in self.stream:
                self.calls.end_generation()
                self.failed = None
                rollouts = check_staleness(drawn, self.version, self.stream.most_stale)
                # Else the recipe asks for rewards later.
                yield self.rewarded(rollouts) if "reward_failed" in rollouts else rollouts

    def add_rewards(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score`, as `reward.source` or the agent's environment says."""
        return add_rewards(rollouts, self.reward, self.tokenizer, self.info, self.step)

    def rewarded(self, rollouts: Batch) -> Batch:
        """The rollouts that have a reward; the others, of which a step may have a few, are written to `failed/`.

        Raises:
            RewardError: fewer are left than the optimizer steps of all ranks need.
        """
        left = drop_unrewarded(self._check_rewarded(rollouts))
        if len(left) < len(rollouts):
            self.failed = rollouts.select(rollouts["reward_failed"] > 0)
            self.tracker.rollouts(self.step, self.failed, UNREWARDED)
            what = f"{len(self.failed)} of {len(rollouts)} {self.config.ROLLOUTS}"
            where = UNREWARDED.format(step=self.step)
            self.info(f"step {self.step}: {what} have no reward and are left out; they are in {where} of the run")
        return left

    def _check_rewarded(self, rollouts: Batch) -> Batch:
        """The same rollouts; RewardError where too few have a reward, as far as that is known yet."""
        if "reward_failed" not in rollouts:
            return rollouts
        count = int((rollouts["reward_failed"] == 0).sum())
        fewest = (self.config.placement.actor_ranks or 1) * self.config.optimizer_steps(count)
        if count < min(fewest, len(rollouts)):
            raise RewardError(
                f"{count} of {len(rollouts)} {self.config.ROLLOUTS} have a reward; the optimizer steps of all ranks "
                f"need {fewest}"
            )
        return rollouts

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
        found = self.count(experience) | rollout_metrics(experience, low, high, self.failed)
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

    def awake(self, generate: Generate) -> Generate:
        """`generate`, with the engines awake, should they sleep while the policy trains."""

        def generate_awake(prompts: Batch, sampling: SamplingConfig) -> Batch:
            self.calls.begin_generation()
            rollouts = generate(prompts, sampling)
            self._describe_first(rollouts)
            return rollouts

        return generate_awake

    def _describe_first(self, rollouts: Batch) -> None:
        """Show what the first episode of the run begins with, which its environment may have written."""
        if self._has_shown_episode or "num_turns" not in rollouts:
            return
        self._has_shown_episode = True
        ids = rollouts.lists("tokens")[0][: int(rollouts["prompt_length"][0])]
        self.info(f"first episode begins {described(str(self.tokenizer.decode(ids)), ids)}")

    def _make_rollouts(self, step: int) -> Batch | None:
        """One step's rollouts. With dynamic sampling those at the end of the data may be fewer; None: there are none,
        or the run is to stop.
        """
        wanted = self.config.prompts_per_step
        if self.in_flight is not None:
            with self.phase("generate"):
                rollouts = self.in_flight.fill(step, wanted, wanted * (self.stream.steps - step + 1))
            return None if rollouts is None else self._check_rewarded(self._scored(rollouts))
        if self.prompt_filter is None:
            return self._check_rewarded(self._respond_to(self.prompts.take(wanted), step))
        rollouts = self.prompt_filter.fill(step, wanted, lambda count: self._respond_to(self.prompts.take(count), step))
        if self.prompt_filter.ended:
            self.stream.steps = step
        return None if rollouts is None else self._check_rewarded(rollouts)

    def _respond_to(self, prompts: Batch, step: int) -> Batch:
        """`samples_per_prompt` scored rollouts of each prompt."""
        with self.phase("generate"):
            samples = for_samples(prompts, self.config.samples_per_prompt)
            rollouts = self.generate(samples, self.config.sampling(step))
        return self._scored(rollouts)

    def _scored(self, rollouts: Batch) -> Batch:
        with self.phase("reward"):
            return with_status(self._score(rollouts))

    def _score(self, rollouts: Batch) -> Batch:
        for score in self._scores:
            rollouts = score(rollouts)
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
        record_step(self.tracker, self.step, self.steps, metrics, experience, self.tokenizer)
        self.note_first_step()
        return self.evaluation.is_best(metrics, self.step)

    def _respond_heldout(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One scored rollout of each."""
        rollouts = self.generate(prompts, sampling)
        check_staleness(rollouts, self.version)
        return main_branches(self._score_heldout(rollouts))

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
        self.prompt_filter = self._open_filter()
        self.in_flight = self._open_in_flight()
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
        sources: dict[str, Any] = {"prompts": self.prompts}
        if self.in_flight is not None:
            sources["groups"] = self.in_flight
        filling = self.prompt_filter if self.in_flight is None else self.in_flight  # which is false while it is empty
        stream = SampleStream(
            self._make_rollouts,
            self._count_steps(),
            self.config.asynchronous.ahead,
            stopped=lambda: self.trainer.stop_requested,
            sources=sources,
            clock=self.clock,
            metrics=lambda: {} if filling is None else filling.metrics,
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
        in_flight = 0 if self.in_flight is None else len(self.in_flight)
        steps, most = self.config.steps(self.prompts.left(self.config.data.epochs) + in_flight), self.config.max_steps
        return steps if most is None else min(steps, max(most - self.step - self.stream.queued, 0))

    def _open_filter(self) -> PromptFilter | None:
        """Dynamic sampling, where it is asked for."""
        if self.config.filter_range is None:
            return None
        return PromptFilter(
            prompts=self.prompts,
            bounds=self.config.filter_range,
            option=self.config.FILTER_OPTION,
            passes=self.config.data.epochs,
            fewest=self.config.placement.actor_ranks or 1,
            stopped=lambda: self.trainer.stop_requested,
            info=self.info,
        )

    def _open_in_flight(self) -> GroupsInFlight | None:
        """Prompts whose rollouts continue while weights change, where that is asked for."""
        own = self.config.asynchronous
        if not own.partial_rollout:
            return None
        return GroupsInFlight(
            take=self.prompts.take,
            begin=lambda prompts, step: self.calls.begin(prompts, self.config.sampling(step)),
            collect=self.calls.collect,
            engines=self.calls.engines,
            samples=self.config.samples_per_prompt,
            in_flight=own.in_flight_prompts or self.config.prompts_per_step,
            most_stale=own.most_stale,
            version=lambda: self.version,
            stopped=lambda: self.stream.ending,
            info=self.info,
        )

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
