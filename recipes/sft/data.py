"""The model to start from, and the demonstrations."""

from collections.abc import Callable
from typing import Any

from components.data.preferences import check_shares
from components.data.supervised import encode_demonstrations, load_demonstrations
from components.data.tasks import get_task
from components.data.tiny_model import task_tokenizer, tiny_model
from training.supervised_run import TrainingData

from .config import NEW, SFTConfig


def starting_model(config: SFTConfig, scratch: str) -> str:
    """Path of the model to load: the user's, or a new one in the folder `scratch`."""
    if not config.pretrain.startswith(NEW):
        return config.pretrain
    tokenizer = task_tokenizer(get_task(config.pretrain.removeprefix(NEW)))
    tiny_model(tokenizer, config.seed).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    return scratch


def read_demonstrations(config: SFTConfig, model_path: str, info: Callable[[str], None]) -> TrainingData:
    """Those to train on, and those held out; what is too long is left out, and counted."""
    tokenizer = config.tokenizer(model_path)
    kind, _, task = config.dataset.partition(":")
    if kind == "task":
        rows: list[dict[str, Any]] = get_task(task).demonstrations(config.max_samples or 10_000, config.seed)
    else:
        rows = load_demonstrations(config.dataset)[: config.max_samples]
    found = encode_demonstrations(rows, tokenizer, max_tokens=config.max_len, input_template=config.input_template)
    info(f"{found.kept} of {len(rows)} demonstrations can be used (left out: {found.dropped})")
    count = max(found.kept - config.eval_samples, 0)
    train = found.batch.select(slice(0, count))
    heldout = found.batch.select(slice(count, None)) if config.eval_samples else None
    check_shares(config.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)
