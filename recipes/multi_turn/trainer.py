"""The loop: play, compare, learn, bring the weights over. One line per stage."""

import time
from pathlib import Path
from typing import Any

from components.batch import Batch
from components.engines.config import EVALUATION_STEP
from core import BaseTrainer, replicate
from training.checkpoint import Checkpoints
from training.evaluation import Heldout
from training.options import read_prompts
from training.partial_rollouts import GroupsInFlight
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.rollouts import (
    check_staleness,
    for_samples,
    main_branches,
    record_step,
    rollout_metrics,
    score_answers,
)
from training.tracking import Tracker, redact
from training.weight_check import COLD, check_greedy, greedy_prompts

from . import remote_call
from .algorithm import add_advantages
from .config import RECIPE, MultiTurnConfig

SHOWN = (
    "reward/score",
    "eval/score",
    "rollout/turns_mean",
    "actor/approx_kl",
    "actor/entropy",
    "timing_s/step",
)
"""What a person sees of a step."""


class MultiTurnTrainer(BaseTrainer):
    """Drives actor, rollout and reference."""

    config: MultiTurnConfig

    def fit(self) -> None:
        """Train for as many steps as there are prompts, and leave the result in the run folder."""
        if not self.stop_requested:
            self.heldout.start(self.stream.step)
        with self.checkpoints.kept_if_rewards_fail():
            self.checkpoints.catch_up(self.judge)
            for samples in self.stream:
                fresh = check_staleness(samples, self.progress.version, self.stream.most_stale)
                experience = self.look_back(fresh)
                experience = add_advantages(experience, self.config)
                metrics = self.update(experience)
                self.sync_weights(experience)
                is_best = self.record(experience, metrics)
                self.checkpoints.save_when_due(is_best)
        self.finish()

    # --- the stages

    def samples(self, step: int) -> Batch | None:
        """`samples_per_prompt` episodes from each of the step's prompts; of the first ones that are done, where they go
        on while weights change, and None then when the run is to stop.
        """
        wanted = self.config.prompts_per_step
        with self.clock.phase("generate"):
            if self.groups is not None:
                samples = self.groups.fill(step, wanted, wanted * (self.stream.steps - step + 1))
            else:
                prompts = for_samples(self.prompts.take(wanted), self.config.samples_per_prompt)
                samples = self.RG_ROLLOUT.generate(prompts, self.config.sampling(step))
        return None if samples is None else self.score(samples)

    def score(self, samples: Batch) -> Batch:
        """The episodes as their worlds have rewarded them; says which have failed."""
        return score_answers(samples, None, self.tokenizer, self.say)

    def look_back(self, samples: Batch) -> Batch:
        """Add what policy and reference say about the episodes, before anything is learnt from them."""
        tokens = samples.only("tokens")
        with self.clock.phase("logprobs"):
            views = [self.RG_ACTOR.logprobs(tokens, self.config.rollout.temperature)] if self.config.looks_back else []
            for view in views if self.config.takes_turns else ():
                view.result()  # so that the reference has the cores for itself
            if self.config.needs_reference:
                views.append(self.RG_REFERENCE.logprobs(tokens))
            for view in views:
                samples = samples.with_tokens(**view.result().per_token)
        return samples

    def update(self, experience: Batch) -> dict[str, float]:
        """Train the policy on the step's episodes."""
        names = ("tokens", "action_mask", "advantage", "rollout_logprob", "logprob", "correction")
        columns = experience.only(*(name for name in names if name in experience))
        with self.clock.phase("train"):
            metrics: dict[str, float] = self.RG_ACTOR.update(replicate(columns), self.stream.step)
        return {f"actor/{name}": value for name, value in metrics.items()}

    def sync_weights(self, experience: Batch) -> None:
        """Let the engines sample from what was learnt."""
        with self.clock.phase("sync"):
            remote_call.sync_weights(self.stream.step)
        self.progress.version = self.stream.step
        if self.config.rollout.verify_weight_sync:
            self.verify_weights(experience)

    def verify_weights(self, experience: Batch) -> None:
        """Let the policy judge greedy answers of every engine."""
        own = self.config.placement
        prompts = greedy_prompts(experience, 4 * max(own.rollout_engines or 1, own.actor_ranks or 1))
        with self.clock.phase("verify"):
            sampling = self.config.sampling(self.stream.step, 0.0)
            answers: Batch = self.RG_ROLLOUT.generate(prompts, sampling, True)
            check_staleness(answers, self.progress.version)
            views = [self.RG_ACTOR.logprobs(answers.only("tokens"), temperature) for temperature in (1.0, COLD)]
            plain_N, cold_N = (view.result()["logprob"] for view in views)
        precision = "float32" if self.config.train.precision == "fp32" else "bfloat16"
        self.say(f"weights verified: {check_greedy(answers, plain_N, cold_N, precision)}")

    def record(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Say what the step was like, and judge it; returns whether the policy is the best so far."""
        metrics |= self.progress.count(self.clock.take(), experience, self.job_memory_bytes)
        metrics |= rollout_metrics(experience, *self.config.algorithm.correction_range)
        metrics |= self.checkpoints.metrics | self.stream.metrics
        return self.checkpoints.record(self.judge, experience, metrics)

    def judge(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate when it is time, write the step down and show it; returns whether the policy is the best so far."""
        step, is_last = self.stream.step, not len(self.stream)
        if self.config.evaluation.is_due(step, is_last):
            metrics |= self.heldout.at_step(is_last)
        record_step(self.tracker, step, self.stream.steps, metrics, experience, self.tokenizer)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        return self.heldout.is_best(metrics)

    def finish(self) -> None:
        """Save what is not yet saved, sum up what was gained, and say where the policy is."""
        self.checkpoints.save()
        if len(self.stream):
            stopped = f"stopped after step {self.stream.step} of {self.stream.steps}"
            self.say(f"{stopped}; run_dir={self.config.run_dir} goes on")
        else:
            self.sum_up()
        self.tracker.close()
        remote_call.end_job()

    def sum_up(self) -> None:
        """Compare the policy with what it was at the start."""
        if self.config.checkpoint.export_path:
            self.export(Path(self.config.checkpoint.export_path))
        score, seconds = self.heldout.finish(self.stream.step), self.progress.seconds
        if self.heldout.is_best(self.heldout.scores.get("end", {})):  # it was not known that this step is the last
            self.checkpoints.store.mark_best(self.stream.step)
        speed = self.progress.tokens / max(seconds, 1e-9)
        self.tracker.update_summary(score=score, seconds={"training": seconds}, tokens_per_second=speed)
        self.say(f"trained policy: {self.checkpoints.store.latest()}/hf")

    # --- before the first step

    def init(self) -> None:
        """Read the prompts, let every role load its model at the same time, and go on from a checkpoint if there is."""
        config = self.config
        self.clock, self.progress = PhaseClock(self.tell), Progress()
        self.tokenizer = config.model.tokenizer()
        self.prompts = read_prompts(
            config.data, config.data.rows(config.seed), self.tokenizer, config.seed, say=self.say
        )
        self.say(self.prompts.describe_first())
        if self.prompts.too_long:  # fewer than the plan has counted
            self.say(config.arithmetic(len(self.prompts)))
        self.groups = self.groups_in_flight()
        self.stream = SampleStream(
            self.samples,
            self.count_steps(),
            config.asynchronous.ahead,
            stopped=lambda: self.stop_requested,
            sources={"prompts": self.prompts} | ({} if self.groups is None else {"groups": self.groups}),
            clock=self.clock,
            metrics=lambda: {} if self.groups is None else self.groups.metrics,
            most_stale=config.asynchronous.most_stale,
        )
        self.heldout = Heldout(
            self.heldout_prompts(),
            self.clock.told("evaluate", self.play_heldout),
            temperature=config.evaluation.temperature,
            samples_per_prompt=config.evaluation.samples_per_prompt,
            best_metric_key=config.evaluation.best_metric,
            say=self.say,
        )
        self.checkpoints = RunCheckpoints(
            Checkpoints(config.checkpoint_folder, config.checkpoint.keep, config.checkpoint.max_bytes),
            self.stream,
            {"heldout": self.heldout, "progress": self.progress},
            self.clock.told("checkpoint", self.write),
            every=config.checkpoint.every,
            config=redact(config),
            run_id=self.run_id,
            say=self.say,
        )
        resumed = self.checkpoints.load(config.resume, self.steps_left)
        state: dict[str, Any] = resumed[1]["tracker"] if resumed else {}
        own = {"resume_step": self.stream.step, "state": state, "code": Path(__file__).parent}
        own |= {"tell": self.tell, "shown": SHOWN}
        self.tracker = Tracker(config.run_dir, RECIPE, config, config.seed, **config.log.sinks(), **own)
        self.checkpoints.parts["tracker"] = self.tracker
        self.load_roles(resumed[0] if resumed else None)
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def load_roles(self, resumed: Path | None) -> None:
        """Load all models in parallel, and let them go on where a checkpoint was written."""
        path, steps = self.config.model.path, self.count_steps()  # of the whole run, also where it was resumed
        loading = [self.RG_ROLLOUT.load(path)]
        if self.config.rollout.engine == "vllm" and self.config.takes_turns:
            loading[0].result()  # it measures what memory is free, so nobody else takes some meanwhile
        loading.append(self.RG_ACTOR.load(path, steps))
        if self.config.needs_reference:
            loading.append(self.RG_REFERENCE.load(path))
        for future in loading:
            future.result()
        if resumed is None:
            return
        for line in self.RG_ACTOR.load_state(str(resumed / "state")):
            self.say(f"not exactly as before: {line}")
        if self.progress.version:
            remote_call.sync_weights(self.progress.version)

    def steps_left(self) -> int:
        """Steps that the prompts fill which were not yet trained on."""
        return self.config.steps(self.prompts.left(self.config.data.passes) + len(self.groups or ()))

    def count_steps(self) -> int:
        """Steps that the prompts fill, once the long ones are left out."""
        steps = self.config.steps(len(self.prompts) * self.config.data.passes)
        if steps < 1:
            raise ValueError(
                f"{len(self.prompts)} prompts are left, fewer than prompts_per_step={self.config.prompts_per_step}; "
                "raise data.max_prompt_tokens, or lower prompts_per_step"
            )
        return steps

    def heldout_prompts(self) -> Batch | None:
        """All held-out prompts as one batch, or None."""
        config, rows = self.config, self.config.evaluation.rows(self.config.data)
        if not rows:
            return None
        source = read_prompts(config.data, rows, self.tokenizer, config.seed, heldout=True, say=self.say)
        return source.take(len(source))

    def play_heldout(self, prompts: Batch, temperature: float) -> Batch:
        """One episode from each. Evaluations always draw the same random numbers."""
        answers: Batch = self.RG_ROLLOUT.generate(prompts, self.config.sampling(EVALUATION_STEP, temperature))
        check_staleness(answers, self.progress.version)
        return main_branches(self.score(answers))

    def groups_in_flight(self) -> GroupsInFlight | None:
        """Prompts whose episodes go on while weights change, where that is asked for."""
        own = self.config.asynchronous
        if not own.partial_rollout:
            return None
        return GroupsInFlight(
            self.prompts.take,
            lambda prompts, step: self.RG_ROLLOUT.begin(prompts, self.config.sampling(step)),
            self.RG_ROLLOUT.collect,
            engines=len(self.RG_ROLLOUT),
            samples=self.config.samples_per_prompt,
            in_flight=own.in_flight_prompts or self.config.prompts_per_step,
            most_stale=own.most_stale,
            version=lambda: self.progress.version,
            stopped=lambda: self.stream.ending,
            say=self.say,
        )

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_ACTOR.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer as a folder that from_pretrained loads."""
        self.RG_ACTOR.save(str(folder))
        self.tokenizer.save_pretrained(folder)
