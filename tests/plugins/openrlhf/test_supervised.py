"""OpenRLHF's flags of train_sft, train_rm and train_dpo that do more than rename an option."""

import re
from typing import Any

import pytest

from recipes.dpo.config import DPOConfig
from recipes.reward_model.config import RewardModelConfig
from recipes.reward_model.serve import ServeConfig
from recipes.sft.config import SFTConfig
from tests.messages import says
from training.options.config import CommandLine, load_config
from training.options.schema import ConfigError

BASE = ["--pretrain", "m", "--dataset", "d", "run_dir=x"]


def sft(*words: str) -> SFTConfig:
    return load_config(SFTConfig, [*BASE, *words])


def test_columns_of_train_sft_come_with_its_template_and_its_last_turn() -> None:
    data = sft("--input_key", "q", "--output_key", "a").data
    assert (data.prompt_key, data.response_key, data.multiturn) == ("q", "a", False)
    assert data.input_template == "User: {}\nAssistant: "
    assert sft("--output_key", "a").data.prompt_key == "input"
    notes = CommandLine(SFTConfig, [*BASE, "--data.input_key", "q", "--data.output_key", "a"]).notes
    assert re.search(says("data.input_template", "User: {}"), notes[0])


@pytest.mark.parametrize(
    ("words", "template", "multiturn"),
    [
        (["--apply_chat_template"], None, False),
        (["--data.apply_chat_template", "--data.multiturn"], None, True),
        (["--input_template", "Q: {}"], "Q: {}", False),
        (["data.multiturn=true"], "User: {}\nAssistant: ", True),
        (["--pretrain_mode"], None, False),
    ],
)
def test_explicit_options_of_the_command_are_kept(words: list[str], template: str | None, multiturn: bool) -> None:
    data = sft("--input_key", "q", *words).data
    assert (data.input_template, data.multiturn) == (template, multiturn)
    assert data.plain_text == ("--pretrain_mode" in words)


def test_without_columns_of_train_sft_its_template_is_not_applied() -> None:
    data = sft().data
    assert (data.prompt_key, data.response_key, data.input_template, data.multiturn) == (None, None, None, True)


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, RewardModelConfig])
def test_train_split_of_releases_up_to_0_6_names_the_split(config: type[Any]) -> None:
    assert load_config(config, [*BASE, "--train_split", "train_prefs"]).data.split == "train_prefs"
    command = CommandLine(config, [*BASE, "--dataset_split", "train", "--train_split", "train_prefs"])
    assert command.config().data.split == "train"
    assert re.search(says("no effect of train_split", "dataset_split"), "\n".join(command.notes))


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, RewardModelConfig])
def test_flags_of_older_releases_that_change_no_results_have_a_note(config: type[Any]) -> None:
    notes = "\n".join(CommandLine(config, [*BASE, "--torch_compile", "--disable_trace_cache"]).notes)
    assert re.search(says("torch_compile", "same results"), notes)
    assert re.search(says("disable_trace_cache", "prefetching"), notes)


def test_flash_attn_of_serve_rm_up_to_0_8_sets_the_attention_kernels() -> None:
    config = load_config(ServeConfig, ["--reward_pretrain", "m", "--flash_attn"])
    assert config.model.attn_implementation == "flash_attention_2"


def test_a_template_without_a_prompt_placeholder_is_ignored_as_in_openrlhf() -> None:
    words = [*BASE, "--input_template", "Q:"]
    assert load_config(SFTConfig, words).data.input_template is None
    assert re.search(says("input_template='Q:'", "{}"), CommandLine(SFTConfig, words).notes[0])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("cosine_with_min_lr", ("cosine_with_min_lr", 0.03, 0.1)),
        ("cosine", ("cosine_with_min_lr", 0.03, 0.0)),
        ("linear", ("linear", 0.03, 0.0)),
        ("constant", ("constant", 0.0, 0.1)),
        ("constant_with_warmup", ("constant", 0.03, 0.1)),
    ],
)
def test_schedule_names_have_the_meaning_of_transformers(name: str, schedule: tuple[str, float, float]) -> None:
    train = sft("--lr_scheduler", name).train
    assert (train.lr_scheduler, train.lr_warmup_ratio, train.min_lr_ratio) == schedule


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--use_wandb", "true"], (True, None, False, None)),
        (["--use_wandb", "True"], (True, None, False, None)),
        (["--logger.wandb.key", "secret"], (False, "secret", False, None)),
        (["--use_tensorboard", "logs"], (False, None, False, "logs")),
        (["--logger.tensorboard_dir", "true"], (False, None, True, None)),
    ],
)
def test_a_boolean_flag_accepts_a_key_or_a_folder(words: list[str], expected: tuple[Any, ...]) -> None:
    log = sft(*words).log
    assert (log.wandb, log.wandb_key, log.tensorboard, log.tensorboard_dir) == expected


def test_switches_and_lists_are_parsed_as_in_openrlhf() -> None:
    words = "--bf16 --flash_attn --ds.lora.target_modules q_proj v_proj --aux_loss_coef 0.001 --max_ckpt_mem 1000"
    config = load_config(DPOConfig, [*BASE, *words.split()])
    assert (config.train.precision, config.model.attn_implementation) == ("bf16", "flash_attention_2")
    assert (config.train.lora_target_modules, config.train.router_aux_loss_coef) == ("q_proj,v_proj", 0.001)
    assert config.checkpoint.max_gb == 1000


def test_options_that_only_change_speed_give_a_note_and_options_without_effect_give_none() -> None:
    words = (
        "--ring_attn_size 2 --use_liger_kernel --zpg 1 --load_checkpoint --save_hf_ckpt --logging_steps 5 --loss logexp"
    )
    notes = CommandLine(RewardModelConfig, [*BASE, *words.split()]).notes
    facts = [["ring_attn_size"], ["use_liger_kernel"], ["logging_steps"], ["loss", "sigmoid", "logexp"]]
    assert [sum(bool(re.search(says(*fact), note)) for note in notes) for fact in facts] == [1, 1, 1, 1]
    assert len(notes) == 4


def test_all_faults_are_reported_together_in_the_names_of_the_command() -> None:
    words = "--optim muon --muon.lr 0.02 --ds.param_dtype fp16 --ds.load_in_4bit --use_ms --lr_scheduler polynomial"
    with pytest.raises(ConfigError) as error:
        sft(*words.split(), "--train_batch_size", "0")
    facts = ["optim", "ds.param_dtype=fp16", "bf16", "load_in_4bit", "use_ms", "lr_scheduler=polynomial", "linear"]
    assert re.search(says(*facts, "train_batch_size=0"), str(error.value))


def test_serve_rm_accepts_its_own_flag_names() -> None:
    words = "--reward_pretrain m --bf16 --max_len 9 --batch_size 3 --value_head_prefix v --packing_samples --port 7"
    config = load_config(ServeConfig, words.split())
    assert (config.model.path, config.precision, config.max_text_tokens, config.batch_size) == ("m", "bf16", 9, 3)
    assert (config.model.value_head_prefix, config.port, config.normalize) == ("v", 7, False)
    assert re.search(says("packing_samples"), CommandLine(ServeConfig, words.split()).notes[0])
