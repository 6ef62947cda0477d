"""The loop: generate, score, give credit, train, sync. One line per stage."""

import time
from pathlib import Path
from typing import Any, Literal

from components.batch import Batch
from components.data.prompts import PromptSource
from components.data.rewards import RewardError
from components.data.samples import check_rewarded, for_samples, main_branches, say_failures, with_status
from components.engines.config import EVALUATION_STEP, SamplingConfig
from core import BaseTrainer
from training.checkpoint import Checkpoints
from training.dynamic_sampling import PromptFilter
from training.evaluation import Heldout
from training.options import read_prompts
from training.partial_rollouts import GroupsInFlight
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.rollouts import check_staleness, record_step, rollout_metrics
from training.tracking import Tracker, redact
from training.weight_check import COLD, check_greedy, greedy_prompts

from . import remote_call
from .algorithm import AdaptedKL, add_advantages
from .config import RECIPE, PPOConfig
from .data import data_options, evaluation_options, model_options, wandb_options

READ_BY_REWARD = ("tokens", "prompt_length", "prompt", "label")
"""Columns that the reward role looks at."""

SHOWN = (
    "reward/score",
    "eval/score",
    "rollout/response_length",
    "actor/approx_kl",
    "actor/entropy",
    "timing_s/step",
)
"""What a person sees of a step."""


class PPOTrainer(BaseTrainer):
    """Drives actor, critic, reward, reference and rollout."""

    config: PPOConfig

    def fit(self) -> None:
        """Train for as many steps as there are prompts, and leave the result in the run folder."""
        if not self.stop_requested:
            self.heldout.start(self.stream.step)
        with self.checkpoints.kept_if_rewards_fail():
            self.checkpoints.catch_up(self.judge)
            for samples in self.stream:
                fresh = check_staleness(samples, self.progress.version, self.stream.most_stale)
                experience = self.make_experience(fresh)
                metrics = self.train(experience)
                is_best = self.record(experience, metrics)
                self.checkpoints.save_when_due(is_best)
        self.finish()

    # --- the stages

    def generate(self, step: int) -> Batch | None:
        """One step's answers: `rollout_batch_size` prompts, `n_samples_per_prompt` answers each. Where prompts are
        filtered, those at the end of the data may be fewer, and None says that there are none.
        """
        wanted = self.config.rollout_batch_size
        if self.groups is not None:
            with self.clock.phase("generate"):
                found = self.groups.fill(step, wanted, wanted * (self.stream.steps - step + 1))
            return None if found is None else with_status(found)
        if self.filter is None:
            return self.answer(step, wanted)
        samples = self.filter.fill(step, wanted, lambda count: self.answer_and_score(step, count))
        if self.filter.ended:
            self.stream.steps = step
        return samples

    def answer(self, step: int, count: int) -> Batch:
        """`n_samples_per_prompt` answers to each of the next `count` prompts."""
        prompts = for_samples(self.prompts.take(count), self.config.n_samples_per_prompt)
        with self.clock.phase("generate"):
            samples = self.draw(prompts, self.config.sampling(step))
        return with_status(samples)

    def draw(self, prompts: Batch, sampling: SamplingConfig, alone: bool = False) -> Batch:
        """One answer to each prompt, or one episode; `alone` without the agent."""
        self.turn_to("rollout")
        parts = prompts.split(min(self.config.vllm_num_engines or 1, len(prompts)))
        samples = Batch.concat(remote_call.generate_samples(parts, sampling, alone).result())
        self.turn_to("learners")
        return samples

    def answer_and_score(self, step: int, count: int) -> Batch:
        """The same with their rewards, which say whether a prompt stays."""
        samples = self.answer(step, count)
        with self.clock.phase("reward"):
            return self.reward(samples)

    def reward(self, answers: Batch, heldout: bool = False) -> Batch:
        """The answers with `reward`, `score` and whatever else the reward role, or an agent's world, says of each."""
        if self.config.agent_func_path:
            check_rewarded(answers)
        if "reward" in answers:
            return answers
        view: Batch = remote_call.reward_forward(answers.only(*READ_BY_REWARD), heldout).result()
        return answers.with_sequences(**view.per_sequence)

    def make_experience(self, samples: Batch) -> Batch:
        """Ask every role for its view of the answers at the same time, and turn them into advantages."""
        tokens = samples.only("tokens")
        if self.config.agent_func_path:
            check_rewarded(samples)
            say_failures({i: reason for i, reason in enumerate(samples["error"]) if reason}, self.say)
        with self.clock.phase("experience"):
            views = [remote_call.actor_forward(tokens, self.config.temperature)]
            if "reward" not in samples:
                views.append(remote_call.reward_forward(samples.only(*READ_BY_REWARD)))
            if self.config.needs_critic:
                views.append(remote_call.critic_forward(tokens))
            if self.config.needs_reference:
                views.append(remote_call.reference_forward(tokens))
            try:
                for view in views:
                    found: Batch = view.result()
                    samples = samples.with_tokens(**found.per_token).with_sequences(**found.per_sequence)
            except RewardError:
                self.stream.put_back()  # where the answers wait until there are rewards again
                raise
            return add_advantages(samples, self.config, self.kl.coef)

    def train(self, experience: Batch) -> dict[str, float]:
        """Update critic and actor at the same time, then bring the policy to the rollout engines."""
        step = self.stream.step
        columns = ["tokens", "action_mask", "advantage", "logprob"]
        columns += [name for name in ("correction", self.config.old_policy) if name in experience]
        columns += ["value", "return"] if self.config.needs_critic else []
        columns += ["reference_logprob"] if self.config.needs_reference else []
        metrics = {"actor/kl_coef": self.kl.coef} if self.config.needs_reference else {}
        with self.clock.phase("train"):
            remote_call.append_experience(experience.only(*columns))
            critic = remote_call.critic_update(step) if self.config.needs_critic else None
            actor = remote_call.actor_update(step, self.kl.coef) if step > self.config.frozen_steps else None
            for role, update in (("critic", critic), ("actor", actor)):
                if update is not None:
                    metrics |= {f"{role}/{name}": value for name, value in update.result()[0].items()}
        if actor is not None:
            self.kl.adapt(experience)
        # Ahead of training, each step's weights have a version of their own, also where they stay as they are.
        if actor is not None or self.config.asynchronous.ahead:
            with self.clock.phase("sync"):
                self.sync_weights(step)
            if self.config.verify_weight_sync:
                self.verify_weights(experience)
        return metrics

    def sync_weights(self, version: int) -> None:
        """Let the engines sample from what was learnt."""
        if self.config.vllm_enable_sleep:
            remote_call.wake_rollout(for_weights=True).result()
        remote_call.sync_weights(version)
        self.progress.version = version

    def verify_weights(self, experience: Batch) -> None:
        """Let the policy judge greedy answers of every engine."""
        count = 4 * max(self.config.vllm_num_engines or 1, *self.config.ranks.values())
        with self.clock.phase("verify"):
            prompts, sampling = greedy_prompts(experience, count), self.config.sampling(self.stream.step, 0.0)
            answers = self.draw(prompts, sampling, alone=True)
            check_staleness(answers, self.progress.version)
            views = [remote_call.actor_forward(answers.only("tokens"), at) for at in (1.0, COLD)]
            plain_N, cold_N = (view.result()["logprob"] for view in views)
        self.say(f"weights verified: {check_greedy(answers, plain_N, cold_N, self.config.dtype)}")

    def turn_to(self, who: Literal["rollout", "learners"]) -> None:
        """Let go of what the others hold on the accelerators, where they take turns, and take up what these need."""
        freed: dict[str, int] = {}
        if who == "rollout" and self.config.deepspeed_enable_sleep:
            freed["actor and critic"] = sum(sum(future.result()) for future in remote_call.sleep_learners())
        if who == "rollout" and self.config.vllm_enable_sleep:
            remote_call.wake_rollout(for_weights=False).result()
        if who == "learners" and self.config.vllm_enable_sleep:
            freed["engines"] = sum(remote_call.sleep_rollout().result())
        if who == "learners" and self.config.deepspeed_enable_sleep:
            remote_call.wake_learners()
        for name in freed.keys() - self.told:
            found = f"{freed[name] / 1e9:.1f} GB are freed" if freed[name] else "nothing is freed, as always on a CPU"
            self.say(f"{name} sleep: {found}")
        self.told |= freed.keys()

    def record(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Say what the step was like, and judge it; returns whether the policy is the best so far."""
        metrics = describe(experience, self.config) | metrics | self.checkpoints.metrics | self.stream.metrics
        metrics |= self.progress.count(self.clock.take(), experience, self.job_memory_bytes)
        return self.checkpoints.record(self.judge, experience, metrics)

    def judge(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Evaluate when it is time, write the step down and show it; returns whether the policy is the best so far."""
        step, is_last = self.stream.step, not len(self.stream)
        if self.evaluation.is_due(step, is_last):
            metrics |= self.heldout.at_step(is_last)
        is_best = self.heldout.is_best(metrics)
        if is_best and self.heldout.best and self.evaluation.every > 0:
            name, value = self.heldout.best
            self.say(f"step {step} is the best so far: {name} {value:.3f}")
        record_step(self.tracker, step, self.stream.steps, metrics, experience, self.tokenizer)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        return is_best

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
        if self.config.save_path:
            self.export(Path(self.config.save_path).expanduser())
        score, seconds = self.heldout.finish(self.stream.step), self.progress.seconds
        if self.heldout.is_best(self.heldout.scores.get("end", {})):  # it was not known that this step is the last
            self.checkpoints.store.mark_best(self.stream.step)
        speed = self.progress.tokens / max(seconds, 1e-9)
        self.tracker.update_summary(score=score, seconds={"training": seconds}, tokens_per_second=speed)
        self.say(f"trained policy: {self.checkpoints.store.latest()}/hf")

    # --- before the first step

    def init(self) -> None:
        """Prepare the data, let every role load its model at the same time, and go on from a checkpoint if there is."""
        config = self.config
        self.clock, self.progress, self.kl = PhaseClock(self.tell), Progress(), AdaptedKL(config)
        self.evaluation, self.told = evaluation_options(config), set[str]()
        self.tokenizer = model_options(config).tokenizer()
        self.prompts = self.read_prompts(data_options(config).rows(config.seed))
        self.say(self.prompts.describe_first())
        if self.prompts.too_long:  # fewer than the plan has counted
            self.say(config.arithmetic(len(self.prompts)))
        self.filter, self.groups = self.prompt_filter(), self.groups_in_flight()
        self.stream = SampleStream(
            self.generate,
            self.count_steps(),
            config.asynchronous.ahead,
            stopped=lambda: self.stop_requested,
            sources={"prompts": self.prompts} | ({} if self.groups is None else {"groups": self.groups}),
            clock=self.clock,
            metrics=lambda: next((part.metrics for part in (self.groups, self.filter) if part is not None), {}),
            most_stale=config.asynchronous.most_stale,
        )
        self.heldout = Heldout(
            self.heldout_prompts(),
            self.clock.told("evaluate", self.answer_heldout),
            temperature=self.evaluation.temperature,
            samples_per_prompt=self.evaluation.samples_per_prompt,
            best_metric_key=self.evaluation.best_metric,
            say=self.say,
        )
        self.checkpoints = RunCheckpoints(
            Checkpoints(config.checkpoint_dir, config.max_ckpt_num, config.max_ckpt_bytes),
            self.stream,
            {"heldout": self.heldout, "progress": self.progress, "kl": self.kl},
            self.clock.told("checkpoint", self.write),
            every=config.save_steps,
            config=redact(config),
            run_id=self.run_id,
            say=self.say,
        )
        resumed = self.checkpoints.load(config.resume, self.steps_left)
        self.tracker = Tracker(
            config.run_dir,
            RECIPE,
            config,
            config.seed,
            wandb=wandb_options(config),
            tensorboard=config.use_tensorboard,
            resume_step=self.stream.step,
            state=resumed[1]["tracker"] if resumed else None,
            code=Path(__file__).parent,
            tell=self.tell,
            shown=SHOWN,
        )
        self.checkpoints.parts["tracker"] = self.tracker
        self.load_roles(resumed[0] if resumed else None)
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def load_roles(self, resumed: Path | None) -> None:
        """Load all models in parallel, and let them go on where a checkpoint was written."""
        path, steps = self.config.pretrain, self.count_steps()  # of the whole run, also where filtering ends it earlier
        loading = [remote_call.rollout_init(path)]
        if self.config.rollout_engine == "vllm" and self.config.colocate_all_models:
            loading[0].result()  # it measures what memory is free, so nobody else takes some meanwhile
        loading += [remote_call.reward_init(path), remote_call.actor_init(path, steps)]
        if self.config.needs_critic:
            loading.append(remote_call.critic_init(self.config.critic_start, steps))
        if self.config.needs_reference:
            loading.append(remote_call.reference_init(path))
        remote_call.wait_all(loading)
        if resumed is None:
            return
        for future in remote_call.load_state(str(resumed / "state")):
            for line in future.result()[0]:
                self.say(f"not exactly as before: {line}")
        # Where the policy was frozen, a run that did not train ahead has older versions than steps.
        version = self.stream.step if self.config.asynchronous.ahead else self.progress.version
        if version:
            self.sync_weights(version)

    def count_steps(self) -> int:
        """Rollout steps that the prompts fill, once the long ones are left out."""
        steps = self.config.steps(len(self.prompts))
        if steps < 1:
            raise ValueError(
                f"{len(self.prompts)} prompts are left, fewer than rollout_batch_size={self.config.rollout_batch_size};"
                " raise prompt_max_len, or lower rollout_batch_size"
            )
        return steps

    def steps_left(self) -> int:
        """Rollout steps that the prompts fill which were not yet trained on."""
        return self.config.steps(self.prompts.left(self.config.num_episodes) + len(self.groups or ()), episodes=1)

    def prompt_filter(self) -> PromptFilter | None:
        """Dynamic sampling, where it is asked for."""
        if not self.config.dynamic_filtering:
            return None
        return PromptFilter(
            self.prompts,
            *self.config.dynamic_filtering_reward_range,
            option="dynamic_filtering_reward_range",
            passes=self.config.num_episodes,
            fewest=max(self.config.ranks.values()),  # an answer for every rank
            stopped=lambda: self.stop_requested,
            say=self.say,
        )

    def read_prompts(self, rows: list[dict[str, Any]], heldout: bool = False) -> PromptSource:
        """Prompts as token ids; says how many are too long."""
        data, seed = data_options(self.config), self.config.seed
        return read_prompts(data, rows, self.tokenizer, seed, heldout=heldout, option="prompt_max_len", say=self.say)

    def heldout_prompts(self) -> Batch | None:
        """All held-out prompts as one batch, or None."""
        rows = self.evaluation.rows(data_options(self.config))
        if not rows:
            return None
        source = self.read_prompts(rows, heldout=True)
        return source.take(len(source))

    def answer_heldout(self, prompts: Batch, temperature: float) -> Batch:
        """One scored answer to each. Evaluations always draw the same random numbers."""
        answers = self.draw(prompts, self.config.sampling(EVALUATION_STEP, temperature))
        check_staleness(answers, self.progress.version)
        return main_branches(self.reward(answers, heldout=True))

    def groups_in_flight(self) -> GroupsInFlight | None:
        """Prompts whose answers go on while weights change, where that is asked for."""
        own = self.config.asynchronous
        if not own.partial_rollout:
            return None
        return GroupsInFlight(
            self.prompts.take,
            lambda prompts, step: remote_call.begin_samples(prompts, self.config.sampling(step)).result(),
            lambda seconds: remote_call.collect_samples(seconds).result(),
            engines=self.config.vllm_num_engines or 1,
            samples=self.config.n_samples_per_prompt,
            in_flight=own.in_flight_prompts or self.config.rollout_batch_size,
            most_stale=own.most_stale,
            version=lambda: self.progress.version,
            stopped=lambda: self.stream.ending,
            say=self.say,
        )

    # --- checkpoints

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


def describe(experience: Batch, config: PPOConfig) -> dict[str, float]:
    """Means over one step's answers."""
    mask_N = experience["action_mask"]
    metrics = rollout_metrics(experience, *config.vllm_is_truncated_threshold)
    if config.needs_critic:
        metrics["critic/value"] = float(experience["value"][mask_N].mean())
        metrics["critic/return"] = float(experience["return"][mask_N].mean())
    return metrics
