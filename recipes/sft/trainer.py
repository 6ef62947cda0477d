"""The loop: one optimizer step per minibatch of demonstrations."""

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from components.batch import Batch
from components.checkpoint import CheckpointError, Checkpoints, changed_options, find_checkpoint, read_state
from components.data.stream import SampleStream
from components.data.supervised import SupervisedData, encode_demonstrations, load_demonstrations
from components.data.tasks import get_task
from components.data.tiny_model import character_tokenizer, tiny_model
from components.tracking import Tracker, WandbConfig, console_line, redact
from core import BaseTrainer, replicate

from . import remote_call
from .algorithm import minibatches
from .config import RECIPE, SFTConfig


class SFTTrainer(BaseTrainer):
    """Drives the ranks of one model."""

    config: SFTConfig

    def init(self) -> None:
        """Encode the demonstrations, let every rank load the model, and go on from a checkpoint if there is one."""
        config = self.config
        self.checkpoints = Checkpoints(config.checkpoint_dir, config.max_ckpt_num)
        self.tokens_seen, self.training_seconds, self.saved_step = 0, 0.0, 0
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = self.model_path(scratch)
            self.tokenizer = AutoTokenizer.from_pretrained(model_path)
            data = self.demonstrations()
            held = config.eval_samples
            self.train_data = data.batch.select(slice(0, len(data.batch) - held))
            self.eval_data = data.batch.select(slice(len(data.batch) - held, None)) if held else None
            self.steps_per_epoch = -(-len(self.train_data) // config.train_batch_size)
            steps = config.max_epochs * self.steps_per_epoch
            self.stream = SampleStream(self.minibatch, steps, stopped=lambda: self.stop_requested)
            self.say(f"{data.kept} demonstrations (left out: {data.dropped}), {steps} optimizer steps")
            resumed = find_checkpoint(config.resume, self.checkpoints.folder, self.run_id)
            saved = self.load(resumed) if resumed else {}
            self.tracker = Tracker(
                config.run_dir,
                RECIPE,
                config,
                config.seed,
                wandb=WandbConfig() if config.use_wandb else None,
                tensorboard="true" if config.use_tensorboard else None,
                resume_step=self.stream.step,
                state=saved.get("tracker"),
                code=Path(__file__).parent,
            )
            self.RG_ACTOR.load(model_path, steps)
        for line in self.RG_ACTOR.load_state(str(resumed / "state")) if resumed else []:
            self.say(f"not exactly as before: {line}")
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def fit(self) -> None:
        """Train, and leave the result in the run folder."""
        if self.stream.step == 0:
            self.say_eval(0)
        for minibatch in self.stream:
            began = time.time()
            metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.tokens_seen += minibatch.num_tokens
            self.training_seconds += time.time() - began
            self.record(metrics)
            self.save_when_due()
        if self.saved_step != self.stream.step:
            self.save()
        self.tracker.update_summary(steps=self.stream.step, seconds={"training": self.training_seconds})
        if len(self.stream):
            self.say(
                f"stopped after step {self.stream.step} of {self.stream.steps}; run_dir={self.config.run_dir} goes on"
            )
        else:
            self.finish()
        self.tracker.close()
        remote_call.end_job()

    def minibatch(self, step: int) -> Batch:
        """The demonstrations of one optimizer step."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = minibatches(len(self.train_data), self.config.train_batch_size, self.config.seed, epoch)
        return self.train_data.select(order[position])

    def record(self, metrics: dict[str, float]) -> None:
        """Write the step down; show every tenth."""
        step = self.stream.step
        evaluated = {} if len(self.stream) else self.say_eval(step)
        self.tracker.log(step, {f"actor/{name}": value for name, value in metrics.items()} | evaluated)
        seconds = {"training": self.training_seconds}
        if step == 1:
            seconds["to_first_step"] = time.time() - self.began
        if step == 1 or step % 10 == 0:
            self.tracker.update_summary(steps=step, seconds=seconds)
            self.say(console_line(step, {name: metrics[name] for name in ("loss", "grad_norm", "learning_rate")}))

    def say_eval(self, step: int) -> dict[str, float]:
        """Report the loss on the demonstrations that were held out; empty where none are."""
        if self.eval_data is None:
            return {}
        logprob_N = self.RG_ACTOR.logprobs(self.eval_data.only("tokens"))["logprob"]
        found = {"eval/loss": float(-logprob_N[self.eval_data["loss_mask"]].mean())}
        if step == 0:
            self.tracker.log(step, found)
        self.say(console_line(step, found))
        return found

    def finish(self) -> None:
        """Sum up, and say where the model is."""
        if self.config.save_path:
            self.export(Path(self.config.save_path))
        self.tracker.update_summary(tokens_per_second=self.tokens_seen / max(self.training_seconds, 1e-9))
        self.say(f"trained model: {self.checkpoints.latest()}/hf")

    # --- checkpoints

    def save_when_due(self) -> None:
        """Write a checkpoint every `save_steps` steps; one that fails is said."""
        if self.config.save_steps < 1 or self.stream.step % self.config.save_steps:
            return
        try:
            self.save()
        except CheckpointError as error:
            self.say(f"warning: {error}; the training goes on")

    def save(self) -> None:
        """Write a checkpoint of the step that was finished last."""
        self.checkpoints.save(self.stream.step, self.state(), self.write)
        self.saved_step = self.stream.step

    def state(self) -> dict[str, Any]:
        """Everything that the training goes on from, but for the model."""
        return {
            "run_id": self.run_id,
            "stream": self.stream.state_dict(),
            "demonstrations": self.fingerprint(),
            "tokens_seen": self.tokens_seen,
            "training_seconds": self.training_seconds,
            "tracker": self.tracker.state_dict(),
            "config": redact(self.config),
        }

    def load(self, folder: Path) -> dict[str, Any]:
        """Take over what the trainer held when a checkpoint was written; returns all of its state.

        Raises:
            ValueError: the demonstrations are others than before.
        """
        saved = read_state(folder)
        if saved["demonstrations"] != self.fingerprint():
            raise ValueError(
                f"{folder} was written with other demonstrations, or in another order; resume with the same dataset, "
                "seed and train_batch_size, or set resume=none and another run_dir"
            )
        self.stream.load_state_dict(saved["stream"])
        self.tokens_seen, self.training_seconds = saved["tokens_seen"], saved["training_seconds"]
        self.saved_step = self.stream.step
        self.say(f"goes on after step {self.stream.step} of {self.stream.steps}, from {folder}")
        for line in changed_options(saved["config"], redact(self.config)):
            self.say(f"changed since that checkpoint: {line}")
        return saved

    def fingerprint(self) -> str:
        """What decides which demonstrations a step has."""
        data = hashlib.blake2b(self.train_data["tokens"].numpy().tobytes(), digest_size=8)
        return f"{data.hexdigest()}, {self.config.train_batch_size} a step, seed {self.config.seed}"

    def write(self, folder: Path) -> None:
        """Let the ranks write what they hold into a step's folder."""
        self.RG_ACTOR.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a folder that from_pretrained loads."""
        self.RG_ACTOR.save(str(folder))
        self.tokenizer.save_pretrained(folder)

    # --- parts

    def model_path(self, scratch: str) -> str:
        """The model to load: the user's, or a new one written into `scratch`."""
        kind, _, task = self.config.pretrain.partition(":")
        if kind != "new":
            return self.config.pretrain
        tokenizer = character_tokenizer(get_task(task).alphabet)
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
