"""OpenRLHF's command lines meet recipes/openrlhf_ppo: every flag works, or says why not and what to use."""

import itertools
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from recipe_runs import ROOT

from recipes.openrlhf_ppo import flags
from recipes.openrlhf_ppo.config import PPOConfig
from recipes.openrlhf_ppo.main import main, read_config
from tests.messages import says
from training.schema import ConfigError, options_of

GUIDE = {
    "train_rm": """--save_path ./checkpoint/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1
        --train_batch_size 256 --micro_train_batch_size 4 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16
        --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6
        --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
        --rejected_key rejected --attn_implementation flash_attention_2 --packing_samples --gradient_checkpointing
        --use_wandb {wandb_token}""",
    "train_ppo_ray": """--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8
        --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8
        --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.6
        --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture
        --save_path /openrlhf/examples/checkpoint/llama3-8b-rlhf --micro_train_batch_size 16 --train_batch_size 128
        --micro_rollout_batch_size 32 --rollout_batch_size 1024 --max_samples 100000 --max_epochs 1
        --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7
        --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data OpenRLHF/prompt-collection-v0.1
        --input_key context_messages --apply_chat_template --packing_samples --use_dynamic_batch --normalize_reward
        --adam_offload --attn_implementation flash_attention_2 --gradient_checkpointing --use_wandb {wandb_token}
        --vllm_sync_backend nccl --vllm_enable_sleep --deepspeed_enable_sleep""",
    "serve_rm": """--reward_pretrain OpenRLHF/Llama-3-8b-rm-700k --port 5000 --bf16
        --attn_implementation flash_attention_2 --normalize_reward --max_len 8192 --batch_size 16""",
    "with a reward server": """--pretrain OpenRLHF/Llama-3-8b-sft-mixture
        --remote_rm_url http://localhost:5000/get_reward --save_path /openrlhf/examples/checkpoint/llama3-8b-rlhf""",
    "with an agent, asynchronous": """--pretrain OpenRLHF/Llama-3-8b-sft-mixture
        --agent_func_path /path/to/agent_func.py --async_train --async_queue_size 2""",
    "options in the text": """--tokenizer_chat_template {{messages}} --value_head_prefix score --value_prefix_head score
        --n_samples_per_prompt 8 --dynamic_filtering --dynamic_filtering_reward_range 0 1
        --train_max_tokens_per_gpu 16192 --rollout_max_tokens_per_gpu 32768 --enable_vllm_is_correction
        --vllm_is_truncated_threshold 0.5 5.0 --use_icepop --advantage_estimator group_norm --label_key label""",
}
"""Every command of the published guides, and the options that their text names."""

WITH = {
    "ref_num_nodes": ["init_kl_coef=0.1"],
    "ref_num_gpus_per_node": ["init_kl_coef=0.1"],
    "pretrain": ["prompt_data=x.jsonl", "remote_rm_url=r.py"],
    "reward_pretrain": ["scorer=null"],
    "remote_rm_url": ["scorer=null"],
    "agent_func_path": ["scorer=null", "agent_max_tokens=2048"],
    "async_train": ["--enable_vllm_is_correction"],
    "async_queue_size": ["--async_train", "--enable_vllm_is_correction"],
    "normalize_reward": ["scorer=null", "reward_pretrain=x"],
    "adam_offload": ["zero_stage=2"],
    "dynamic_filtering_reward_range": ["--dynamic_filtering"],
    "vllm_is_truncated_threshold": ["--enable_vllm_is_correction"],
    "use_icepop": ["--enable_vllm_is_correction"],
}
"""What has to stand beside a flag, so that it is alone in what it asks for."""


def flags_of(command: str) -> list[list[str]]:
    """Each flag of a command with its values."""
    found: list[list[str]] = []
    for word in shlex.split(command):
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


GUIDE_FLAGS = {words[0]: words for command in GUIDE.values() for words in flags_of(command)}


NEED_VLLM = {"--vllm_tensor_parallel_size", "--vllm_gpu_memory_utilization"}
"""Installed, which the default tier does not ask for."""


def test_the_guides_hold_no_flag_that_is_missing_here() -> None:
    guide = ROOT.parent / "shared" / "reference" / "guides" / "openrlhf_agent_training.rst"
    if not guide.is_file():
        warnings.warn("the guides are not beside the repository: their commands, repeated here, are all", stacklevel=1)
        return
    text = guide.read_text()
    theirs = {"--num-gpus", "--node-ip-address", "--head", "--address", "--runtime-env-json", "--module"}
    assert set(re.findall(r"--[a-z][a-z_0-9-]+", text)) - theirs - set(GUIDE_FLAGS) == set()


@pytest.mark.parametrize(
    "flag", [pytest.param(flag, marks=pytest.mark.full) if flag in NEED_VLLM else flag for flag in GUIDE_FLAGS]
)
def test_each_flag_of_the_guides_works_or_says_what_to_use(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many devices as eight for one role and some for each of the others.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64))))
    name = flag.removeprefix("--")
    code = main(["--dry_run", *WITH.get(name, []), *GUIDE_FLAGS[flag]])
    error = capsys.readouterr().err
    if name in flags.REFUSED and name != "logging_steps":
        assert code == 2
        assert re.search(says(name, flags.REFUSED[name].why), error)
        assert error.count("\n") == 1
    elif name == "attn_implementation":
        assert (code, "flash_attn" in error) == (2, True)
    elif name in ("micro_train_batch_size", "micro_rollout_batch_size"):
        # The preset cuts by tokens.
        *_, note = error.splitlines()
        assert (code, error.count("no effect")) == (0, 1)
        assert re.search(says("no effect", name, "use_dynamic_batch"), note)
    else:
        assert (code, "GPU" in error, "no effect" in error) == (0, True, False)


def test_a_whole_command_of_the_guides_names_all_that_is_missing_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"{GUIDE['train_ppo_ray']} {GUIDE['with an agent, asynchronous']}"
    assert main(["--dry_run", *shlex.split(command)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    # Some refused names are no more than words.
    named = {name for name in flags.REFUSED if "_" in name and re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", error)}
    assert named == {"vllm_sync_backend"}


def test_the_command_of_the_guide_runs_without_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8))))
    # Engines of two devices do not share them yet.
    missing = {*flags.REFUSED, "attn_implementation", "vllm_num_engines", "vllm_tensor_parallel_size"}
    kept = [words for words in flags_of(GUIDE["train_ppo_ray"]) if words[0].removeprefix("--") not in missing]
    assert main(["--dry_run", *itertools.chain.from_iterable(kept)]) == 0, capsys.readouterr().err
    plan = capsys.readouterr().out
    assert '"ROLLOUT": 8' in plan
    assert "wandb_token" not in plan


OPENRLHF = {
    "max_ckpt_num": 3,
    "max_ckpt_mem": None,
    "use_tensorboard": None,
    **{f"{role}_num_nodes": 1 for role in ("actor", "critic", "ref", "reward")},
    "colocate_actor_ref": False,
    "colocate_critic_reward": False,
    "colocate_all_models": False,
    "rollout_batch_size": 1024,
    "micro_rollout_batch_size": 1,
    "n_samples_per_prompt": 1,
    "temperature": 1.0,
    "train_batch_size": 128,
    "micro_train_batch_size": 1,
    "max_epochs": 1,
    "num_episodes": 1,
    "seed": 42,
    "use_dynamic_batch": False,
    "train_max_tokens_per_gpu": 16192,
    "rollout_max_tokens_per_gpu": None,
    "advantage_estimator": "gae",
    "lambd": 1.0,
    "gamma": 1.0,
    "no_advantage_std_norm": False,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "use_kl_loss": False,
    "eps_clip": 0.2,
    "eps_clip_low_high": None,
    "entropy_loss_coef": None,
    "value_clip": 0.5,
    "dual_clip": None,
    "policy_loss_type": "ppo",
    "kl_target": None,
    "kl_horizon": 10000,
    "enable_vllm_is_correction": False,
    "vllm_is_truncated_threshold": (0.5, 5.0),
    "use_icepop": False,
    "dynamic_filtering": False,
    "dynamic_filtering_reward_range": (0.0, 1.0),
    "enable_ema": False,
    "ema_beta": 0.992,
    "freezing_actor_steps": -1,
    "save_value_network": False,
    **dict.fromkeys(("reward_pretrain", "remote_rm_url", "agent_func_path", "vllm_generate_batch_size")),
    **dict.fromkeys(("async_train", "partial_rollout"), False) | {"async_queue_size": 1},
    "normalize_reward": False,
    "reward_clip_range": (-10.0, 10.0),
    "overlong_buffer_len": None,
    "overlong_penalty_factor": 1.0,
    "stop_properly_penalty_coef": None,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "adam_betas": (0.9, 0.95),
    "adam_eps": 1e-8,
    "l2": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "max_norm": 1.0,
    "zero_stage": 2,
    "adam_offload": False,
    "overlap_comm": False,
    "gradient_checkpointing": False,
    **dict.fromkeys(("packing_samples", "deepspeed_enable_sleep", "vllm_enable_sleep"), False),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout"), 0) | {"lora_alpha": 16.0},
    "target_modules": ["all-linear"],
    "top_p": 1.0,
    "vllm_tensor_parallel_size": 1,
    **dict.fromkeys(("enforce_eager", "enable_prefix_caching"), False),
    "value_head_prefix": "score",
    "prompt_data_probs": None,
    "prompt_split": "train",
    "input_key": "input",
    "label_key": None,
    "input_template": None,
    "apply_chat_template": False,
    "tokenizer_chat_template": None,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "eval_dataset": None,
    "eval_steps": -1,
    "eval_temperature": 0.6,
    "eval_n_samples_per_prompt": 4,
    "best_eval_metric_key": "",
    "critic_pretrain": None,
    **dict.fromkeys(("use_wandb", "wandb_org", "wandb_group")),
}
"""OpenRLHF's defaults, for what is the same here."""


def test_the_defaults_are_those_of_openrlhf_or_named_as_others() -> None:
    ours = {option.name: option.default for option in options_of(PPOConfig)}
    assert {name: ours[name] for name in OPENRLHF} == OPENRLHF
    # pretrain and prompt_data must be given in either system.
    assert set(ours) == {*OPENRLHF, *flags.OURS, *flags.OTHER_DEFAULTS, "pretrain", "prompt_data"}


OTHER_FLAGS = """
    vllm_sync_with_ray enable_prefix_caching enforce_eager partial_rollout vllm_generate_batch_size top_p
    full_determinism enable_ema ema_beta vllm_is_correction_type kl_target kl_horizon policy_loss_type dual_clip
    aux_loss_coef optim param_dtype zpg ds_tensor_parallel_size ring_attn_size ring_head_stride use_liger_kernel
    grad_accum_dtype deepcompile use_ds_universal_ckpt load_in_4bit lora_rank lora_alpha lora_dropout
    target_modules local_rank disable_fast_tokenizer dataloader_num_workers image_key max_images_per_prompt
    ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_num max_ckpt_mem load_checkpoint use_tensorboard use_ms
    ptx_coef perf actor_init_on_gpu flash_attn gradient_checkpointing_use_reentrant ref_reward_offload
    experts_implementation freeze_visual_encoder actor.num_nodes ref.num_gpus_per_node train.colocate_all
    vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching
    vllm.enforce_eager vllm.enable_sleep vllm.gpu_memory_utilization rollout.batch_size
    rollout.vllm_generate_batch_size rollout.micro_batch_size rollout.n_samples_per_prompt
    rollout.max_new_tokens rollout.temperature rollout.top_p rollout.max_tokens_per_gpu train.batch_size
    train.micro_batch_size train.max_epochs train.num_episodes train.dynamic_batch_enable
    train.max_tokens_per_gpu train.seed train.full_determinism_enable train.enable_ema train.ema_beta
    train.async_enable train.async_queue_size train.partial_rollout_enable train.agent_func_path
    algo.advantage.estimator algo.advantage.lambd algo.advantage.gamma algo.advantage.no_std_norm
    algo.advantage.is_correction_enable algo.advantage.is_correction_threshold algo.advantage.is_correction_type
    algo.kl.init_coef algo.kl.target algo.kl.horizon algo.kl.estimator algo.kl.use_loss
    algo.dynamic_filtering_enable algo.dynamic_filtering_range actor.eps_clip actor.eps_clip_low_high
    actor.dual_clip actor.policy_loss_type actor.entropy_coef actor.aux_loss_coef actor.freeze_visual_encoder
    actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant critic.value_clip
    critic.freezing_steps critic.save_value_network ds.value_head_prefix reward.model_name_or_path
    reward.remote_url reward.normalize_enable reward.clip_range reward.overlong_buffer_len
    reward.overlong_penalty_factor reward.stop_properly_penalty_coef reward.offload ref.offload
    actor.model_name_or_path critic.model_name_or_path actor.optim critic.adam.lr actor.adam.betas
    critic.adam.eps actor.adam.weight_decay actor.muon.lr critic.muon.momentum actor.muon.ns_steps
    actor.muon.nesterov critic.muon.no_nesterov actor.lr_scheduler critic.lr_warmup_ratio actor.min_lr_ratio
    critic.max_norm ds.zero_stage ds.param_dtype ds.zpg ds.adam_offload ds.enable_sleep ds.tensor_parallel_size
    ds.ring_attn_size ds.ring_attn_head_stride ds.packing_samples ds.attn_implementation
    ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm ds.deepcompile
    ds.use_universal_ckpt ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.dropout ds.lora.target_modules
    data.prompt_dataset data.prompt_probs data.prompt_split data.input_key data.label_key data.input_template
    data.apply_chat_template data.max_len data.max_samples data.disable_fast_tokenizer
    data.dataloader_num_workers data.image_key data.max_images_per_prompt eval.dataset eval.split eval.steps
    eval.temperature eval.n_samples_per_prompt ckpt.output_dir ckpt.path ckpt.save_steps ckpt.save_hf
    ckpt.disable_ds ckpt.max_num ckpt.max_mem ckpt.load_enable ckpt.best_metric_key logger.logging_steps
    logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
    logger.tensorboard_dir
"""
"""OpenRLHF's remaining flags, old and new."""


def test_every_flag_of_openrlhf_is_taken_or_refused_with_a_reason() -> None:
    known = {option.name for option in options_of(PPOConfig)} | set(flags.ALIASES) | set(flags.REFUSED)
    assert [name for name in OTHER_FLAGS.split() if name not in known] == []
    assert [name for name, refused in flags.REFUSED.items() if len(refused.why) < 10] == []


def test_no_name_has_two_meanings_and_every_other_name_leads_to_an_option() -> None:
    options = {option.name for option in options_of(PPOConfig)}
    assert options & set(flags.REFUSED) == set()
    assert set(flags.ALIASES) & (options | set(flags.REFUSED)) == set()
    assert set(flags.ALIASES.values()) - options == set()
    assert set(flags.OURS) | set(flags.OTHER_DEFAULTS) <= options


def test_newer_names_give_the_configuration_of_the_older_ones() -> None:
    old = "--init_kl_coef 0.05 --reward_clip_range -1 1 --advantage_estimator rloo --colocate_all_models"
    new = "--algo.kl.init_coef 0.05 --reward.clip_range -1 1 --algo.advantage.estimator rloo --train.colocate_all"
    common = ["run_dir=x"]
    assert read_config([*shlex.split(new), *common]) == read_config([*shlex.split(old), *common])


def test_the_page_from_openrlhf_is_what_the_schema_says() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "migration_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_names_every_flag_once() -> None:
    page = (ROOT / "docs" / "from_openrlhf.md").read_text()
    named = re.findall(r"`([^`]+)`", "".join(cells for cells in re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE)))
    options = [option.name for option in options_of(PPOConfig)]
    assert sorted(named) == sorted([*options, *flags.REFUSED])


BASE = ["pretrain=./x", "prompt_data=y.jsonl", "remote_rm_url=r.py"]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["advantage_estimator=rloo"], ["rloo", "n_samples_per_prompt=1"]),
        (["advantage_estimator=dr_grpo"], ["dr_grpo", "n_samples_per_prompt=1"]),
        (["advantage_estimator=group_norm", "n_samples_per_prompt=2", "gamma=0.9"], ["group_norm", "gamma=0.9"]),
        (["advantage_estimator=reinforce", "critic_pretrain=z"], ["reinforce", "critic_pretrain=z"]),
        (["advantage_estimator=reinforce", "lambd=0.9", "value_clip=1"], ["reinforce", "lambd=0.9", "value_clip=1.0"]),
        (["advantage_estimator=grpo"], ["'grpo'", "group_norm"]),
        (["use_kl_loss=true", "init_kl_coef=0"], ["use_kl_loss=true", "init_kl_coef=0"]),
        (["colocate_actor_ref=true", "init_kl_coef=0"], ["colocate_actor_ref", "init_kl_coef"]),
        (["colocate_critic_reward=true"], ["colocate_critic_reward", "reward_pretrain"]),
        (["reward_pretrain=z"], ["reward_pretrain=z", "remote_rm_url=r.py", "scorer", "agent_func_path"]),
        (["normalize_reward=true"], ["normalize_reward", "reward_pretrain"]),
        (["reward_clip_range=[1,-1]"], ["reward_clip_range", 1.0, -1.0]),
        (["overlong_buffer_len=2000"], ["overlong_buffer_len=2000", "generate_max_len=1024"]),
        (["stop_properly_penalty_coef=1.5"], ["stop_properly_penalty_coef=1.5"]),
        (["eval_steps=5"], ["eval_steps", "eval_dataset"]),
        (["eval_scorer=sort"], ["eval_scorer", "eval_dataset"]),
        (
            ["agent_func_path=a.py", "remote_rm_url=null", "eval_dataset=z", "eval_scorer=sort"],
            ["eval_scorer=sort", "agent"],
        ),
        (["eval_dataset=z", "eval_temperature=0"], ["eval_temperature=0", "eval_n_samples_per_prompt"]),
        (["apply_chat_template=true", "input_template=Q {}"], ["apply_chat_template", "input_template"]),
        (["input_template=Q"], ["input_template", "'Q'"]),
        (["train_batch_size=1", "actor_num_gpus_per_node=2"], ["train_batch_size=1", "2 actor ranks"]),
        (["micro_train_batch_size=0"], ["micro_train_batch_size=0"]),
        (["eps_clip_low_high=[2,0.2]"], ["2.0", "clip"]),
        (["init_kl_coef=-1"], ["init_kl_coef=-1.0"]),
        (["dual_clip=1"], ["dual_clip=1.0", "policy_loss_type=ppo"]),
        (["dual_clip=3", "policy_loss_type=gspo"], ["dual_clip=3.0", "policy_loss_type=ppo"]),
        (["kl_target=0.1", "init_kl_coef=0"], ["kl_target=0.1", "init_kl_coef=0"]),
        (["kl_target=-1"], ["kl_target=-1.0", "kl_horizon"]),
        (["kl_target=0.1", "kl_horizon=204"], ["kl_horizon", 204]),
        (["enable_ema=true", "ema_beta=1"], ["ema_beta=1.0"]),
        (["dynamic_filtering=true"], ["dynamic_filtering", "n_samples_per_prompt=1"]),
        (
            ["dynamic_filtering=true", "n_samples_per_prompt=2", "dynamic_filtering_reward_range=[1,0]"],
            ["dynamic_filtering_reward_range", 1.0, 0.0],
        ),
        (["vllm_is_truncated_threshold=[5,0.5]"], ["vllm_is_truncated_threshold", 5.0, 0.5]),
        (["use_icepop=true", "vllm_is_correction_type=tis"], ["use_icepop", "vllm_is_correction_type=tis"]),
        (["policy_loss_type=trpo"], ["trpo"]),
        (["remote_rm_timeout=0"], ["timeout", 0]),
        (["reward_workers=0"], ["workers", 0]),
    ],
)
def test_options_that_contradict_each_other_are_an_error(options: list[str], facts: list[object]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)) as caught:
        read_config([*BASE, *options])
    assert "\n" not in str(caught.value)


def test_several_reward_models_need_a_weight_each() -> None:
    models = ["pretrain=./x", "prompt_data=y.jsonl", "--reward_pretrain", "a,b"]
    assert read_config([*models, "--reward_weights", "0.5", "2"]).reward_weights == [0.5, 2.0]
    with pytest.raises(ConfigError, match=says("reward_weights", 1, "2 reward models")):
        read_config([*models, "--reward_weights", "0.5"])


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
def test_devices_that_nobody_counted_are_shared_out_evenly(
    gpus: int, options: list[str], devices: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.openrlhf_ppo.layout import resolved
    from recipes.openrlhf_ppo.main import build_job

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    config = resolved(read_config(options))
    assert config.bf16 == (gpus > 0)
    processes = build_job(config).placement.processes
    assert {role: count for role, count in processes.items() if role not in ("TRAINER", "REWARD")} == devices


def test_more_workers_than_a_machine_without_gpus_has_cores_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--dry_run", "actor_num_gpus_per_node=5000", "train_batch_size=512"]) == 2
    # 512 responses for 5,000 ranks is said first.
    assert "5000 actor ranks" in capsys.readouterr().err
    assert main(["--dry_run", "vllm_num_engines=5000"]) == 2
    assert re.search(says("vllm_num_engines=5000", "CPU cores"), capsys.readouterr().err)


def test_flash_attention_on_a_machine_without_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--dry_run", "--attn_implementation", "flash_attention_2"]) == 2
    assert re.search(says("attn_implementation", "flash_attention_2", "GPU"), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--kl_estimator", "k3"], ["kl_estimator", "init_kl_coef=0"]),
        (["--reward_workers", "2", "scorer=null", "reward_pretrain=x"], ["reward_workers", "reward code"]),
        (["--remote_rm_timeout", "5"], ["remote_rm_timeout", "server"]),
        (["--eps_clip", "0.1", "--eps_clip_low_high", "0.1", "0.2"], ["eps_clip", "eps_clip_low_high"]),
        (["--policy_loss_type", "sapo", "--eps_clip", "0.1"], ["eps_clip", "sapo"]),
        (["--use_icepop"], ["use_icepop", "enable_vllm_is_correction"]),
        (
            ["--policy_loss_type", "gspo", "--enable_vllm_is_correction", "--vllm_is_correction_type", "tis"],
            ["vllm_is_correction_type", "gspo"],
        ),
        (["--kl_horizon", "99"], ["kl_horizon", "kl_target"]),
        (["--ema_beta", "0.9"], ["ema_beta", "enable_ema"]),
        (["--dynamic_filtering_reward_range", "0", "0.5"], ["dynamic_filtering_reward_range", "dynamic_filtering is"]),
        (
            ["--use_dynamic_batch", "false", "--train_max_tokens_per_gpu", "99"],
            ["train_max_tokens_per_gpu", "use_dynamic_batch"],
        ),
        (["--init_kl_coef", "0.1", "--use_kl_loss"], ["kl_estimator=k1", "use_kl_loss", "k2", "k3"]),
    ],
)
def test_an_option_that_has_no_effect_beside_the_others_is_named(
    options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry_run", *options]) == 0
    assert any(re.search(says(*facts), line) for line in capsys.readouterr().err.splitlines())


def test_a_refused_option_in_a_file_is_refused_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("vllm_sync_backend: nccl\n")
    assert main(["--dry_run", f"config={tmp_path}/mine.yaml"]) == 2
    assert re.search(says(f"{tmp_path}/mine.yaml", "vllm_sync_backend"), capsys.readouterr().err)
