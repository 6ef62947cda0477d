"""The model to start from, and the demonstrations."""

from collections.abc import Callable

from components.data.shares import check_shares
from components.data.supervised import SupervisedData, encode_demonstrations
from components.models.sources import new_model
from training.options.supervised_options import Rows
from training.run.supervised_run import TrainingData

from .config import NEW, SFTConfig


def starting_model(config: SFTConfig, scratch: str, *, with_weights: bool = True) -> str:
    """Path of the model to load: the user's, or a new one in the folder `scratch`, or of that the tokenizer alone."""
    path = config.model.path
    if not path.startswith(NEW):
        return path
    model = new_model(path)
    tokenizer = model.tokenizer()
    if with_weights:
        model.save(tokenizer, scratch, config.seed)
    tokenizer.save_pretrained(scratch)
    return scratch


def read_demonstrations(config: SFTConfig, model_path: str, info: Callable[[str], None]) -> TrainingData:
    """Those to train on, and those held out; what is too long is left out, and counted."""
    tokenizer = config.tokenizer(model_path)

    def encoded(rows: Rows) -> SupervisedData:
        form = config.data.form(config.data.path)
        found = encode_demonstrations(rows, tokenizer, form, max_tokens=config.data.max_tokens)
        cut = f", {found.cut} cut" if found.cut else ""
        info(f"{found.kept} of {len(rows)} demonstrations can be used (left out: {found.dropped}{cut})")
        return found

    found = encoded(config.training_examples(lambda rows, _: rows, info))
    info(f"first demonstration {found.describe_first(tokenizer)}")
    train, heldout = found.batch, None
    if config.evaluation.path:
        heldout = encoded(config.evaluation_examples(lambda rows, _: rows)).batch
    elif config.evaluation.held_out:
        count = max(found.kept - config.evaluation.held_out, 0)
        train = found.batch.select(slice(0, count))
        heldout = found.batch.select(slice(count, None))
    check_shares(config.placement.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)
