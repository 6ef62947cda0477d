"""The loop: one optimizer step per minibatch of demonstrations."""

import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from components.batch import Batch
from components.data.supervised import SupervisedData, encode_demonstrations, load_demonstrations
from components.data.tasks import get_task
from components.data.tiny_model import task_tokenizer, tiny_model
from core import BaseTrainer, replicate
from training.checkpoint import Checkpoints
from training.epochs import Epochs
from training.phase_clock import PhaseClock
from training.progress import Progress, RunCheckpoints
from training.rollout_queue import SampleStream
from training.tracking import Tracker, WandbConfig, redact

from . import remote_call
from .config import RECIPE, SFTConfig

SHOWN = ("actor/loss", "eval/loss", "actor/learning_rate", "timing_s/step")
"""What a person sees of a step."""


class SFTTrainer(BaseTrainer):
    """Drives the ranks of one model."""

    config: SFTConfig

    def fit(self) -> None:
        """Train, and leave the result in the run folder."""
        if self.stream.step == 0 and (found := self.judge()):
            self.tracker.log(0, found, steps=self.stream.steps)
        for minibatch in self.stream:
            with self.clock.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.record(minibatch, metrics)
            self.checkpoints.save_when_due()
        self.finish()

    def record(self, minibatch: Batch, metrics: dict[str, float]) -> None:
        """Write the step down."""
        step, speed = self.stream.step, self.progress.count(self.clock.take(), minibatch, self.job_memory_bytes)
        evaluated = {} if len(self.stream) else self.judge()
        logged = {f"actor/{name}": value for name, value in metrics.items()}
        self.tracker.log(step, logged | evaluated | speed | self.checkpoints.metrics, steps=self.stream.steps)
        seconds = {"training": self.progress.seconds}
        if step == 1:
            seconds["to_first_step"] = time.time() - self.began
        if step == 1 or step % 10 == 0:
            self.tracker.update_summary(steps=step, seconds=seconds)

    def judge(self) -> dict[str, float]:
        """The loss on the demonstrations that were held out; empty where none are."""
        if self.eval_data is None:
            return {}
        logprob_N = self.RG_ACTOR.logprobs(self.eval_data.only("tokens"))["logprob"]
        return {"eval/loss": float(-logprob_N[self.eval_data["loss_mask"]].mean())}

    def finish(self) -> None:
        """Save what is not yet saved, sum up, and say where the model is."""
        self.checkpoints.save()
        step, seconds = self.stream.step, self.progress.seconds
        self.tracker.update_summary(steps=step, seconds={"training": seconds})
        if len(self.stream):
            self.say(f"stopped after step {step} of {self.stream.steps}; run_dir={self.config.run_dir} goes on")
        else:
            if self.config.save_path:
                self.export(Path(self.config.save_path).expanduser())
            self.tracker.update_summary(tokens_per_second=self.progress.tokens / max(seconds, 1e-9))
            self.say(f"trained model: {self.checkpoints.store.latest()}/hf")
        self.tracker.close()
        remote_call.end_job()

    # --- before the first step

    def init(self) -> None:
        """Encode the demonstrations, let every rank load the model, and go on from a checkpoint if there is one."""
        config = self.config
        self.clock, self.progress = PhaseClock(self.tell), Progress()
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = self.model_path(scratch)
            self.tokenizer = AutoTokenizer.from_pretrained(model_path)
            found = self.demonstrations()
            count, held = len(found.batch), config.eval_samples
            self.eval_data = found.batch.select(slice(count - held, None)) if held else None
            data = Epochs(
                found.batch.select(slice(0, count - held)),
                train_batch_size=config.train_batch_size,
                epochs=config.max_epochs,
                seed=config.seed,
            )
            self.stream = SampleStream(data.minibatch, data.steps, stopped=lambda: self.stop_requested)
            self.say(f"{found.kept} demonstrations (left out: {found.dropped}), {data.steps} optimizer steps")
            self.checkpoints = RunCheckpoints(
                Checkpoints(config.checkpoint_dir, config.max_ckpt_num),
                self.stream,
                {"demonstrations": data, "progress": self.progress},
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
                wandb=WandbConfig() if config.use_wandb else None,
                tensorboard="true" if config.use_tensorboard else None,
                resume_step=self.stream.step,
                state=resumed[1]["tracker"] if resumed else None,
                code=Path(__file__).parent,
                tell=self.tell,
                shown=SHOWN,
            )
            self.checkpoints.parts["tracker"] = self.tracker
            self.RG_ACTOR.load(model_path, data.steps)
        for line in self.RG_ACTOR.load_state(str(resumed[0] / "state")) if resumed else []:
            self.say(f"not exactly as before: {line}")
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def model_path(self, scratch: str) -> str:
        """The model to load: the user's, or a new one written into `scratch`."""
        kind, _, task = self.config.pretrain.partition(":")
        if kind != "new":
            return self.config.pretrain
        tokenizer = task_tokenizer(get_task(task))
        tiny_model(tokenizer, self.config.seed).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        return scratch

    def demonstrations(self) -> SupervisedData:
        """All demonstrations as token ids; what is too long is left out and counted."""
        config = self.config
        kind, _, task = config.dataset.partition(":")
        if kind == "task":
            rows: list[dict[str, Any]] = get_task(task).demonstrations(config.max_samples, config.seed)
        else:
            rows = load_demonstrations(config.dataset)[: config.max_samples]
        return encode_demonstrations(
            rows, self.tokenizer, max_tokens=config.max_len, input_template=config.input_template
        )

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_ACTOR.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a folder that from_pretrained loads."""
        self.RG_ACTOR.save(str(folder))
        self.tokenizer.save_pretrained(folder)
