"""The loop: answer, compare, learn, bring the weights over. One line per stage."""

import time
from pathlib import Path
from typing import Any

from components.batch import Batch
from components.checkpoint import Checkpoints
from components.data.heldout import Heldout
from components.data.rewards import open_reward
from components.data.rollouts import (
    check_version,
    for_samples,
    record_step,
    rollout_metrics,
    score_answers,
    with_status,
)
from components.data.stream import SampleStream
from components.options import read_prompts
from components.progress import PhaseClock, Progress, RunCheckpoints
from components.tracking import Tracker, redact
from core import BaseTrainer, replicate

from . import remote_call
from .algorithm import add_advantages
from .config import RECIPE, ReinforceConfig

EVALUATION_STEP = -1
"""Step number in the counters of evaluation's random numbers: no training step has it, so evaluations always draw the
same numbers, and two of the same weights are equal."""

SHOWN = {
    "reward/score": "score",
    "eval/score": "heldout_score",
    "rollout/response_length": "length",
    "actor/approx_kl": "kl",
    "actor/entropy": "entropy",
    "timing_s/step": "seconds",
}
"""What the console line of a step shows, and under which name."""


class ReinforceTrainer(BaseTrainer):
    """Drives actor, rollout and reference."""

    config: ReinforceConfig

    def fit(self) -> None:
        """Train for as many steps as there are prompts, and leave the result in the run folder."""
        self.heldout.start(self.stream.step)
        for samples in self.stream:
            experience = self.look_back(samples)
            experience = add_advantages(experience, self.config)
            metrics = self.update(experience)
            self.sync_weights()
            is_best = self.record(experience, metrics)
            self.checkpoints.save_when_due(is_best)
        self.finish()

    # --- the stages

    def answer(self, step: int) -> Batch:
        """`samples_per_prompt` answers to each of the step's prompts, with their rewards."""
        prompts = for_samples(self.prompts.take(self.config.prompts_per_step), self.config.samples_per_prompt)
        with self.clock.phase("generate"):
            samples: Batch = self.RG_ROLLOUT.generate(prompts, self.config.sampling(step))
        check_version(samples, self.progress.version)
        with self.clock.phase("reward"):
            return with_status(self.score(samples))

    def score(self, samples: Batch) -> Batch:
        """The answers with `reward`, `score` and whatever else the reward says of each."""
        return score_answers(samples, self.reward, self.tokenizer, self.say)

    def look_back(self, samples: Batch) -> Batch:
        """Add what policy and reference say about the answers, before anything is learnt from them."""
        tokens = samples.only("tokens")
        with self.clock.phase("logprobs"):
            views = [self.RG_ACTOR.logprobs(tokens)] if self.config.looks_back else []
            for view in views if self.config.takes_turns else ():
                view.result()  # so that the reference has the cores for itself
            if self.config.needs_reference:
                views.append(self.RG_REFERENCE.logprobs(tokens))
            for view in views:
                samples = samples.with_tokens(**view.result().per_token)
        return samples

    def update(self, experience: Batch) -> dict[str, float]:
        """Train the policy on the step's answers."""
        names = ("tokens", "action_mask", "advantage", "rollout_logprob", "logprob")
        columns = experience.only(*(name for name in names if name in experience))
        with self.clock.phase("train"):
            metrics: dict[str, float] = self.RG_ACTOR.update(replicate(columns), self.stream.step)
        return {f"actor/{name}": value for name, value in metrics.items()}

    def sync_weights(self) -> None:
        """Let the engines sample from what was learnt."""
        with self.clock.phase("sync"):
            remote_call.sync_weights(self.stream.step)
        self.progress.version = self.stream.step

    def record(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate when it is time, write the step down and show it; returns whether the policy is the best so far."""
        step, is_last, took = self.stream.step, not len(self.stream), self.clock.take()
        self.progress.tokens += experience.num_tokens
        self.progress.seconds += took["timing_s/step"]
        metrics |= rollout_metrics(experience) | took
        metrics |= self.checkpoints.metrics
        metrics["perf/tokens_per_second"] = experience.num_tokens / took["timing_s/step"]
        if self.config.evaluation.is_due(step, is_last):
            metrics |= self.heldout.at_step(is_last)
        record_step(self.tracker, step, metrics, experience, self.tokenizer, SHOWN, self.say)
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
        self.reward.close()
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
        self.clock, self.progress = PhaseClock(), Progress()
        self.tokenizer = config.model.tokenizer()
        self.prompts = read_prompts(
            config.data, config.data.rows(config.seed), self.tokenizer, config.seed, say=self.say
        )
        self.say(self.prompts.describe_first())
        self.say(config.arithmetic(len(self.prompts)))
        self.reward = open_reward(config.reward_source, config.reward.settings())
        self.stream = SampleStream(self.answer, self.count_steps(), stopped=lambda: self.stop_requested)
        self.heldout = Heldout(
            self.heldout_prompts(),
            self.answer_heldout,
            temperature=config.evaluation.temperature,
            samples_per_prompt=config.evaluation.samples_per_prompt,
            best_metric_key=config.evaluation.best_metric,
            say=self.say,
        )
        self.checkpoints = RunCheckpoints(
            Checkpoints(config.checkpoint_folder, config.checkpoint.keep, config.checkpoint.max_bytes),
            self.stream,
            {"prompts": self.prompts, "heldout": self.heldout, "progress": self.progress},
            self.write,
            every=config.checkpoint.every,
            config=redact(config),
            run_id=self.run_id,
            say=self.say,
        )
        resumed = self.checkpoints.load(config.resume, lambda: config.steps(self.prompts.left(config.data.passes)))
        state: dict[str, Any] = resumed[1]["tracker"] if resumed else {}
        own = {"resume_step": self.stream.step, "state": state, "code": Path(__file__).parent}
        self.tracker = Tracker(config.run_dir, RECIPE, config, config.seed, **config.log.sinks(), **own)
        self.checkpoints.parts["tracker"] = self.tracker
        self.load_roles(resumed[0] if resumed else None)
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def load_roles(self, resumed: Path | None) -> None:
        """Load all models in parallel, and let them go on where a checkpoint was written."""
        path, steps = self.config.model.path, self.count_steps()  # of the whole run, also where it was resumed
        loading = [self.RG_ROLLOUT.load(path), self.RG_ACTOR.load(path, steps)]
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

    def answer_heldout(self, prompts: Batch, temperature: float) -> Batch:
        """One scored answer to each. Evaluations always draw the same random numbers."""
        answers: Batch = self.RG_ROLLOUT.generate(prompts, self.config.sampling(EVALUATION_STEP, temperature))
        check_version(answers, self.progress.version)
        return self.score(answers)

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_ACTOR.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer as a folder that from_pretrained loads."""
        self.RG_ACTOR.save(str(folder))
        self.tokenizer.save_pretrained(folder)
