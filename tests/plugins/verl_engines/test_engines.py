"""verl's engines of training and generation: what is used in their place, and what is refused."""

import re
from collections.abc import Iterator

import pytest

from components.installed import is_elsewhere
from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from tests.messages import says
from training.options.config import CommandLine
from training.options.schema import ConfigError

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
SMALL = [
    *("data.train_files=rows.jsonl", "actor_rollout_ref.model.path=policy", "data.train_batch_size=64"),
    *("algorithm.adv_estimator=grpo", f"{R}.n=2"),
]


@pytest.fixture(autouse=True)
def vllm_is_elsewhere() -> Iterator[None]:
    """Let engines be chosen whose packages are not installed here."""
    token = is_elsewhere.set(True)
    yield
    is_elsewhere.reset(token)


def read(*arguments: str) -> CommandLine[VerlPPOConfig]:
    return CommandLine(VerlPPOConfig, plain_arguments([*SMALL, *arguments]))


@pytest.mark.parametrize(
    ("name", "engine"), [("sglang", "vllm"), ("sglang_async", "vllm"), ("trtllm", "vllm"), ("naive", "hf")]
)
def test_another_generation_engine_is_replaced_with_a_note(name: str, engine: str) -> None:
    line = read(f"{R}.name={name}", f"{R}.tensor_model_parallel_size=2")
    rollout = line.config().rollout
    assert (rollout.engine, rollout.tensor_parallel) == (engine, 2 if engine == "vllm" else 1)
    assert any(re.search(says(f"{R}.name={name}", f"{engine} generates", "same policy"), note) for note in line.notes)


@pytest.mark.parametrize(("name", "notes"), [("vllm", 0), ("hf", 0)])
def test_an_engine_that_is_here_is_used_without_a_note(name: str, notes: int) -> None:
    line = read(f"{R}.name={name}")
    assert line.config().rollout.engine == name
    assert sum("generates" in note for note in line.notes) == notes


def test_a_generation_engine_that_nobody_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=says(f"{R}.name=tgi", "vllm")):
        read(f"{R}.name=tgi").config()


def test_the_engine_of_a_configuration_file_of_verl_is_replaced_unless_a_key_names_another() -> None:
    words = ["--config-name=gsm8k_multiturn_grpo", f"{R}.multi_turn.enable=false"]
    assert read(*words).config().rollout.engine == "vllm"
    assert read(*words, f"{R}.name=hf").config().rollout.engine == "hf"


def test_arguments_of_another_engine_have_a_note_or_are_refused() -> None:
    group = f"+{R}.engine_kwargs.sglang"
    line = read(f"{R}.name=sglang", f"{group}.attention_backend=triton", f"{group}.page_size=64")
    notes = "\n".join(note for note in line.notes if "no effect" in note)
    assert f"{group[1:]}.attention_backend" in notes and f"{group[1:]}.page_size" in notes
    with pytest.raises(ConfigError, match=says(f"{group[1:]}.quantization", "quantisation")):
        read(f"{R}.name=sglang", f"{group}.quantization=awq").config()
    # SGLang's name of the limit on a prompt and its response together.
    assert read(f"{R}.name=sglang", f"{group}.context_length=600").config().agent.max_tokens == 600
    # The limits of engines of other models are not the policy's.
    for other in ("reward_model.rollout", "distillation.teacher_models.teacher_model.inference"):
        line = read(key := f"+{other}.engine_kwargs.vllm.max_model_len=600")
        assert line.config().agent.max_tokens is None
        assert any("no effect" in note and key[1:].partition("=")[0] in note for note in line.notes)


@pytest.mark.parametrize(
    ("group", "keys", "axes"),
    [
        ("veomni", ["ulysses_parallel_size=2", "expert_parallel_size=4"], (2, 4, 1)),
        ("torchtitan", ["context_parallel_size=2", "tensor_parallel_size=4"], (2, 1, 4)),
        ("automodel", ["cp_size=2", "tp_size=4"], (2, 1, 4)),
        ("automodel_config", ["cp_size=4", "tp_size=2", "ep_size=1", "pp_size=1"], (4, 1, 2)),
    ],
)
def test_other_training_engines_become_fully_shard_with_the_same_axes(
    group: str, keys: list[str], axes: tuple[int, int, int]
) -> None:
    engine = group.removesuffix("_config")
    for chosen in ([f"model_engine={engine}"], [f"{A}.strategy={engine}", f"critic.strategy={engine}"]):
        line = read(*chosen, *(f"{A}.{group}.{key}" for key in keys), f"{A}.{group}.param_offload=true")
        config = line.config()
        assert (config.parallel.context, config.parallel.expert, config.parallel.tensor) == axes
        assert (config.train.engine, config.train.adam_offload) == ("fsdp", True)
        assert any(re.search(says(f"{engine} is torch's fully_shard"), note) for note in line.notes)


def test_the_other_keys_of_a_training_engine_have_a_note_or_are_refused() -> None:
    group = f"{A}.veomni"
    line = read(
        "model_engine=veomni", f"{group}.init_device=meta", f"{group}.fsdp_size=4", f"{group}.moe_implementation=eager"
    )
    notes = "\n".join(line.notes)
    assert all(f"{group}.{key}" in notes for key in ("init_device", "fsdp_size", "moe_implementation"))
    with pytest.raises(ConfigError, match=says(f"{A}.automodel.enable_fp8", "fp8")):
        read("model_engine=automodel", f"{A}.automodel.enable_fp8=true").config()
    for key in (f"{group}.dtype=float16", f"{A}.automodel.model_dtype=fp16", f"{A}.megatron.dtype=float16"):
        with pytest.raises(ConfigError, match=says(key.partition("=")[0], "loss scale", "bfloat16")):
            read(key).config()


def test_actor_and_critic_have_one_kind_of_engine() -> None:
    with pytest.raises(ConfigError, match=says("veomni", "fsdp2", "differ")):
        read(f"{A}.strategy=veomni", "critic.strategy=fsdp2").config()
    read(f"{A}.strategy=fsdp", "critic.strategy=fsdp2").config()


@pytest.mark.parametrize(
    ("engine", "name", "is_known"),
    [
        ("megatron", "adam", True),
        ("veomni", "adamw", True),
        ("fsdp", "AdamW", True),
        ("fsdp", "adam", False),
        ("veomni", "muon", False),
    ],
)
def test_the_optimizer_is_adamw_under_the_name_of_its_engine(engine: str, name: str, is_known: bool) -> None:
    line = [f"model_engine={engine}", f"{A}.optim.optimizer={name}"]
    if is_known:
        read(*line).config()
        return
    with pytest.raises(ConfigError, match=says(f"{A}.optim.optimizer={name}", "AdamW")):
        read(*line).config()


def test_the_final_learning_rate_of_veomni_is_a_share_of_the_peak() -> None:
    optim = f"{A}.optim"
    train = read(f"{optim}.lr=1e-5", f"{optim}.lr_min=1e-6", f"{optim}.lr_scheduler_type=cosine").config().train
    assert (train.lr_scheduler, train.min_lr_ratio) == ("cosine_with_min_lr", pytest.approx(0.1))
    with pytest.raises(ConfigError, match=says(f"{optim}.lr_start", "learning rate of 0")):
        read(f"{optim}.lr_start=1e-7").config()
