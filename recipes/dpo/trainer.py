"""The loop: one optimizer step per minibatch of pairs."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from components.batch import Batch
from components.data.preferences import (
    Accuracy,
    PreferenceData,
    check_shares,
    encode_pairs,
    hold_out,
    load_pairs,
    read_pairs,
    select_pairs,
)
from components.data.text import load_tokenizer
from core import BaseTrainer, replicate
from training.checkpoint import Checkpoints
from training.epochs import Epochs
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.tracking import Tracker, redact

from . import remote_call
from .algorithm import PAIR, preference_loss
from .config import RECIPE, DPOConfig
from .data import in_calls, pair_format

SHOWN = ("actor/loss", "actor/accuracy", "actor/margin", "eval/accuracy", "eval/margin", "timing_s/step")
"""What a person sees of a step."""


class DPOTrainer(BaseTrainer):
    """Drives the ranks of the policy."""

    config: DPOConfig

    def fit(self) -> None:
        """Train, and leave the result in the run folder."""
        if self.heldout is not None and not self.accuracy.of:
            self.tracker.log(self.stream.step, self.judge(), steps=self.stream.steps)
        for minibatch in self.stream:
            with self.clock.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.record(minibatch, metrics)
            self.checkpoints.save_when_due()
        self.finish()

    def record(self, minibatch: Batch, metrics: dict[str, float]) -> None:
        """Judge the held-out pairs when it is time, and write the step down."""
        step, is_last = self.stream.step, not len(self.stream)
        speed = self.progress.count(self.clock.take(), minibatch, self.job_memory_bytes)
        is_due = is_last or (self.config.eval_steps > 0 and step % self.config.eval_steps == 0)
        judged = self.judge() if is_due and self.heldout is not None else {}
        logged = {f"actor/{name}": value for name, value in metrics.items()}
        logged |= judged | speed | self.checkpoints.metrics
        is_shown = bool(judged) or step == 1 or step % self.config.logging_steps == 0
        self.tracker.log(step, logged, steps=self.stream.steps, show=is_shown)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        if is_shown:
            self.tracker.update_summary(steps=step, seconds={"training": self.progress.seconds})

    def judge(self) -> dict[str, float]:
        """How the policy tells the held-out pairs apart by its implicit rewards, and its loss on them."""
        assert self.heldout is not None
        count = len(self.heldout) // PAIR
        logprob_B = self.asked(self.RG_ACTOR.logprobs, self.heldout)
        output = preference_loss(logprob_B, self.heldout, count, self.config)
        found = {name: round(float(value), 6) for name, value in {"loss": output.loss, **output.metrics}.items()}
        self.accuracy.add(found["accuracy"])
        found["accuracy_standard_error"] = math.sqrt(found["accuracy"] * (1 - found["accuracy"]) / count)
        return {f"eval/{name}": value for name, value in found.items()}

    def asked(self, ask: Callable[[Batch], Batch], batch: Batch) -> Tensor:
        """[B] log-probability of each answer. Policy and reference are asked in the same calls, and so in the same
        micro-batches, as rounding depends on these: else it would tell apart pairs that are ties.
        """
        parts = in_calls(batch.only("tokens", "loss_mask"), self.config.ranks)
        return torch.cat([ask(part)["logprob"] for part in parts])

    def finish(self) -> None:
        """Save what is not yet saved, sum up, and say where the model is."""
        self.checkpoints.save()
        step, seconds = self.stream.step, self.progress.seconds
        self.tracker.update_summary(steps=step, seconds={"training": seconds})
        if len(self.stream):
            self.say(f"stopped after step {step} of {self.stream.steps}; run_dir={self.config.run_dir} goes on")
        else:
            if self.config.save_path:
                self.export(Path(self.config.save_path))
            score = None if self.heldout is None else self.accuracy.of | {"examples": len(self.heldout) // PAIR}
            self.tracker.update_summary(score=score, tokens_per_second=self.progress.tokens / max(seconds, 1e-9))
            if score is not None:
                self.say(f"{score['end']:.3f} of {score['examples']} held-out pairs are told right")
            self.say(f"trained policy: {self.checkpoints.store.latest()}/hf")
        self.tracker.close()
        remote_call.end_job()

    # --- before the first step

    def init(self) -> None:
        """Encode the pairs, ask the reference about them once, let every rank load the policy, and go on from a
        checkpoint if there is one.
        """
        config = self.config
        self.clock, self.progress = PhaseClock(self.tell), Progress()
        self.accuracy = Accuracy()
        self.tokenizer = load_tokenizer(
            config.pretrain, chat_template=config.tokenizer_chat_template, pad_with_end=True
        )
        data = self.pairs()
        self.stream = SampleStream(data.minibatch, data.steps, stopped=lambda: self.stop_requested)
        self.checkpoints = RunCheckpoints(
            Checkpoints(config.checkpoint_dir, config.max_ckpt_num),
            self.stream,
            {"pairs": data, "progress": self.progress, "accuracy": self.accuracy},
            self.clock.told("checkpoint", self.write),
            every=config.save_steps,
            config=redact(config),
            run_id=self.run_id,
            say=self.say,
        )
        resumed = self.checkpoints.load(config.resume)
        self.tracker = Tracker(
            config.run_dir,
            RECIPE,
            config,
            config.seed,
            wandb=config.wandb,
            tensorboard=config.use_tensorboard,
            resume_step=self.stream.step,
            state=resumed[1]["tracker"] if resumed else None,
            code=Path(__file__).parent,
            tell=self.tell,
            shown=SHOWN,
        )
        self.checkpoints.parts["tracker"] = self.tracker
        self.RG_ACTOR.load(config.pretrain, data.steps)
        for line in self.RG_ACTOR.load_state(str(resumed[0] / "state")) if resumed else []:
            self.say(f"not exactly as before: {line}")
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def pairs(self) -> Epochs:
        """The pairs to train on; sets those that are held out. Both have `reference_logprob` of each answer."""
        config = self.config
        found = self.encoded(config.dataset, config.dataset_split, config.max_samples)
        train, self.heldout = found.batch, None
        if config.eval_dataset:
            self.heldout = self.encoded(config.eval_dataset, config.eval_split).batch
        elif config.eval_samples:
            index_P, held_P = hold_out(found.openings, config.eval_samples, config.seed)
            train, self.heldout = select_pairs(found.batch, index_P), select_pairs(found.batch, held_P)
        check_shares(config.ranks, train, self.heldout)
        self.RG_ACTOR.load_reference(config.ref_pretrain or config.pretrain)
        train = self.with_reference(train)
        if self.heldout is not None:
            self.heldout = self.with_reference(self.heldout)
        self.RG_ACTOR.drop_reference()
        data = Epochs(
            train,
            train_batch_size=config.train_batch_size,
            epochs=config.max_epochs,
            seed=config.seed,
            group_size=PAIR,
        )
        held = 0 if self.heldout is None else len(self.heldout) // PAIR
        self.say(f"{len(train) // PAIR} pairs to train on, {held} held out; {data.steps} optimizer steps")
        return data

    def encoded(self, source: str, split: str, max_rows: int | None = None) -> PreferenceData:
        """Pairs as token ids; what cannot be used is left out, counted and said."""
        config = self.config
        rows = load_pairs(source, split=split, max_rows=max_rows, seed=config.seed)
        pairs = read_pairs(rows, pair_format(config).of(source), self.tokenizer)
        found = encode_pairs(pairs, self.tokenizer, max_tokens=config.max_len, with_mask=True)
        left_out = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
        self.say(f"{len(found)} of {len(rows)} pairs can be used (left out: {left_out}); {found.repeated} are repeated")
        return found

    def with_reference(self, batch: Batch) -> Batch:
        """The batch, with what the reference says of it."""
        return batch.with_sequences(reference_logprob=self.asked(self.RG_ACTOR.reference_logprobs, batch))

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_ACTOR.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer as a folder that from_pretrained loads."""
        self.RG_ACTOR.save(str(folder))
        self.tokenizer.save_pretrained(folder)
