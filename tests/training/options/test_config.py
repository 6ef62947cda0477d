"""The schema, files and the command line: precedence, and error messages."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from plugins.option_help.help import describe_options
from tests.messages import says
from training.options.adapter import Target
from training.options.config import load_config
from training.options.schema import ConfigError
from training.options.table_adapter import Refused, TableAdapter


@dataclass(kw_only=True)
class Optimizer:
    """A group of options."""

    learning_rate: float = 1e-3
    """Step size of the optimizer."""


@dataclass(kw_only=True)
class Options:
    """The schema of these tests."""

    steps: int = 3
    """Number
    of steps."""
    kind: Literal["gae", "rloo"] = "gae"
    betas: tuple[float, float] = (0.9, 0.95)
    names: list[str] = field(default_factory=list)
    path: str | None = None
    colocate_all: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} is below 0; set steps=0 or more")


def test_all_notations_of_an_option_have_the_same_meaning() -> None:
    expected = Options(steps=7)
    for words in (["steps=7"], ["--steps=7"], ["--steps", "7"]):
        assert load_config(Options, words) == expected


def test_the_number_of_values_of_an_option_follows_from_its_field() -> None:
    words = ["--colocate-all", "--betas", "0.8", "0.9", "--names", "a", "b", "--optimizer.learning_rate", "1e-4"]
    assert load_config(Options, [*words, "--path", "007"]) == Options(
        colocate_all=True, betas=(0.8, 0.9), names=["a", "b"], optimizer=Optimizer(learning_rate=1e-4), path="007"
    )
    assert load_config(Options, ["--colocate_all", "false", "steps=1"]) == Options(steps=1)


@pytest.mark.parametrize("last", ["steps=7", "--steps=7", "optimizer.learning_rate=2e-3", "+steps=7"])
def test_the_values_of_a_flag_end_before_the_next_option(last: str) -> None:
    expected = load_config(Options, [last.lstrip("+")]) if "+" not in last else None
    for words, values in (
        (["--names", "a", "b"], {"names": ["a", "b"]}),
        (["--betas", "0.8", "0.9"], {"betas": (0.8, 0.9)}),
        (["--path", "a"], {"path": "a"}),
        (["--colocate_all"], {"colocate_all": True}),
        (["--names"], {}),
    ):
        if expected is None:  # a schema without Hydra's prefixes rejects the option, and keeps the values before it
            with pytest.raises(ConfigError, match=says("+steps")):
                load_config(Options, [*words, last])
            continue
        assert load_config(Options, [*words, last]) == replace(expected, **values)
    # A value may look like an unknown option.
    assert load_config(Options, ["--path", "runs/x=1", "steps=7"]) == Options(path="runs/x=1", steps=7)
    assert load_config(Options, ["--path", "x=1"]) == Options(path="x=1")


def test_help_shows_description_and_default_of_each_option() -> None:
    lines = describe_options(Options).splitlines()
    at = lines.index("--steps  (int, default 3)")
    assert lines[at + 1] == "    Number of steps."
    assert "--optimizer.learning_rate  (float, default 0.001)" in lines
    assert (
        lines[lines.index("--optimizer.learning_rate  (float, default 0.001)") + 1] == "    Step size of the optimizer."
    )


@dataclass(kw_only=True)
class Base:
    """Options of all schemas."""

    seed: int = 1
    """Seed of all random numbers."""
    folder: str = ""
    """Output folder."""
    name: str = "base"
    """Name in messages."""


@dataclass(kw_only=True)
class Derived(Base):
    """A schema that overrides inherited defaults."""

    folder: str = "runs"
    name: str = "derived"
    """Name in every line."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=0.5))


def test_help_shows_inherited_options_and_overridden_defaults() -> None:
    assert describe_options(Derived).splitlines()[2:] == [
        *("--seed  (int, default 1)", "    Seed of all random numbers."),
        *("--folder  (str, default 'runs')", "    Output folder."),
        *("--name  (str, default 'derived')", "    Name in every line."),
        *("--optimizer.learning_rate  (float, default 0.5)", "    Step size of the optimizer."),
    ]


def test_files_come_before_the_command_line_and_later_files_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 10\noptimizer: {learning_rate: 0.5}\nkind: rloo\n")
    (tmp_path / "b.yaml").write_text("steps: 20\n")
    words = ["--config", str(tmp_path / "a.yaml"), f"config={tmp_path / 'b.yaml'}", "kind=gae"]
    loaded = load_config(Options, words)
    assert (loaded.steps, loaded.optimizer.learning_rate, loaded.kind) == (20, 0.5, "gae")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["stepz=1"], ["stepz", "'steps'"]),
        (["--learning_rate", "1"], ["'learning_rate'", "optimizer.learning_rate"]),
        (["steps=many"], ["steps", "many"]),
        (["kind=gea"], ["kind", "gea", "gae", "rloo"]),
        (["--betas", "1"], ["--betas", 2, 1]),
        (["--path"], ["--path", 1, 0]),
        (["--path", "steps=7"], ["--path", 1, 0]),
        (["--betas", "0.8", "steps=7"], ["--betas", 2, 1]),
        (["--names", "a", "stepz=7"], ["stepz", "'steps'"]),
        (["word"], ["word", "key=value"]),
        (["steps=-1"], ["steps=-1", "steps=0"]),
        (["config=/no/such.yaml"], ["/no/such.yaml"]),
        (["steps=???"], ["steps=???"]),
        (["betas=[0.9, 0.99"], ["betas", "YAML"]),
        (["steps=${"], ["steps=${"]),
        (["steps=${", "kind=${kind"], ["steps=${", "kind=${kind"]),
        (["--"], ["--", "key=value"]),
        (["--=1"], ["--=1", "key=value"]),
        (["betas=[0.9, .nan]"], ["betas.1=nan", "finite"]),
        (["optimizer.learning_rate=inf"], ["optimizer.learning_rate=inf", "finite"]),
    ],
)
def test_an_error_message_names_the_correct_spelling(words: list[str], facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(Options, words)


@pytest.mark.parametrize("text", ["steps: [1", "- steps", "steps: \0", "steps: 1\n---\nsteps: 2", "a: " + "[" * 500])
def test_a_file_without_a_yaml_mapping_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml") as caught:
        load_config(Options, ["--config", str(tmp_path / "a.yaml")])
    assert "\n" not in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load_config(Options, ["--config", str(tmp_path / "a.yaml")]) == Options()


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 0.5}\n")
    with pytest.raises(ConfigError, match=says("a.yaml", "optimizer.lr")):
        load_config(Options, ["--config", str(tmp_path / "a.yaml")])


@dataclass(kw_only=True)
class Newcomers:
    """A schema with aliases of another system."""

    ADAPTER: ClassVar = TableAdapter(
        options={"algo.kl.init_coef": Target("kl_coef")},
        refused={
            "packing": Refused("not yet; leave it out"),
            "tp_size": Refused("one device per engine; leave it out", int, harmless="1"),
            "range": Refused("use clip", tuple[float, float]),
        },
    )

    kl_coef: float = 0.01
    seed: int = 1


@pytest.mark.parametrize("words", [["--algo.kl.init_coef", "0.5"], ["algo.kl.init_coef=0.5"]])
def test_an_alias_sets_the_same_field(words: list[str]) -> None:
    assert load_config(Newcomers, words) == Newcomers(kl_coef=0.5)


def test_an_alias_is_accepted_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algo: {kl: {init_coef: 0.5}}\n")
    assert load_config(Newcomers, [f"config={tmp_path}/a.yaml"]) == Newcomers(kl_coef=0.5)


def test_refused_options_are_all_named_at_once_with_their_reasons() -> None:
    # The reasons are defined in the schema.
    facts = ("packing: not yet; leave it out", "range: use clip", "tp_size: one device per engine; leave it out")
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(Newcomers, ["--packing", "--range", "0", "1", "--seed", "2", "--tp_size", "2"])


def test_a_refused_option_in_a_file_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("packing: true\n")
    with pytest.raises(ConfigError, match=says("a.yaml", "packing: not yet")):
        load_config(Newcomers, [f"config={tmp_path}/a.yaml"])


@pytest.mark.parametrize("words", [["--packing", "false"], ["packing=no"], ["--tp_size", "1"], ["tp_size=1.0"]])
def test_an_unsupported_option_with_its_effective_value_is_accepted(words: list[str]) -> None:
    assert load_config(Newcomers, [*words, "--seed", "2"]) == Newcomers(seed=2)


def test_the_error_for_a_misspelt_option_names_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=says("pakcing", "'packing'")):
        load_config(Newcomers, ["--pakcing"])
