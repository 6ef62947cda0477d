"""Names and values of another system: their translation, rejected ones, and the messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.messages import says
from training.options.adapter import Adapter
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError, Options
from training.options.table_adapter import Computed, TableAdapter

TABLE = """
shared:
  defaults: {train.warmup_from_zero: true}
  names:
    model.path: pretrain actor.model_name_or_path
    data.max_samples: max_samples
  options:
    param_dtype: {is: train.precision, values: {bf16: bf16, fp32: fp32}, else: fp16 needs a loss scale; use bf16}
    override: model.overrides
    no_shuffle: {is: data.shuffle, values: {true: false, false: true}}
  no_effect:
    - {why: every step is logged, harmless: 1, names: [logging_steps]}
    - {why: fsdp trains here, names: ["*.megatron.*"]}
  refused:
    - {why: a sequence is on one rank, harmless: 1, names: [ring_attn_size]}
    - {why: give one dataset, names: [dataset_probs], switches: [mix]}
ppo:
  computed: {int: [max_len, generate_max_len]}
"""


def compute(computed: Computed) -> None:
    """The prompt may use the remainder of the maximum length."""
    most = computed.get("max_len", default=1024)
    computed.put("data.max_prompt_tokens", most - computed.get("generate_max_len", default=0))
    if computed.option("data.max_samples") is not None:
        computed.notes.append("max_samples is known here")
    if most < 1:
        computed.faults.append(f"max_len={most} leaves no prompt")


@pytest.fixture(scope="module", autouse=True)
def _table(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("table") / "table.yaml"
    path.write_text(TABLE)
    Schema.ADAPTER = TableAdapter.load(path, "shared", "ppo", compute=compute)


@dataclass(kw_only=True)
class Model(Options):
    """A group."""

    path: str = "none"
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Data(Options):
    """A group."""

    max_samples: int | None = None
    max_prompt_tokens: int = 1024
    shuffle: bool = True

    def faults(self) -> Any:
        """See `Options.faults`."""
        if self.max_samples is not None and self.max_samples < 1:
            yield f"max_samples={self.max_samples}; set it to at least 1"


@dataclass(kw_only=True)
class Train(Options):
    """A group."""

    precision: str = "auto"
    warmup_from_zero: bool = False


@dataclass(kw_only=True)
class Schema(Options):
    """The schema of these tests."""

    ADAPTER: ClassVar[Adapter] = Adapter()

    seed: int = 1
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)

    def faults(self) -> Any:
        """See `Options.faults`."""
        if self.seed < 0:
            yield f"seed={self.seed}; set it to 0 or more"


@pytest.mark.parametrize("name", ["--pretrain", "--actor.model_name_or_path", "--model.path"])
def test_all_names_of_an_option_set_it(name: str) -> None:
    assert load_config(Schema, [name, "m"]).model.path == "m"


def test_defaults_of_another_system_apply_to_commands_in_its_names() -> None:
    assert not load_config(Schema, ["--model.path", "m"]).train.warmup_from_zero
    assert load_config(Schema, ["--pretrain", "m"]).train.warmup_from_zero
    assert load_config(Schema, ["--max_len", "9"]).train.warmup_from_zero
    assert not load_config(Schema, ["--pretrain", "m", "train.warmup_from_zero=false"]).train.warmup_from_zero


def test_a_value_is_translated_or_rejected_with_the_alternative() -> None:
    assert load_config(Schema, ["--param_dtype", "BF16"]).train.precision == "bf16"
    with pytest.raises(ConfigError, match=says("param_dtype=fp16", "use bf16")):
        load_config(Schema, ["--param_dtype", "fp16"])


def test_entries_of_a_mapping_are_set_by_the_name_of_the_mapping() -> None:
    loaded = load_config(Schema, ["override.rope_theta=10", "++override={a: 1}"[2:]])
    assert loaded.model.overrides == {"rope_theta": 10, "a": 1}


def test_computed_options_use_values_of_files_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("generate_max_len: 100\nmax_samples: 5\n")
    words = ["--config", f"{tmp_path}/a.yaml", "--max_len", "300"]
    assert load_config(Schema, words).data == Data(max_samples=5, max_prompt_tokens=200)
    assert CommandLine(Schema, words).notes == ["max_samples is known here"]
    assert CommandLine(Schema, words).named == {
        "data.max_samples",
        "data.max_prompt_tokens",
        "train.warmup_from_zero",
    }


def test_options_without_effect_are_noted_once_per_reason() -> None:
    words = ["--logging_steps", "5", "actor.megatron.a=1", "critic.megatron.b=2"]
    logged, megatron = CommandLine(Schema, words).notes
    assert "logging_steps" in logged and "every step is logged" in logged
    assert "actor.megatron.a, critic.megatron.b" in megatron
    assert CommandLine(Schema, ["--logging_steps", "1"]).notes == []


@pytest.mark.parametrize("text", ["null", "~"])
def test_null_is_null_in_a_file_as_on_the_command_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"dataset_probs: {text}\nring_attn_size: 1\n")
    assert load_config(Schema, ["--config", f"{tmp_path}/a.yaml"]) == Schema()
    assert load_config(Schema, ["dataset_probs=null"]) == Schema()


def test_interpolation_in_a_file_refers_to_the_file_or_the_whole_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("pretrain: m-${max_samples}\nmax_samples: ${seed}\n")
    loaded = load_config(Schema, ["--config", f"{tmp_path}/a.yaml", "seed=7"])
    assert (loaded.data.max_samples, loaded.model.path) == (7, "m-7")


def test_all_faults_are_reported_together_in_the_names_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("ring_attn_size: 2\nsed: 3\n")
    words = ["--config", f"{tmp_path}/a.yaml", "--dataset_probs", "0.5,0.5", "--max_samples", "0", "seed=-1"]
    with pytest.raises(ConfigError) as error:
        load_config(Schema, [*words, "train.precision=[1", "--max_len", "0", "--nothing", "1"])
    lines = str(error.value).splitlines()[1:]
    for facts in (
        ("a.yaml", "ring_attn_size", "a sequence is on one rank"),
        ("a.yaml", "unknown option 'sed'", "'seed'"),
        ("dataset_probs", "give one dataset"),
        ("unknown option 'nothing'",),
        ("max_len=0 leaves no prompt",),
        (" max_samples=0", "at least 1"),
        ("seed=-1", "0 or more"),
    ):
        assert any(all(fact in line for fact in facts) for line in lines), (facts, lines)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--max_len", "many"], ("max_len=many", "number")),
        (["--mix", "--seed", "2"], ("mix", "give one dataset")),
    ],
)
def test_a_value_of_wrong_type_and_an_unsupported_switch_are_refused(words: list[str], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(Schema, words)
    assert load_config(Schema, ["--mix", "false", "dataset_probs=null"]) == Schema()


def test_a_message_uses_the_option_names_of_the_user() -> None:
    text = "model.path=x and data.max_samples=3; set train.precision"
    assert CommandLine(Schema, ["seed=2"]).renamed(text) == text
    words = ["--actor.model_name_or_path", "x"]
    assert CommandLine(Schema, words).renamed(text) == "actor.model_name_or_path=x and max_samples=3; set param_dtype"


def test_an_inverted_switch_accepts_no_value() -> None:
    config = load_config(Schema, ["--no_shuffle", "--max_samples", "3"])
    assert (config.data.shuffle, config.data.max_samples) == (False, 3)
    assert load_config(Schema, ["--no_shuffle", "false"]).data.shuffle


def test_an_explicit_option_after_its_inputs_overrides_the_computed_value() -> None:
    later = load_config(Schema, ["--max_len", "300", "data.max_prompt_tokens=7"])
    earlier = load_config(Schema, ["data.max_prompt_tokens=7", "--max_len", "300"])
    assert (later.data.max_prompt_tokens, earlier.data.max_prompt_tokens) == (7, 300)
