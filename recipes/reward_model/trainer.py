"""The loop: one optimizer step per minibatch of pairs."""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

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
from components.data.text import load_tokenizer, pad_apart_from_end
from core import BaseTrainer, replicate
from training.checkpoint import Checkpoints
from training.epochs import Epochs
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.tracking import Tracker, redact

from . import remote_call
from .algorithm import PAIR
from .config import NEW_FROM_TEXT, RECIPE, RewardModelConfig
from .data import pair_format, write_new_model

SHOWN = ("reward/loss", "reward/accuracy", "reward/margin", "eval/accuracy", "eval/margin", "timing_s/step")
"""What a person sees of a step."""
JUDGED_FOR_STATISTICS = 1024
"""Training pairs whose scores say what scores are normalised by, where no pairs are held out."""


class RewardModelTrainer(BaseTrainer):
    """Drives the ranks of one model."""

    config: RewardModelConfig

    def fit(self) -> None:
        """Train, and leave the result in the run folder."""
        if self.heldout is not None and not self.accuracy.of:
            self.tracker.log(self.stream.step, self.judge(), steps=self.stream.steps)
        for minibatch in self.stream:
            with self.clock.phase("train"):
                metrics = self.RG_REWARD.train_step(replicate(minibatch))
            self.record(minibatch, metrics)
            self.checkpoints.save_when_due()
        self.finish()

    def record(self, minibatch: Batch, metrics: dict[str, float]) -> None:
        """Judge the held-out pairs when it is time, and write the step down."""
        step, is_last = self.stream.step, not len(self.stream)
        speed = self.progress.count(self.clock.take(), minibatch, self.job_memory_bytes)
        is_due = is_last or (self.config.eval_steps > 0 and step % self.config.eval_steps == 0)
        judged = self.judge() if is_due and self.heldout is not None else {}
        logged = {f"reward/{name}": value for name, value in metrics.items()}
        logged |= judged | speed | self.checkpoints.metrics
        is_shown = bool(judged) or step == 1 or step % self.config.logging_steps == 0
        self.tracker.log(step, logged, steps=self.stream.steps, show=is_shown)
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        if is_shown:
            self.tracker.update_summary(steps=step, seconds={"training": self.progress.seconds})

    def judge(self) -> dict[str, float]:
        """How the model tells the held-out pairs apart; of training pairs where none are held out."""
        pairs = self.heldout if self.heldout is not None else self.sample
        score_P2 = self.RG_REWARD.score(pairs.only("tokens"))["score"].view(-1, PAIR)
        gap_P = score_P2[:, 0] - score_P2[:, 1]
        accuracy = float((gap_P.sign().double() + 1).mean() / 2)  # a tie is half right
        self.mean, self.std, self.judged_step = float(score_P2.mean()), float(score_P2.std()), self.stream.step
        if self.heldout is not None:
            self.accuracy.add(accuracy)
        return {
            "eval/accuracy": accuracy,
            "eval/accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(gap_P)),
            "eval/loss": float(-torch.nn.functional.logsigmoid(gap_P).mean()),
            "eval/margin": float(gap_P.mean()),
            "eval/reward_mean": self.mean,
            "eval/reward_std": self.std,
        }

    def judge_if_needed(self) -> None:
        """Judge unless this step was: by a run that goes on after its last step, for one."""
        if self.judged_step != self.stream.step:
            self.judge()

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
            if self.heldout is not None:
                self.judge_if_needed()
            score = None if self.heldout is None else self.accuracy.of | {"examples": len(self.heldout) // PAIR}
            self.tracker.update_summary(score=score, tokens_per_second=self.progress.tokens / max(seconds, 1e-9))
            if score is not None:
                gained = f"accuracy on {score['examples']} held-out pairs: {score['start']:.3f} -> {score['end']:.3f}"
                self.say(f"{gained}; rewards have mean {self.mean:.3f} and standard deviation {self.std:.3f}")
            self.say(f"trained model: {self.checkpoints.store.latest()}/hf")
        self.tracker.close()
        remote_call.end_job()

    # --- before the first step

    def init(self) -> None:
        """Encode the pairs, let every rank load the model, and go on from a checkpoint if there is one."""
        config = self.config
        self.clock, self.progress = PhaseClock(self.tell), Progress()
        self.accuracy, self.judged_step = Accuracy(), -1
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            rows = load_pairs(config.dataset, split=config.dataset_split, max_rows=config.max_samples, seed=config.seed)
            model_path = self.model_path(rows, scratch)
            self.tokenizer = load_tokenizer(model_path, chat_template=config.tokenizer_chat_template, pad_with_end=True)
            if token := pad_apart_from_end(self.tokenizer):
                self.say(f"{token!r} is used for padding, as the end token of an answer must not be taken for it")
            data = self.pairs(rows)
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
            self.RG_REWARD.load(model_path, data.steps, self.tokenizer.pad_token_id)
        for line in self.RG_REWARD.load_state(str(resumed[0] / "state")) if resumed else []:
            self.say(f"not exactly as before: {line}")
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def model_path(self, rows: list[dict[str, Any]], scratch: str) -> str:
        """The model to load: the user's, or a new one written into `scratch`."""
        if self.config.pretrain != NEW_FROM_TEXT:
            return self.config.pretrain
        write_new_model(rows, pair_format(self.config).of(self.config.dataset), self.config, scratch)
        return scratch

    def pairs(self, rows: list[dict[str, Any]]) -> Epochs:
        """The pairs to train on; sets those that are held out."""
        config = self.config
        found = self.encoded(rows, config.dataset)
        train, self.heldout = found.batch, None
        if config.eval_dataset:
            held = load_pairs(config.eval_dataset, split=config.eval_split)
            self.heldout = self.encoded(held, config.eval_dataset).batch
        elif config.eval_samples:
            index_P, held_P = hold_out(found.openings, config.eval_samples, config.seed)
            train, self.heldout = select_pairs(found.batch, index_P), select_pairs(found.batch, held_P)
        check_shares(config.ranks, train, self.heldout)
        data = Epochs(
            train,
            train_batch_size=config.train_batch_size,
            epochs=config.max_epochs,
            seed=config.seed,
            group_size=PAIR,
        )
        self.sample = train.select(slice(0, PAIR * JUDGED_FOR_STATISTICS))
        count = 0 if self.heldout is None else len(self.heldout) // PAIR
        self.say(f"{len(train) // PAIR} pairs to train on, {count} held out; {data.steps} optimizer steps")
        return data

    def encoded(self, rows: list[dict[str, Any]], source: str) -> PreferenceData:
        """Pairs as token ids; what cannot be used is left out, counted and said."""
        pairs = read_pairs(rows, pair_format(self.config).of(source), self.tokenizer)
        found = encode_pairs(pairs, self.tokenizer, max_tokens=self.config.max_len)
        left_out = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
        self.say(f"{len(found)} of {len(rows)} pairs can be used (left out: {left_out}); {found.repeated} are repeated")
        return found

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_REWARD.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a folder that from_pretrained loads."""
        self.judge_if_needed()
        self.RG_REWARD.save(str(folder), self.mean, self.std)
        self.tokenizer.save_pretrained(folder)
