"""The command line of a recipe that trains one model on pairs of responses."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

from components.models.sources import made_model
from training.launch.model_checks import check_vocabulary
from training.launch.supervised_command import ENCODED_ROWS, SupervisedCommand, naming
from training.options.pair_options import PairOptions
from training.options.supervised_options import Rows, Source

if TYPE_CHECKING:
    from training.run.supervised_run import TrainingData

P = TypeVar("P", bound=PairOptions)


class PairCommand(SupervisedCommand[P]):
    """The command of a recipe that trains on pairs of responses."""

    def training_data(self, config: P, scratch: str) -> TrainingData:  # noqa: ARG002 - no model is made there
        """See `SupervisedCommand.training_data`."""
        from training.run.pairs import read_training_pairs

        config = self.with_models(config)
        return read_training_pairs(config, config.model.path, lambda _: None)

    def check_data(self, config: P, rows: list[tuple[Source, Rows]], absent: Collection[str] = ()) -> None:
        """Check that all rows hold pairs, that the first can be tokenized, and that all models share a vocabulary."""
        made_for = {(made := made_model(path)) and made.data_source for path in config.models.values()}
        if made_for == {source.name for source, _ in rows}:
            return  # the model is created for these pairs, and the import of a tokenizer takes seconds
        if absent:
            return  # a plan without its models has no tokenizer
        from components.data.preferences import check_pair_tokens, check_pairs, read_pairs
        from components.data.text import same_vocabulary

        config = self.with_models(config)
        first = config.model.path
        with naming("model.path", first):
            tokenizer = config.tokenizer(first)
            if "model.path" in config.models:  # otherwise the run creates the model for this tokenizer
                check_vocabulary(tokenizer, config.model)
        readers = {first: tokenizer}
        for option, path in config.models.items():
            with naming(option, path):
                # Loading a tokenizer takes a second, and policy and reference often share one.
                if path not in readers:
                    readers[path] = config.tokenizer(path)
                if not same_vocabulary(tokenizer, readers[path]):
                    raise ValueError(
                        f"it has another vocabulary than model.path={first}; set a model of the same family"
                    )
        for source, part in rows:
            with naming(source.option, source.name):
                check_pairs(part, config.pair_format(source.name))
                pairs = read_pairs(part[:ENCODED_ROWS], config.pair_format(source.name), tokenizer)
                # Embeddings of one family may differ in size, so a token of one model can be invalid in another.
                for reader in readers.values():
                    check_pair_tokens(pairs, reader)
