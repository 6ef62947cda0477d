"""The loop, in verl's order. One line per stage."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.data.samples import for_samples, main_branches, with_status
from components.engines.config import EVALUATION_STEP, SamplingConfig
from core import BaseTrainer, WorkerGroup
from training.checkpoint import Checkpoints
from training.dynamic_sampling import PromptFilter
from training.evaluation import Heldout
from training.partial_rollouts import GroupsInFlight
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.rollouts import check_staleness, record_step
from training.tracking import Tracker, redact
from training.weight_check import COLD, check_greedy, greedy_prompts

from . import remote_call
from .algorithm import KLController, add_advantages
from .config import RECIPE, VerlPPOConfig
from .data import prompt_source, read_rows
from .metrics import balanced, experience_metrics, heldout_metrics, performance, renamed
from .reward import RewardManager
from .roles.actor_rollout_ref import ActorRolloutRefWorker
from .roles.critic import CriticWorker
from .roles.reward_model import RewardModelWorker

SHOWN = (
    "reward/score",
    "eval/score",
    "val-core/",
    "response_length/mean",
    "actor/ppo_kl",
    "actor/entropy",
    "timing_s/step",
)
"""What a person sees of a step."""
LEARNT_FROM = ("tokens", "action_mask", "advantage", "return", "value", "logprob", "rollout_logprob")
"""Columns that actor and critic look at, with `reference_logprob` and `correction`."""


class VerlPPOTrainer(BaseTrainer):
    """Drives the worker groups of policy, critic, reference and reward model."""

    config: VerlPPOConfig

    def fit(self) -> None:
        """Train for as many steps as there are prompts, and leave the result in the run folder."""
        own = self.config.trainer
        if own.val_only:
            self.validate()
        elif own.val_before_train and not self.stop_requested:
            self.heldout.start(self.stream.step)
        if not own.val_only:
            with self.checkpoints.kept_if_rewards_fail():
                self.checkpoints.catch_up(self.judge)
                for samples in self.stream:
                    fresh = check_staleness(samples, self.progress.version, self.stream.most_stale)
                    experience, metrics = self.make_experience(fresh)
                    metrics |= self.update(experience)
                    self.update_weights(experience)
                    is_best = self.record(experience, metrics)
                    self.checkpoints.save_when_due(is_best)
        self.finish()

    def validate(self) -> None:
        """Score the policy as it is, also where its checkpoint holds scores, and write down what was found."""
        step, found = self.stream.step, self.heldout.at_step(is_last=True)
        self.tracker.log(step, found)
        if found:
            end = {"end": found["eval/score"], "end_greedy": found["eval/score_greedy"]}
            self.tracker.update_summary(score=end | {"examples": len(self.heldout.prompts or ())})

    # --- the stages

    def samples(self, step: int) -> Batch | None:
        """One step's answers with their rewards. Where prompts are filtered, those at the end of the data may be fewer,
        and None says that there are none.
        """
        wanted = self.config.prompts_per_step
        if self.groups is not None:
            with self.clock.phase("gen"):
                found = self.groups.fill(step, wanted, wanted * (self.stream.steps - step + 1))
            return None if found is None else self.score(found)
        if self.filter is None:
            return self.answer(step, wanted)
        samples = self.filter.fill(step, wanted, partial(self.answer, step))
        if self.filter.ended:
            self.stream.steps = step
        return samples

    def answer(self, step: int, count: int) -> Batch:
        """`rollout.n` answers to each of the next `count` prompts, with rewards; for ReMax also the greedy one's."""
        own, sampling = self.prompts.take(count), self.config.sampling(step)
        with self.clock.phase("gen"):
            drawn: Batch = self.rollout_wg.generate_sequences(
                for_samples(own, self.config.samples_per_prompt), sampling
            )
        samples = self.score(drawn)
        if self.config.algorithm.adv_estimator != "remax":
            return samples
        with self.clock.phase("gen"):
            greedy: Batch = self.rollout_wg.generate_sequences(for_samples(own, 1), self.config.sampling(step, 0.0))
        reward = dict(zip(own["prompt_id"].tolist(), self.score(greedy)["reward"].tolist(), strict=True))
        baseline_B = torch.tensor([reward[prompt] for prompt in samples["prompt_id"].tolist()])
        return samples.with_sequences(greedy_reward=baseline_B)

    def score(self, samples: Batch) -> Batch:
        """The answers with `reward`, `score` and whatever else the reward says of each."""
        with self.clock.phase("reward"):
            if self.rm_wg is not None:
                found: Batch = self.rm_wg.compute_rm_score(samples.only("tokens")).result()
                samples = samples.with_sequences(**found.per_sequence)
            return with_status(self.reward(samples))

    def make_experience(self, samples: Batch) -> tuple[Batch, dict[str, float]]:
        """Add what policy, reference and critic say of the answers, which are balanced over the ranks meanwhile, and
        advantages.
        """
        metrics: dict[str, float] = {}
        if self.config.trainer.balance_batch:
            places = samples.with_sequences(place=torch.arange(len(samples)))
            samples, metrics = balanced(places, len(self.actor_wg))
        tokens = samples.only("tokens")
        if self.config.looks_back:
            with self.clock.phase("old_log_prob"):
                view: Batch = self.actor_wg.compute_log_prob(tokens, self.config.temperature).result()
                samples = samples.with_tokens(**view.per_token)
        if self.ref_wg is not None:
            with self.clock.phase("ref"):
                samples = samples.with_tokens(**self.ref_wg.compute_ref_log_prob(tokens).result().per_token)
        if self.critic_wg is not None:
            with self.clock.phase("values"):
                samples = samples.with_tokens(**self.critic_wg.compute_values(tokens).result().per_token)
        with self.clock.phase("adv"):
            if "place" in samples:
                # In the order in which they came: what a mini-batch has in it does not hang on the number of ranks.
                samples = samples.select(samples["place"].argsort()).without("place")
            experience = add_advantages(samples, self.config, self.kl.coef)
            return experience, metrics | self.kl.adapt(experience)

    def update(self, experience: Batch) -> dict[str, float]:
        """Train the critic, and the policy once the critic is warm."""
        step, metrics = self.stream.step, dict[str, float]()
        names = [*LEARNT_FROM, "reference_logprob", "correction"]
        columns = experience.only(*(name for name in names if name in experience))
        if self.critic_wg is not None:
            with self.clock.phase("update_critic"):
                metrics |= renamed(self.critic_wg.update_critic(columns, step)[0], "critic")
        if self.trains_policy(step):
            with self.clock.phase("update_actor"):
                metrics |= renamed(self.actor_wg.update_actor(columns, step)[0], "actor")
        return metrics

    def trains_policy(self, step: int) -> bool:
        """Whether the critic has had its head start."""
        return self.critic_wg is None or self.config.trainer.critic_warmup < step

    def update_weights(self, experience: Batch) -> None:
        """Let the engines sample from what was learnt."""
        step = self.stream.step
        # Ahead of training, each step's weights have a version of their own, also where they stay as they are.
        if not self.trains_policy(step) and not self.config.asynchronous.ahead:
            return
        with self.clock.phase("update_weights"):
            remote_call.sync_weights(self.actor_wg, self.rollout_wg, step)
        self.progress.version = step
        if self.config.rollout.verify_weight_sync:
            with self.clock.phase("verify"):
                self.verify_weights(experience)

    def verify_weights(self, experience: Batch) -> None:
        """Let the policy judge greedy answers of every engine."""
        prompts = greedy_prompts(experience, 4 * max(len(self.rollout_wg), len(self.actor_wg)))
        sampling = self.config.sampling(self.stream.step, 0.0)
        answers: Batch = self.rollout_wg.generate_sequences(prompts, sampling, True)
        check_staleness(answers, self.progress.version)
        views = [self.actor_wg.compute_log_prob(answers.only("tokens"), at).result() for at in (1.0, COLD)]
        plain_N, cold_N = (view["logprob"] for view in views)
        self.say(f"weights verified: {check_greedy(answers, plain_N, cold_N, self.config.dtype)}")

    def record(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Say what the step was like, and judge it; returns whether the policy is the best so far."""
        step = self.stream.step
        took = self.progress.count(self.clock.take(), experience, self.job_memory_bytes)
        saved = {name.replace("timing_s/", "timing_s/save_"): x for name, x in self.checkpoints.metrics.items()}
        metrics |= experience_metrics(experience, self.config) | took | saved | self.stream.metrics
        metrics |= performance(experience, took, len(self.actor_wg))
        metrics |= {"training/global_step": float(step), "training/epoch": float(self.prompts.epoch)}
        return self.checkpoints.record(self.judge, experience, metrics)

    def judge(self, experience: Batch, metrics: dict[str, float]) -> bool:
        """Validate when it is time, write the step down and show it; returns whether the policy is the best so far."""
        step, is_last, every = self.stream.step, not len(self.stream), self.config.trainer.test_freq
        if is_last or (every > 0 and step % every == 0):
            began = time.monotonic()
            metrics |= self.heldout.at_step(is_last)
            metrics["timing_s/testing"] = time.monotonic() - began
        record_step(self.tracker, step, self.stream.steps, metrics, experience, self.tokenizer)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        return self.heldout.is_best(metrics)

    def finish(self) -> None:
        """Save what is not yet saved, sum up what was gained, and say where the policy is."""
        if self.config.trainer.val_only:
            self.say("nothing was trained (trainer.val_only)")
        elif len(self.stream):
            self.checkpoints.save()
            stopped = f"stopped after step {self.stream.step} of {self.stream.steps}"
            self.say(f"{stopped}; run_dir={self.config.run_dir} goes on")
        else:
            self.checkpoints.save()
            self.sum_up()
        self.reward.close()
        self.tracker.close()
        groups = (self.actor_wg, self.rollout_wg, self.critic_wg, self.ref_wg, self.rm_wg)
        remote_call.end_job(*(group for group in groups if group is not None))

    def sum_up(self) -> None:
        """Compare the policy with what it was at the start."""
        score, seconds = self.heldout.finish(self.stream.step), self.progress.seconds
        if self.heldout.is_best(self.heldout.scores.get("end", {})):  # it was not known that this step is the last
            self.checkpoints.store.mark_best(self.stream.step)
        speed = self.progress.tokens / max(seconds, 1e-9)
        self.tracker.update_summary(score=score, seconds={"training": seconds}, tokens_per_second=speed)
        self.say(f"trained policy: {self.checkpoints.store.latest()}/hf")

    # --- before the first step

    def init(self) -> None:
        """Read the prompts, let every worker load its model, and go on from a checkpoint if there is one."""
        config = self.config
        self.clock, self.progress, self.kl = PhaseClock(self.tell), Progress(), KLController(config)
        self.tokenizer = config.tokenizer()
        self.prompts = prompt_source(config, read_rows(config), self.tokenizer, say=self.say)
        self.say(self.prompts.describe_first())
        if self.prompts.too_long:  # fewer than the plan has counted
            self.say(config.arithmetic(len(self.prompts)))
        self.reward = RewardManager(config, self.tokenizer, self.say)
        self.make_groups()
        self.filter, self.groups = self.prompt_filter(), self.groups_in_flight()
        self.stream = SampleStream(
            self.samples,
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
            temperature=config.val_temperature,
            samples_per_prompt=config.val_samples,
            best_metric_key="",
            say=self.say,
            further=heldout_metrics,
        )
        self.checkpoints = RunCheckpoints(
            Checkpoints(config.checkpoint_folder, config.trainer.max_actor_ckpt_to_keep),
            self.stream,
            {"heldout": self.heldout, "progress": self.progress, "kl": self.kl},
            self.clock.told("checkpoint", self.write),
            every=config.trainer.save_freq,
            config=redact(config),
            run_id=self.run_id,
            say=self.say,
        )
        resumed = self.checkpoints.load(config.resume_from, self.steps_left)
        state: dict[str, Any] = resumed[1]["tracker"] if resumed else {}
        own = {"resume_step": self.stream.step, "state": state, "code": Path(__file__).parent}
        own |= {"tell": self.tell, "shown": SHOWN}
        self.tracker = Tracker(config.run_dir, RECIPE, config, config.seed, **config.tracker_sinks(), **own)
        self.checkpoints.parts["tracker"] = self.tracker
        self.init_workers(resumed[0] if resumed else None)
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def make_groups(self) -> None:
        """A worker group for each role; a worker that does several things is the same group under several names."""
        config = self.config
        names = {config.policy_role, config.rollout_role}
        names |= {config.reference_role} if config.needs_reference else set()
        policies = {name: WorkerGroup(name, ActorRolloutRefWorker) for name in sorted(names)}
        self.actor_wg, self.rollout_wg = policies[config.policy_role], policies[config.rollout_role]
        self.ref_wg = policies[config.reference_role] if config.needs_reference else None
        self.critic_wg = WorkerGroup("critic", CriticWorker) if config.needs_critic else None
        self.rm_wg = WorkerGroup("rm", RewardModelWorker) if config.needs_reward_model else None

    def init_workers(self, resumed: Path | None) -> None:
        """Critic, reference and reward model load at the same time; then the policy, whose engine takes of the memory
        what is left.
        """
        config, steps = self.config, self.count_steps()  # of the whole run, also where it was resumed
        path = config.actor_rollout_ref.model.path
        loading = [self.critic_wg.init_model(config.critic.model.path or path, steps)] if self.critic_wg else []
        if self.rm_wg is not None:
            loading.append(self.rm_wg.init_model(config.reward_model.model.path))
        if self.ref_wg not in (None, self.actor_wg, self.rollout_wg):
            loading.append(self.ref_wg.init_model(path, steps))
        for future in loading:
            future.result()
        for group in {id(group): group for group in (self.actor_wg, self.rollout_wg)}.values():
            group.init_model(path, steps).result()
        if resumed is None:
            return
        for group in self.learners():
            for line in group.load_checkpoint(str(resumed / "state"))[0]:
                self.say(f"not exactly as before: {line}")
        # Where the critic warms up, a run that did not train ahead has older versions than steps.
        version = self.stream.step if config.asynchronous.ahead else self.progress.version
        if version:
            remote_call.sync_weights(self.actor_wg, self.rollout_wg, version)
            self.progress.version = version

    def learners(self) -> list[WorkerGroup]:
        """The groups that have something to save."""
        return [self.actor_wg] if self.critic_wg is None else [self.actor_wg, self.critic_wg]

    def steps_left(self) -> int:
        """Steps that the prompts fill which were not yet trained on."""
        left = self.prompts.left(self.config.trainer.total_epochs) + len(self.groups or ())
        return self.config.steps_of(left, self.stream.step)

    def count_steps(self) -> int:
        """Steps that the prompts fill, once the long ones are left out."""
        steps = self.config.steps(len(self.prompts))
        if steps < 1:
            raise ValueError(
                f"{len(self.prompts)} prompts are left, fewer than data.train_batch_size="
                f"{self.config.prompts_per_step}; raise data.max_prompt_length, or lower data.train_batch_size"
            )
        return steps

    def prompt_filter(self) -> PromptFilter | None:
        """Dynamic sampling, where it is asked for."""
        if not self.config.algorithm.filter_groups.enable:
            return None
        return PromptFilter(
            self.prompts,
            option="algorithm.filter_groups",
            passes=self.config.trainer.total_epochs,
            fewest=len(self.actor_wg),
            stopped=lambda: self.stop_requested,
            say=self.say,
        )

    def heldout_prompts(self) -> Batch | None:
        """All held-out prompts as one batch, or None."""
        rows = read_rows(self.config, heldout=True)
        if not rows:
            return None
        source = prompt_source(self.config, rows, self.tokenizer, heldout=True, say=self.say)
        return source.take(len(source))

    def answer_heldout(self, prompts: Batch, temperature: float) -> Batch:
        """One scored answer to each. Evaluations always draw the same random numbers."""
        sampling: SamplingConfig = self.config.sampling(EVALUATION_STEP, temperature)
        answers: Batch = self.rollout_wg.generate_sequences(prompts, sampling)
        check_staleness(answers, self.progress.version)
        return main_branches(self.score(answers))

    def groups_in_flight(self) -> GroupsInFlight | None:
        """Prompts whose answers go on while weights change, where that is asked for."""
        own, engines = self.config.asynchronous, len(self.rollout_wg)
        if not own.partial_rollout:
            return None
        return GroupsInFlight(
            self.prompts.take,
            lambda prompts, step: self.rollout_wg.begin(prompts, [self.config.sampling(step)] * engines),
            self.rollout_wg.collect,
            engines=engines,
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
        for group in self.learners():
            group.save_checkpoint(str(folder / "state"))
        self.actor_wg.save_model(str(folder / "hf"))
        self.tokenizer.save_pretrained(folder / "hf")
