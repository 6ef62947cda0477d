"""The loop: generate, score, give credit, train, sync. One line per stage."""

import time
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.checkpoint import CheckpointError, Checkpoints, changed_options, find_checkpoint, read_state
from components.data.dynamic_filtering import fill_groups
from components.data.heldout import Heldout
from components.data.prompts import PromptSource
from components.data.rollouts import check_version, readable, rollout_metrics
from components.data.stream import SampleStream
from components.engines.config import SamplingConfig
from components.rl.kl import adapted_kl_coef
from components.rl.rewards import groups_within
from components.tracking import Tracker, console_line, redact
from core import BaseTrainer

from . import remote_call
from .algorithm import add_advantages
from .config import RECIPE, PPOConfig
from .data import eval_rows, open_tokenizer, prompt_source, train_rows, wandb_options

EVALUATION_STEP = -1
"""Step number in the counters of evaluation's random numbers: no training step has it, so evaluations always draw the
same numbers, and two of the same weights are equal."""


class PPOTrainer(BaseTrainer):
    """Drives actor, critic, reward, reference and rollout."""

    config: PPOConfig

    def init(self) -> None:
        """Prepare the data, let every role load its model at the same time, and go on from a checkpoint if there is."""
        config = self.config
        self.checkpoints = Checkpoints(config.checkpoint_dir, config.max_ckpt_num, config.max_ckpt_bytes)
        self.tokenizer = open_tokenizer(config, config.pretrain)
        self.prompts = self.read_prompts(train_rows(config), "prompts", shuffle=True)
        self.heldout = Heldout(
            self.heldout_prompts(),
            self.answer_heldout,
            temperature=config.eval_temperature,
            samples_per_prompt=config.eval_n_samples_per_prompt,
            best_metric_key=config.best_eval_metric_key,
            say=self.say,
        )
        self.stream = SampleStream(self.generate, self.count_steps(), stopped=lambda: self.stop_requested)
        self.version, self.tokens_seen, self.training_seconds = 0, 0, 0.0
        self.kl_coef = config.init_kl_coef
        self.filtering: dict[str, float] = {}
        self.saved_step, self.failed_saves = 0, 0
        self.took_to_save: dict[str, float] = {}
        self.say(self.prompts.describe_first())
        self.say(config.arithmetic(len(self.prompts)))
        self.resumed = find_checkpoint(config.resume, self.checkpoints.folder, self.run_id)
        saved = self.load(self.resumed) if self.resumed else {}
        self.tracker = Tracker(
            config.run_dir,
            RECIPE,
            config,
            config.seed,
            wandb=wandb_options(config),
            tensorboard=config.use_tensorboard,
            resume_step=self.stream.step,
            state=saved.get("tracker"),
            code=Path(__file__).parent,
        )
        self.init_roles(self.count_steps())  # of the whole run, also where filtered prompts end it earlier
        if self.resumed:
            self.load_roles(self.resumed)
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def count_steps(self) -> int:
        """Rollout steps that the prompts fill, once the long ones are left out."""
        config, prompts = self.config, self.prompts
        steps = config.steps(len(prompts))
        if steps < 1:
            raise ValueError(
                f"{len(prompts)} prompts are left, fewer than rollout_batch_size={config.rollout_batch_size}; raise "
                "prompt_max_len, or lower rollout_batch_size"
            )
        return steps

    def init_roles(self, steps: int) -> None:
        """Load all models in parallel."""
        path = self.config.pretrain
        loading = [
            remote_call.rollout_init(path),
            remote_call.reward_init(path),
            remote_call.actor_init(path, steps),
        ]
        if self.config.needs_critic:
            loading.append(remote_call.critic_init(self.config.critic_start, steps))
        if self.config.needs_reference:
            loading.append(remote_call.reference_init(path))
        remote_call.wait_all(loading)

    def fit(self) -> None:
        """Train for as many steps as there are prompts, and leave the result in the run folder."""
        if not self.stop_requested:
            self.heldout.start(self.stream.step)
        for samples in self.stream:
            experience, took = self.make_experience(samples)
            metrics = self.train(experience)
            is_best = self.record(experience, metrics | took)
            self.save_when_due(is_best)
        if self.saved_step != self.stream.step:
            self.save()
        if len(self.stream):
            self.say(
                f"stopped after step {self.stream.step} of {self.stream.steps}; run_dir={self.config.run_dir} goes on"
            )
        else:
            self.finish()
        self.tracker.close()
        remote_call.end_job()

    # --- the stages

    def generate(self, step: int) -> Batch | None:
        """One step's answers: `rollout_batch_size` prompts, `n_samples_per_prompt` answers each. Where prompts are
        filtered, those at the end of the data may be fewer, and None says that there are none.
        """
        began, wanted = time.time(), self.config.rollout_batch_size
        samples = self.answer_filtered(step) if self.config.dynamic_filtering else self.answer(step, wanted)
        self.generation_seconds = time.time() - began
        return samples

    def answer_filtered(self, step: int) -> Batch | None:
        """Answers, with their rewards, to prompts that are neither too easy nor too hard."""
        config, before = self.config, self.prompts.taken
        low, high = config.dynamic_filtering_reward_range
        filled = fill_groups(
            lambda count: self.reward(self.answer(step, count)),
            wanted=config.rollout_batch_size,
            available=self.prompts_left,
            keep=lambda samples: groups_within(samples["score"], samples["prompt_id"], low, high),
            stopped=lambda: self.stop_requested,
            say=lambda progress: self.say(f"step {step}: {progress}"),
        )
        self.filtering = filled.metrics
        if filled.prompts_kept == config.rollout_batch_size:
            return filled.batch
        if self.stop_requested:
            self.prompts.seek(before)  # the same answers are made again when the run goes on
            return None
        self.stream.steps = step
        enough = len(filled.batch or ()) >= max(config.ranks.values())  # an answer for every rank
        passed = (
            f"of the last {filled.prompts_seen} prompts, {filled.prompts_kept} have a mean score in {low} to {high}"
        )
        if step == 1 and not enough:
            raise ValueError(f"{passed}: nothing to train on; set dynamic_filtering_reward_range, or other prompts")
        self.say(f"the data ends: {passed}" + ("" if enough else ", too few to train on"))
        return filled.batch if enough else None

    @property
    def prompts_left(self) -> int:
        """Prompts that were not yet handed out, over all episodes."""
        return max(self.config.num_episodes * len(self.prompts) - self.prompts.taken, 0)

    def answer(self, step: int, count: int) -> Batch:
        """`n_samples_per_prompt` answers to each of the next `count` prompts."""
        config = self.config
        prompts = self.prompts.take(count).repeat(config.n_samples_per_prompt)
        sample_B = torch.arange(config.n_samples_per_prompt).repeat(count)
        samples: Batch = remote_call.generate_samples(
            prompts.with_sequences(sample_id=sample_B), config.sampling(step)
        ).result()
        check_version(samples, self.version)
        return samples.with_objects(
            status=["truncated" if cut else "finished" for cut in samples["truncated"].tolist()]
        )

    def make_experience(self, samples: Batch) -> tuple[Batch, dict[str, float]]:
        """Ask every role for its view of the answers at the same time, and turn them into advantages."""
        began = time.time()
        tokens = samples.only("tokens")
        views = [remote_call.actor_forward(tokens)]
        if "reward" not in samples:
            views.append(remote_call.reward_forward(samples.only(*READ_BY_REWARD)))
        if self.config.needs_critic:
            views.append(remote_call.critic_forward(tokens))
        if self.config.needs_reference:
            views.append(remote_call.reference_forward(tokens))
        for view in views:
            found: Batch = view.result()
            samples = samples.with_tokens(**found.per_token).with_sequences(**found.per_sequence)
        experience = add_advantages(samples, self.config, self.kl_coef)
        return experience, {"timing_s/experience": time.time() - began, "timing_s/generate": self.generation_seconds}

    def train(self, experience: Batch) -> dict[str, float]:
        """Update critic and actor at the same time, then bring the policy to the rollout engines."""
        began, step = time.time(), self.stream.step
        columns = ["tokens", "action_mask", "advantage", "logprob"]
        columns += [name for name in ("correction", self.config.old_policy) if name in experience]
        columns += ["value", "return"] if self.config.needs_critic else []
        columns += ["reference_logprob"] if self.config.needs_reference else []
        remote_call.append_experience(experience.only(*columns))
        critic = remote_call.critic_update(step) if self.config.needs_critic else None
        actor = remote_call.actor_update(step, self.kl_coef) if step > self.config.frozen_steps else None
        metrics = self.filtering | ({"actor/kl_coef": self.kl_coef} if self.config.needs_reference else {})
        for role, update in (("critic", critic), ("actor", actor)):
            if update is not None:
                metrics |= {f"{role}/{name}": value for name, value in update.result()[0].items()}
        metrics["timing_s/train"] = time.time() - began
        if actor is not None:
            self.adapt_kl_coef(experience)
            self.version = step
            remote_call.sync_weights(step)
        return metrics | {"timing_s/sync": time.time() - began - metrics["timing_s/train"]}

    def adapt_kl_coef(self, experience: Batch) -> None:
        """Weigh the KL more after a step beyond its target, and less after one within."""
        target, horizon, samples = self.config.kl_target, self.config.kl_horizon, len(experience)
        if target is not None:
            kl = kl_to_reference(experience)
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, target=target, horizon=horizon, samples=samples)

    def record(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate when it is time, write the step down and show it; returns whether the policy is the best so far."""
        step, config, is_last = self.stream.step, self.config, not len(self.stream)
        self.tokens_seen += experience.num_tokens
        metrics = describe(experience, config) | metrics | self.took_to_save
        metrics["timing_s/step"] = sum(value for name, value in metrics.items() if name.startswith("timing_s/"))
        metrics["perf/tokens_per_second"] = experience.num_tokens / metrics["timing_s/step"]
        self.training_seconds += metrics["timing_s/step"]
        if is_last or (config.eval_steps > 0 and step % config.eval_steps == 0):
            metrics |= self.heldout.at_step(is_last)
        is_best = self.heldout.is_best(metrics)
        if is_best and self.heldout.best and config.eval_steps > 0:
            name, value = self.heldout.best
            self.say(f"step {step} is the best so far: {name} {value:.3f}")
        self.tracker.log(step, metrics)
        self.tracker.rollouts(step, experience)
        if self.tracker.wants_samples and step % SHOW_SAMPLES_EVERY == 1:
            self.tracker.samples(step, readable(experience, self.tokenizer, SHOWN_SAMPLES))
        self.say(console_line(step, {label: metrics[name] for name, label in SHOWN.items() if name in metrics}))
        self.tracker.update_summary(steps=step)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        return is_best

    def answer_heldout(self, prompts: Batch, temperature: float) -> Batch:
        """One scored answer to each. Evaluations always draw the same random numbers."""
        sampling = SamplingConfig(
            temperature=temperature,
            max_new_tokens=self.config.generate_max_len,
            seed=self.config.seed,
            step=EVALUATION_STEP,
        )
        answers: Batch = remote_call.generate_samples(prompts, sampling).result()
        check_version(answers, self.version)
        return self.reward(answers)

    def reward(self, answers: Batch) -> Batch:
        """The answers with `reward`, `score` and whatever else the reward role says of each."""
        view: Batch = remote_call.reward_forward(answers.only(*READ_BY_REWARD)).result()
        return answers.with_sequences(**view.per_sequence)

    def finish(self) -> None:
        """Sum up what was gained, and say where the policy is."""
        seconds = self.training_seconds
        if self.config.save_path:
            self.export(Path(self.config.save_path))
        score = self.heldout.finish(self.stream.step)
        if self.heldout.is_best(self.heldout.scores.get("end", {})):  # it was not known that this step is the last
            self.checkpoints.mark_best(self.stream.step)
        self.tracker.update_summary(
            score=score, seconds={"training": seconds}, tokens_per_second=self.tokens_seen / max(seconds, 1e-9)
        )
        self.say(f"trained policy: {self.checkpoints.latest()}/hf")

    # --- checkpoints

    def save_when_due(self, is_best: bool) -> None:
        """Write a checkpoint every `save_steps` steps and of the best policy; one that fails is said and counted."""
        step, began = self.stream.step, time.time()
        is_due = self.config.save_steps > 0 and step % self.config.save_steps == 0
        self.took_to_save = {}
        if is_due or is_best:
            try:
                self.save()
                if is_best:
                    self.checkpoints.mark_best(step)
            except CheckpointError as error:
                self.failed_saves += 1
                self.say(f"warning: {error}; the training goes on")
            seconds = time.time() - began
            self.took_to_save = {"timing_s/checkpoint": seconds, "checkpoint/failed": float(self.failed_saves)}

    def save(self) -> None:
        """Write a checkpoint of the step that was finished last."""
        self.checkpoints.save(self.stream.step, self.state(), self.write)
        self.saved_step = self.stream.step

    def state(self) -> dict[str, Any]:
        """Everything that the training goes on from, but for the models."""
        return {
            "run_id": self.run_id,
            "stream": self.stream.state_dict(),
            "prompts": self.prompts.state_dict(),
            "weight_version": self.version,
            "kl_coef": self.kl_coef,
            "tokens_seen": self.tokens_seen,
            "training_seconds": self.training_seconds,
            "heldout": self.heldout.state_dict(),
            "tracker": self.tracker.state_dict(),
            "config": redact(self.config),
        }

    def write(self, folder: Path) -> None:
        """Let the roles write what they hold into a step's folder."""
        remote_call.save_state(str(folder / "state"))
        self.export(folder / "hf")
        if self.config.save_value_network:
            remote_call.save_value_model(str(folder / "critic"))

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer as a folder that from_pretrained loads."""
        remote_call.save_model(str(folder))
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> dict[str, Any]:
        """Take over what the trainer held when a checkpoint was written; returns all of its state.

        Raises:
            ValueError: the prompts are others than before.
        """
        saved = read_state(folder)
        self.stream.load_state_dict(saved["stream"])
        self.prompts.load_state_dict(saved["prompts"])
        self.version, self.tokens_seen = saved["weight_version"], saved["tokens_seen"]
        self.training_seconds = saved["training_seconds"]
        if self.config.kl_target is not None and saved["config"]["init_kl_coef"] == self.config.init_kl_coef:
            self.kl_coef = saved["kl_coef"]
        self.stream.steps = self.stream.step + self.config.steps(self.prompts_left, episodes=1)
        self.heldout.load_state_dict(saved["heldout"])
        self.saved_step = self.stream.step
        self.say(f"goes on after step {self.stream.step} of {self.stream.steps}, from {folder}")
        for line in changed_options(saved["config"], redact(self.config)):
            self.say(f"changed since that checkpoint: {line}")
        return saved

    def load_roles(self, folder: Path) -> None:
        """Let actor and critic go on where a checkpoint was written, and the engines sample from its policy."""
        for future in remote_call.load_state(str(folder / "state")):
            for line in future.result()[0]:
                self.say(f"not exactly as before: {line}")
        if self.version:
            remote_call.sync_weights(self.version)

    # --- parts

    def read_prompts(self, rows: list[dict[str, Any]], what: str, shuffle: bool) -> PromptSource:
        """Prompts as token ids; says how many are too long."""
        limit = self.config.prompt_max_len
        source = prompt_source(rows, self.tokenizer, self.config, shuffle, limit)
        if source.too_long:
            self.say(f"{source.too_long} {what} of more than prompt_max_len={limit} tokens are left out")
        return source

    def heldout_prompts(self) -> Batch | None:
        """All held-out prompts as one batch, or None."""
        rows = eval_rows(self.config)
        if not rows:
            return None
        source = self.read_prompts(rows, "held-out prompts", shuffle=False)
        return source.take(len(source))


SHOW_SAMPLES_EVERY = 10
SHOWN_SAMPLES = 8
"""How many answers W&B and TensorBoard show, and of how many steps one."""

READ_BY_REWARD = ("tokens", "prompt_length", "prompt", "label")
"""Columns that the reward role looks at."""

SHOWN = {
    "reward/score": "score",
    "eval/score": "heldout_score",
    "rollout/response_length": "length",
    "actor/approx_kl": "kl",
    "actor/entropy": "entropy",
    "critic/loss": "value_loss",
    "timing_s/step": "seconds",
}
"""What the console line of a step shows, and under which name."""


def kl_to_reference(experience: Batch) -> float:
    """Mean over the action tokens, in nats."""
    return float((experience["logprob"] - experience["reference_logprob"])[experience["action_mask"]].mean())


def describe(experience: Batch, config: PPOConfig) -> dict[str, float]:
    """Means over one step's answers."""
    mask_N = experience["action_mask"]
    metrics = rollout_metrics(experience, *config.vllm_is_truncated_threshold)
    if config.needs_critic:
        metrics["critic/value"] = float(experience["value"][mask_N].mean())
        metrics["critic/return"] = float(experience["return"][mask_N].mean())
    if config.needs_reference:
        metrics["actor/kl_to_reference"] = kl_to_reference(experience)
    return metrics
