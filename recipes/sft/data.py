"""The model to start from, and the demonstrations."""

from collections.abc import Callable

from components.data.shares import check_shares
from components.data.supervised import SupervisedData, encode_demonstrations
from components.models.new_model import new_model
from training.options.supervised_options import Rows
from training.run.supervised_run import TrainingData

from .config import NEW, SFTConfig


def starting_model(config: SFTConfig, scratch: str, *, with_weights: bool = True) -> str:
    """Return the path of the model to load: `model.path`, or a new model that is written to a folder.

    Args:
        config: the configuration of the run.
        scratch: folder for a new model.
        with_weights: False writes only the tokenizer, which is enough to read the data.
    """
    path = config.model.path
    if not path.startswith(NEW):
        return path
    model = new_model(path)
    tokenizer = model.tokenizer()
    # A check of the data reads the tokenizer only. Writing the weights would delay it.
    if with_weights:
        model.save(tokenizer, scratch, config.seed)
    tokenizer.save_pretrained(scratch)
    return scratch


def read_demonstrations(config: SFTConfig, model_path: str, info: Callable[[str], None]) -> TrainingData:
    """Read and tokenize the demonstrations to train on, and the held-out ones.

    Demonstrations longer than `data.max_tokens` are excluded and counted.

    Args:
        config: the configuration of the run.
        model_path: model whose tokenizer is used.
        info: prints a line for the user.
    """
    tokenizer = config.tokenizer(model_path)

    def encode(rows: Rows) -> SupervisedData:
        form = config.data.form(config.data.path)
        encoded = encode_demonstrations(rows, tokenizer, form, max_tokens=config.data.max_tokens)
        truncated = ""
        if encoded.cut:
            truncated = f"; truncated: {encoded.cut}"
        info(f"{encoded.kept} of {len(rows)} demonstrations are used (excluded: {encoded.dropped}{truncated})")
        return encoded

    encoded = encode(config.training_examples(lambda rows, _: rows, info))
    info(f"first demonstration {encoded.describe_first(tokenizer)}")
    train = encoded.batch
    heldout = None
    if config.evaluation.path:
        heldout = encode(config.evaluation_examples(lambda rows, _: rows)).batch
    elif config.evaluation.held_out:
        count = max(encoded.kept - config.evaluation.held_out, 0)
        train = encoded.batch.select(slice(0, count))
        heldout = encoded.batch.select(slice(count, None))
    check_shares(config.placement.ranks, train, heldout)
    return TrainingData(model_path, tokenizer, train, heldout)
