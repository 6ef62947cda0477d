"""Plug-ins add groups of options to a schema, and names of other systems; without them these are unknown options."""

import pickle
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from ray import cloudpickle

from recipes.sft.config import SFTConfig
from tests.messages import says
from training.options.config import CommandLine, load_config
from training.options.model_options import ModelOptions
from training.options.schema import ConfigError, Options, recipe_of

NAMED = "model.attn_implementation=theirs"


@dataclass(kw_only=True)
class Schema(Options):
    """The schema of these tests."""

    ADAPTERS: ClassVar = ("theirs.train", "nobodys.train")

    seed: int = 1
    model: ModelOptions = field(default_factory=ModelOptions)


@pytest.mark.usefixtures("their_plugin")
def test_the_value_that_names_a_plugin_adds_its_options() -> None:
    config = load_config(Schema, [NAMED, "theirs.speed=5"])
    assert isinstance(config, Schema)
    assert vars(config)["theirs"].speed == 5
    assert vars(load_config(Schema, [NAMED]))["theirs"].speed == 3
    assert not hasattr(load_config(Schema, []), "theirs")
    assert recipe_of(type(config)) == recipe_of(Schema)
    assert CommandLine(Schema, [NAMED, "theirs.speed=5"]).changed["theirs.speed"] == 5


@pytest.mark.usefixtures("their_plugin")
def test_a_configuration_with_the_options_of_a_plugin_reaches_other_processes() -> None:
    config = load_config(Schema, [NAMED, "theirs.speed=5"])
    copy = pickle.loads(cloudpickle.dumps(config))  # pyright: ignore[reportPrivateImportUsage]
    assert copy.theirs.speed == 5


@pytest.mark.usefixtures("their_plugin")
@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([NAMED, "theirs.speed=0"], ["theirs.speed=0"]),
        ([NAMED, "theirs.sped=1"], ["'theirs.sped'", "theirs.speed"]),
        (["theirs.speed=1"], ["theirs.speed", NAMED]),
    ],
)
def test_faults_in_the_options_of_a_plugin_are_reported(words: list[str], facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(Schema, words)


@pytest.mark.usefixtures("their_plugin")
def test_names_of_another_system_are_accepted_with_its_plugin() -> None:
    line = CommandLine(Schema, ["--there.seed", "7"])
    assert (line.config().seed, line.written) == (7, {"seed": "there.seed"})


def test_without_the_plugin_names_of_another_system_are_unknown_options() -> None:
    with pytest.raises(ConfigError, match=says("unknown option 'there.seed'", "seed")):
        load_config(Schema, ["--there.seed", "7"])


def test_a_command_in_native_names_has_no_defaults_of_another_system() -> None:
    arguments = ["model.path=m", "data.path=d", "run_dir=x", "data.input_template=Q: {}"]
    assert not load_config(SFTConfig, arguments).train.lr_warmup_from_zero
    assert load_config(SFTConfig, [*arguments, "--max_norm", "1"]).train.lr_warmup_from_zero
