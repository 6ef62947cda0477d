"""OpenRLHF's flags in recipes/openrlhf_ppo: every flag of its releases is known, with its original meaning."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import ROOT

from plugins.assumed_machines.machines import Machines, assuming
from plugins.openrlhf.adapter import train_ppo
from recipes.openrlhf_ppo.config import PPOConfig
from recipes.openrlhf_ppo.main import main, read_config
from tests.messages import says
from training.options.config import CommandLine
from training.options.described import options_of
from training.options.schema import ConfigError, fields_of, without_none

UPSTREAM = Path(__file__).parent / "upstream"
FLAGS: dict[str, list[Any]] = json.loads((UPSTREAM / "openrlhf_flags.json").read_text())
"""Flag of OpenRLHF 0.8.11 to 0.11.2 -> first release, last release, kind of value, and default."""

BASE = ["model.path=./x", "data.path=task:sort"]
"""Options that every run requires."""

KINDS = {bool: "switch", int: "int", float: "float", str: "text", tuple[float, float]: "pair", list[str]: "list"}

OTHER_DEFAULTS = {
    "attn_implementation": "flash attention where it can run",
    "enable_prefix_caching": "it changes speed, not tokens",
    "vllm_gpu_memory_utilization": "less where other roles share the GPU",
    "micro_train_batch_size": "as many as fit into train_max_tokens_per_gpu",
    "micro_rollout_batch_size": "as many as fit into rollout_max_tokens_per_gpu",
    "train_max_tokens_per_gpu": "as in the other recipes",
    "rollout_max_tokens_per_gpu": "as train_max_tokens_per_gpu",
    "entropy_loss_coef": "0 and none are the same",
    "freezing_actor_steps": "0 and -1 are the same",
    "init_kl_coef": "",
    "ckpt_path": "in the run folder",
    "save_path": "the checkpoints have the model",
    "wandb_project": "the project's name",
    "max_samples": "all, whatever their number",
    "max_ckpt_mem": "any, whatever their size",
    "eval_split": "of a task the prompts that are held out",
    "prompt_split": "",
    "bf16": "where there is a GPU",
    "param_dtype": "where there is a GPU",
    "max_new_tokens": "1024, and the prompt as many, where max_len is not given",
}
"""Defaults that differ from OpenRLHF's, with the reason."""


def known(name: str) -> Any:
    """Type of a flag's value here, or None for an unknown flag."""
    fields = fields_of(PPOConfig)
    kind = train_ppo().kind_of(name, fields)
    return without_none(fields.get(name) if kind is None else kind)


def test_every_flag_of_every_release_is_known() -> None:
    assert [name for name in FLAGS if known(name) is None] == []
    assert len(FLAGS) > 290


def test_every_flag_takes_as_many_values_as_in_openrlhf() -> None:
    words = {"switch": 0, "pair": 2, "list": 9}
    # One number up to 0.9.0, two since 0.9.1.
    either = {"vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"}
    for name, (_, _, kind, _) in FLAGS.items():
        arity = words.get(KINDS.get(known(name), "text"), 1)
        assert name in either or arity == words.get(kind, 1), name


def test_every_name_of_the_table_maps_to_exactly_one_target() -> None:
    program = train_ppo()
    parts = [set(program.options), set(program.computed), set(program.no_effect), set(program.refused)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    targets = {target.name for target in program.options.values()}
    assert targets - set(fields_of(PPOConfig)) == set()
    whys = {entry.why for part in (program.no_effect, program.refused) for entry in part.values()}
    assert [why for why in whys if len(why) < 10] == []


def test_defaults_equal_those_of_openrlhf_or_are_listed_as_different() -> None:
    ours = {option.name: option.default for option in options_of(PPOConfig)}
    renamed = train_ppo().options
    others = {}
    for name, (_, _, _, default) in FLAGS.items():
        if name not in renamed or "." in name:
            continue
        target = renamed[name]
        upstream_default = target.values.get(str(default).lower(), default)
        our_default = ours[target.name]
        if (list(our_default) if isinstance(our_default, tuple) else our_default or None) != (upstream_default or None):
            others[name] = (our_default, upstream_default)
    assert set(others) - set(OTHER_DEFAULTS) == set(), others


def test_flags_of_releases_up_to_0_8_are_accepted_or_rejected_with_a_reason() -> None:
    kl = ["--init_kl_coef", "0.1", "--use_kl_loss", "--use_kl_estimator_k3", "--disable_trace_cache"]
    assert read_config([*BASE, *kl, "run_dir=x"]).algorithm.kl_estimator == "k3"
    with pytest.raises(ConfigError, match=says("pretrain_data", "PTX")):
        read_config([*BASE, "--pretrain_data", "some/corpus", "--ptx_coef", "0.05", "run_dir=x"])


def test_flags_of_older_releases_that_change_no_results_are_accepted_with_a_note() -> None:
    notes = CommandLine(PPOConfig, [*BASE, "--torch_compile", "--pretrain_max_len", "512", "run_dir=x"]).notes
    assert re.search(says("torch_compile", "same results"), "\n".join(notes))
    assert re.search(says("pretrain_max_len", "pretrain_data"), "\n".join(notes))


def test_newer_names_give_the_same_configuration_as_older_ones() -> None:
    old = """--init_kl_coef 0.05 --reward_clip_range -1 1 --advantage_estimator rloo --colocate_all_models --seed 3
        --n_samples_per_prompt 4 --actor_num_nodes 2 --actor_num_gpus_per_node 4 --eps_clip_low_high 0.1 0.3
        --enable_vllm_is_correction --vllm_is_correction_type icepop --use_kl_loss --no_advantage_std_norm
        --enable_ema --target_modules q_proj v_proj --use_dynamic_batch --dynamic_filtering --max_len 512"""
    new = """--algo.kl.init_coef 0.05 --reward.clip_range -1 1 --algo.advantage.estimator rloo --train.colocate_all
        --train.seed 3 --rollout.n_samples_per_prompt 4 --actor.num_nodes 2 --actor.num_gpus_per_node 4
        --actor.eps_clip_low_high 0.1 0.3 --algo.advantage.is_correction_enable
        --algo.advantage.is_correction_type icepop --algo.kl.use_loss --algo.advantage.no_std_norm
        --train.enable_ema --ds.lora.target_modules q_proj v_proj --train.dynamic_batch_enable
        --algo.dynamic_filtering_enable --data.max_len 512"""
    configs = [read_config([*shlex.split(command), "run_dir=x"]) for command in (old, new)]
    assert configs[0] == configs[1]
    newer = configs[0]
    assert (newer.algorithm.correction, newer.algorithm.filter_range) == ("icepop", (0.0, 1.0))
    assert (newer.algorithm.clip_low, newer.algorithm.clip_high) == (0.1, 0.3)
    assert (newer.algorithm.kl_in_reward, newer.algorithm.std_norm) == (False, False)
    assert (newer.placement.actor_ranks, newer.placement.actor_nodes, newer.placement.colocate) == (8, 2, True)
    assert (newer.train.ema_beta, newer.train.lora_target_modules) == (0.992, "q_proj,v_proj")


@pytest.mark.parametrize(
    ("options", "prompt", "new", "both"),
    [
        # Up to 0.9.7 prompt and response have separate limits, and max_len has no effect on them.
        ("--prompt_max_len 300 --generate_max_len 200", 300, 200, None),
        ("--prompt_max_len 300 --generate_max_len 200 --max_len 999", 300, 200, None),
        # Since 0.9.8 their sum is limited. A response may use the space that its prompt leaves.
        ("--max_len 500", 499, 500, 500),
        ("--max_len 500 --max_new_tokens 200", 300, 200, None),
        ("--data.max_len 500 --rollout.max_new_tokens 200", 300, 200, None),
        # The same holds for an episode.
        ("--max_len 500 --max_new_tokens 200 --agent_func_path env:guess", 300, 200, 500),
        ("--prompt_max_len 300 --generate_max_len 200 --agent_func_path env:guess", 300, 200, 500),
        # The lowest of several limits of an episode applies.
        ("--prompt_max_len 48 --generate_max_len 24 --max_len 999 --agent_func_path env:guess", 48, 24, 72),
        ("--prompt_max_len 300 --generate_max_len 200 --max_len 72 --agent_func_path env:guess", 300, 200, 72),
        ("--max_len 72 --prompt_max_len 48 --agent_func_path env:guess", 48, 1024, 72),
    ],
)
def test_lengths_have_the_meaning_of_each_release(options: str, prompt: int, new: int, both: int | None) -> None:
    config = read_config([*BASE, *options.split()])
    lengths = (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.agent.max_tokens)
    assert lengths == (prompt, new, both)


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        # Precedence: the agent's environment, then the URL, then reward models.
        ("--agent_func_path env:guess --remote_rm_url r.py --reward_pretrain x", ("env:guess", None, None)),
        ("--remote_rm_url http://x/get --reward_pretrain x", (None, "http://x/get", None)),
        ("--reward_pretrain a,b", (None, None, "a,b")),
    ],
)
def test_the_precedence_of_reward_sources_is_that_of_openrlhf(
    options: str, spec: tuple[str | None, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(options.split())
    assert (config.agent.func_path, config.reward.source, config.reward_model.path) == spec


@pytest.mark.parametrize(
    ("options", "apart", "bounds"),
    [
        ("--vllm_is_truncated_threshold 3", "tis", (0.0, 3.0)),
        ("--vllm_is_truncated_threshold 0.5 3", "tis", (0.5, 3.0)),
        ("--use_icepop", "icepop", (0.5, 5.0)),
        ("--vllm_is_correction_type seq-mask-tis", "seq-mask-tis", (0.5, 5.0)),
        # 0.9.3 does not clamp the weights of masked importance sampling.
        ("--vllm_is_correction_type mis", "seq-mask", (0.5, 5.0)),
    ],
)
def test_the_correction_flags_have_the_meaning_of_each_release(
    options: str, apart: str, bounds: tuple[float, float]
) -> None:
    algorithm = read_config(["--enable_vllm_is_correction", *options.split()]).algorithm
    assert (algorithm.correction, algorithm.correction_range) == (apart, bounds)


@pytest.mark.parametrize(
    ("level", "mode", "name"),
    [("token", "clip", "tis"), ("token", "mask", "icepop"), ("seq", "mask", "seq-mask"), ("off", "mask", "none")],
)
def test_the_newest_release_sets_the_correction_by_level_and_mode(level: str, mode: str, name: str) -> None:
    flags = f"--algo.advantage.is_correction_level {level} --algo.advantage.is_correction_mode {mode}"
    config = read_config([*flags.split(), "--algo.advantage.is_correction_threshold", "3"])
    assert config.algorithm.correction == name
    assert config.algorithm.correction_range == (0.0, 3.0)
    assert read_config(["--algo.advantage.is_correction_level", "seq"]).algorithm.correction == "seq-mask"


def test_an_unsupported_correction_is_rejected_with_the_supported_ones(capsys: pytest.CaptureFixture[str]) -> None:
    level = "--algo.advantage.is_correction_level"
    assert main(["--dry_run", *BASE, level, "seq", "--algo.advantage.is_correction_mode", "clip"]) == 2
    assert re.search(says("is_correction_level=seq", "clip", "mask"), capsys.readouterr().err)
    assert main(["--dry_run", *BASE, level, "seq", "--algo.advantage.is_correction_gating", "binary_kl"]) == 2
    assert re.search(says("is_correction_gating", "dppo_kl"), capsys.readouterr().err)


def test_asynchronous_generation_gives_engines_separate_devices() -> None:
    placement = read_config(["--colocate_all_models", "--async_train", "--deepspeed_enable_sleep"]).placement
    assert (placement.colocate, placement.colocate_models, placement.learners_sleep) == (False, True, False)
    placement = read_config(["--colocate_all_models", "--vllm_enable_sleep", "--deepspeed_enable_sleep"]).placement
    assert (placement.colocate, placement.engines_sleep, placement.learners_sleep) == (True, True, True)
    assert not read_config(["--vllm_enable_sleep"]).placement.engines_sleep


def test_asynchronous_generation_excludes_the_hybrid_engine() -> None:
    for names in (
        "--colocate_all_models --async_train --vllm_enable_sleep",
        "--train.colocate_all --train.async_enable --vllm.enable_sleep",
    ):
        with pytest.raises(ConfigError, match=says("async", "enable_sleep", "hybrid engine")):
            read_config([*names.split()])


def test_canonical_and_openrlhf_names_can_be_mixed_in_a_command() -> None:
    config = read_config(["--rollout_batch_size", "32", "samples_per_prompt=4", "--train.batch_size=64"])
    assert (config.prompts_per_step, config.samples_per_prompt, config.train.mini_batch_size) == (32, 4, 64)


def test_all_faults_of_a_command_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--fp16 --load_in_4bit --pretrian x --actor.optim muon --max_len many --port 5000"
    assert main(["--dry_run", *shlex.split(wrong)]) == 2
    error = capsys.readouterr().err
    assert re.search(says("fp16", "load_in_4bit", "'pretrian'", "'model.path'", "actor.optim", "max_len=many"), error)
    assert re.search(says("port", "remote_rm_url"), error)


def test_the_page_from_openrlhf_matches_the_schema() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "migration_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_names_every_flag() -> None:
    page = (ROOT / "docs" / "from_openrlhf.md").read_text()
    named = set(re.findall(r"`([^`\n]+)`", page))
    assert [name for name in train_ppo().names() if name not in named] == []


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--advantage_estimator=rloo"], ["rloo", "n_samples_per_prompt=1"]),
        (["algorithm.estimator=rloo"], ["rloo", "samples_per_prompt=1"]),
        (["algorithm.estimator=dr_grpo"], ["dr_grpo", "samples_per_prompt=1"]),
        (
            ["--advantage_estimator=group_norm", "samples_per_prompt=2", "algorithm.gamma=0.9"],
            ["advantage_estimator=grpo", "gamma=0.9"],
        ),
        (["algorithm.estimator=group_norm"], ["'group_norm'", "grpo"]),
        (["reward_model.path=z", "reward.source=r.py"], ["reward_model.path=z", "reward.source=r.py"]),
        (["algorithm.reward_range=[1,-1]"], ["algorithm.reward_range", 1.0, -1.0]),
        (["algorithm.overlong_buffer=2000"], ["algorithm.overlong_buffer=2000", "rollout.max_new_tokens=1024"]),
        (["--overlong_buffer_len", "2000"], ["overlong_buffer_len=2000", "generate_max_len=1024"]),
        (["algorithm.truncated_factor=1.5"], ["algorithm.truncated_factor=1.5"]),
        (["agent.func_path=env:guess", "reward.heldout_source=sort"], ["reward.heldout_source", "agent"]),
        (["evaluation.path=z", "evaluation.temperature=0"], ["temperature=0", "samples_per_prompt"]),
        (["train.mini_batch_size=1", "placement.actor_ranks=2"], ["mini_batch_size=1", "2 actor ranks"]),
        (["placement.actor_ranks=3", "placement.actor_nodes=2"], ["actor_ranks=3", "actor_nodes=2"]),
        (["train.micro_batch_size=0"], ["micro_batch_size=0"]),
        (["algorithm.clip_low=2"], ["2.0", "clip"]),
        (["algorithm.kl_coef=-1"], ["kl_coef=-1.0"]),
        (["algorithm.dual_clip=1"], ["dual_clip=1.0"]),
        (["algorithm.kl_target=0.1", "algorithm.kl_coef=0"], ["kl_target=0.1", "kl_coef=0"]),
        (["algorithm.kl_target=-1"], ["kl_target=-1.0"]),
        (["algorithm.kl_target=0.1", "algorithm.kl_horizon=204"], ["kl_horizon", 204]),
        (["train.ema_beta=1"], ["ema_beta=1.0"]),
        (["critic.lr_scheduler=cyclic"], ["critic", "cyclic"]),
        (["algorithm.filter_range=[0,1]"], ["filter_range", "samples_per_prompt=1"]),
        (["algorithm.filter_range=[1,0]", "samples_per_prompt=2"], ["filter_range", 1.0, 0.0]),
        (["algorithm.correction_range=[5,0.5]"], ["correction_range", 5.0, 0.5]),
        (["algorithm.policy_loss=trpo"], ["trpo"]),
        (["reward.url_timeout_s=0"], ["timeout", 0]),
        (["reward.workers=0"], ["workers", 0]),
    ],
)
def test_contradictory_options_are_an_error(options: list[str], facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)) as caught:
        read_config([*BASE, *options])
    assert "\n" not in str(caught.value)


def test_several_reward_models_need_one_weight_each() -> None:
    models = [*BASE, "--reward_pretrain", "a,b"]
    assert read_config([*models, "reward_model.weights=[0.5,2]"]).reward_model.weights == [0.5, 2.0]
    with pytest.raises(ConfigError, match=says("reward_model.weights", 1, "2 reward models")):
        read_config([*models, "reward_model.weights=[0.5]"])


@pytest.mark.parametrize(
    ("gpus", "options", "devices"),
    [
        (8, ["init_kl_coef=0.1"], {"ACTOR": 2, "CRITIC": 2, "ROLLOUT": 2, "REFERENCE": 2}),
        (8, ["--colocate_all_models"], {"ACTOR": 8, "CRITIC": 8, "ROLLOUT": 8}),
        (8, ["--advantage_estimator", "rloo"], {"ACTOR": 4, "ROLLOUT": 4}),
        (8, ["--actor_num_gpus_per_node", "4"], {"ACTOR": 4, "CRITIC": 2, "ROLLOUT": 2}),
        (0, [], {"ACTOR": 1, "CRITIC": 1, "ROLLOUT": 1}),
    ],
)
def test_devices_without_a_setting_are_divided_evenly(
    gpus: int, options: list[str], devices: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.openrlhf_ppo.layout import resolved
    from recipes.openrlhf_ppo.main import build_job

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    config = resolved(read_config(options))
    assert config.train.precision == ("bf16" if gpus else "fp32")
    processes = build_job(config).placement.processes
    assert {role: count for role, count in processes.items() if role not in ("TRAINER", "REWARD")} == devices


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("--colocate_all_models --vllm_tensor_parallel_size 4", {"ACTOR": 8, "CRITIC": 8, "ROLLOUT": 2}),
        # Four of eight devices are left for actor and critic.
        ("--vllm_tensor_parallel_size 2 --vllm_num_engines 2", {"ACTOR": 2, "CRITIC": 2, "ROLLOUT": 2}),
        ("--vllm_tensor_parallel_size 2", {"ACTOR": 2, "CRITIC": 2, "ROLLOUT": 1}),
    ],
)
def test_the_number_of_engines_follows_from_their_devices(options: str, workers: dict[str, int]) -> None:
    from recipes.openrlhf_ppo.layout import resolved
    from recipes.openrlhf_ppo.main import build_job

    with assuming(Machines(devices=8)):
        processes = build_job(resolved(read_config(options.split()))).placement.processes
    assert {role: processes[role] for role in workers} == workers


def test_more_workers_than_cpu_cores_are_rejected_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--dry_run", "vllm_num_engines=5000"]) == 2
    assert re.search(says("vllm_num_engines=5000", "CPU cores"), capsys.readouterr().err)


def test_flash_attention_without_a_gpu_becomes_sdpa_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--dry_run", "--attn_implementation", "flash_attention_2"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["config"]["model"]["attn_implementation"] == "sdpa"
    assert re.search(says("attn_implementation=flash_attention_2", "GPU", "sdpa"), shown.err)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--kl_estimator", "k3"], ["kl_estimator", "init_kl_coef=0"]),
        (["--use_kl_loss"], ["use_kl_loss", "kl_coef=0"]),
        (["--normalize_reward", "reward.source=sort"], ["normalize_reward", "reward_model.path"]),
        (
            ["--advantage_estimator", "reinforce", "--critic_learning_rate", "1e-5"],
            ["critic_learning_rate", "reinforce"],
        ),
        (["--advantage_estimator", "reinforce", "--lambd", "0.9"], ["lambd", "reinforce"]),
        (["--colocate_actor_ref"], ["colocate_actor_ref", "kl_coef=0"]),
        (["--colocate_critic_reward"], ["colocate_critic_reward", "reward models"]),
        (["--colocate_all_models", "--colocate_actor_ref"], ["colocate_actor_ref", "colocate_all_models"]),
        (["--eps_clip", "0.1", "--eps_clip_low_high", "0.1", "0.2"], ["eps_clip", "eps_clip_low_high"]),
        (["--policy_loss_type", "sapo", "algorithm.clip_low=0.1"], ["clip_low", "sapo"]),
        (["--use_icepop"], ["use_icepop", "enable_vllm_is_correction"]),
        (["--kl_horizon", "9999"], ["kl_horizon", "kl_target"]),
        (["--ema_beta", "0.9"], ["ema_beta", "enable_ema"]),
        (["--dynamic_filtering_reward_range", "0", "0.5"], ["dynamic_filtering_reward_range", "dynamic_filtering is"]),
        (["--dynamic_filtering", "--async_train", "--partial_rollout"], ["partial_rollout", "dynamic_filtering"]),
        (["--use_dynamic_batch", "--micro_train_batch_size", "4"], ["micro_train_batch_size", "use_dynamic_batch"]),
        (["--init_kl_coef", "0.1", "--use_kl_loss"], ["kl_estimator=k1", "k2", "k3"]),
        (["--vllm_sync_backend", "nccl"], ["vllm_sync_backend", "weights"]),
        (["--vllm_enable_sleep"], ["vllm_enable_sleep", "devices"]),
        (
            ["--ring_attn_size", "2", "--actor_num_gpus_per_node", "2", "--critic_num_gpus_per_node", "2"],
            ["ring_attn_size=2", "Ulysses", "train.engine=fsdp"],
        ),
        (
            ["--ds.tensor_parallel_size", "2", "--actor_num_gpus_per_node", "2", "--critic_num_gpus_per_node", "2"],
            ["ds_tensor_parallel_size=2", "layer", "train.engine=fsdp"],
        ),
        (["--input_template", "Q:"], ["input_template", "{}"]),
        (["--input_template", "Q: {}", "--apply_chat_template"], ["input_template", "apply_chat_template"]),
        (["evaluation.path=null", "--eval_steps", "5"], ["eval_steps", "eval_dataset"]),
        (["--actor.muon.lr", "0.1"], ["actor.muon.lr", "adam"]),
    ],
)
def test_an_option_without_effect_is_reported_as_a_note(
    options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--print_config", *options]) == 0
    assert any(re.search(says(*facts), line) for line in capsys.readouterr().err.splitlines())


def test_an_unsupported_option_in_a_file_is_rejected_with_the_path_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("load_in_4bit: true\n")
    assert main(["--dry_run", f"config={tmp_path}/mine.yaml"]) == 2
    assert re.search(says(f"{tmp_path}/mine.yaml", "load_in_4bit"), capsys.readouterr().err)


def test_zero_vllm_engines_selects_transformers_for_generation() -> None:
    config = read_config(["--vllm_num_engines", "0", "--vllm_tensor_parallel_size", "2"])
    assert (config.rollout.engine, config.rollout.tensor_parallel, config.placement.rollout_engines) == ("hf", 1, None)
