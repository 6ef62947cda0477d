"""The loop: one optimizer step per minibatch of demonstrations."""

import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from components.checkpoint import export_step
from components.data.supervised import SupervisedData, encode_demonstrations, load_demonstrations
from components.data.tasks import get_task
from components.data.tiny_model import character_tokenizer, tiny_model
from components.tracking import Tracker, console_line
from core import BaseTrainer, replicate

from . import remote_call
from .algorithm import minibatches
from .config import RECIPE, SFTConfig


class SFTTrainer(BaseTrainer):
    """Drives the ranks of one model."""

    config: SFTConfig

    def init(self) -> None:
        """Encode the demonstrations and let every rank load the model."""
        config = self.config
        self.tracker = Tracker(config.run_dir, RECIPE, config, config.seed)
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = self.model_path(scratch)
            self.tokenizer = AutoTokenizer.from_pretrained(model_path)
            data = self.demonstrations()
            held = config.eval_samples
            self.train_data = data.batch.select(slice(0, len(data.batch) - held))
            self.eval_data = data.batch.select(slice(len(data.batch) - held, None)) if held else None
            steps = config.max_epochs * -(-len(self.train_data) // config.train_batch_size)
            self.RG_ACTOR.load(model_path, steps)
        self.say(f"{data.kept} demonstrations (left out: {data.dropped}), {steps} optimizer steps")
        self.tracker.update_summary(seconds={"setup": time.time() - self.began})

    def fit(self) -> None:
        """Train, and leave the result in the run folder."""
        began, step, tokens = time.time(), 0, 0
        self.say_eval(step)
        for epoch in range(self.config.max_epochs):
            for index_B in minibatches(len(self.train_data), self.config.train_batch_size, self.config.seed, epoch):
                step += 1
                minibatch = self.train_data.select(index_B)
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
                tokens += minibatch.num_tokens
                self.record(step, metrics)
        self.say_eval(step)
        seconds = time.time() - began
        self.tracker.update_summary(
            steps=step, seconds={"training": seconds}, tokens_per_second=tokens / max(seconds, 1e-9)
        )
        self.say(f"trained model: {export_step(self.config.run_dir, step, self.save)}")
        self.tracker.close()
        remote_call.end_job()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step down; show every tenth."""
        self.tracker.log(step, {f"actor/{name}": value for name, value in metrics.items()})
        if step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.began})
        if step == 1 or step % 10 == 0:
            self.say(console_line(step, {name: metrics[name] for name in ("loss", "grad_norm", "learning_rate")}))

    def say_eval(self, step: int) -> None:
        """Report the loss on the demonstrations that were held out."""
        if self.eval_data is None:
            return
        logprob_N = self.RG_ACTOR.logprobs(self.eval_data.only("tokens"))["logprob"]
        loss = float(-logprob_N[self.eval_data["loss_mask"]].mean())
        self.tracker.log(step, {"eval/loss": loss})
        self.say(console_line(step, {"eval/loss": loss}))

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

    def save(self, folder: Path) -> None:
        """Write model and tokenizer, and once more to save_path where that is set."""
        for place in [folder, *([Path(self.config.save_path)] if self.config.save_path else [])]:
            self.RG_ACTOR.save(str(place))
            self.tokenizer.save_pretrained(place)
