"""Translation of OpenRLHF's flags that need more than another name; openrlhf.yaml has all others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.options.table_adapter import Computed, TableAdapter, as_value

TABLE = Path(__file__).parent / "openrlhf.yaml"

INPUT_TEMPLATE = "User: {}\nAssistant: "
"""Default template of prompts in train_sft."""
EMA_BETA = 0.992
"""OpenRLHF's default decay of the weight average, if it is switched on without a value."""
FILTER_RANGE = [0.0, 1.0]
"""OpenRLHF's default range of dynamic filtering, if it is switched on without a range."""
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine_with_min_lr": {},
    "cosine": {"train.lr_scheduler": "cosine_with_min_lr", "train.min_lr_ratio": 0.0},
    "linear": {"train.min_lr_ratio": 0.0},
    "constant": {"train.lr_warmup_ratio": 0.0},
    "constant_with_warmup": {"train.lr_scheduler": "constant"},
}
"""transformers' name of a schedule -> options that reproduce it, in addition to `train.lr_scheduler`."""
_WORKERS = {"actor": "actor_ranks", "critic": "critic_ranks", "ref": "references", "reward": "rewards"}
"""OpenRLHF's role -> option with its number of workers."""
_ROLE_NAMES = {"ref": "reference"}
"""OpenRLHF's role -> name of the role in the options of placement, where they differ."""
_CORRECTIONS: Mapping[tuple[str, str], str] = {
    ("token", "clip"): "tis",
    ("token", "mask"): "icepop",
    ("seq", "mask"): "seq-mask",
}
"""Level and mode of OpenRLHF's correction (since 0.11.2) -> algorithm.correction."""
_OLDER_TYPES = {"mis": "seq-mask"}
"""Type of the correction in OpenRLHF 0.9.3, whose weights are not clamped -> algorithm.correction."""


def compute(flags: Computed) -> None:
    """Set options of PPO that follow from several flags, or whose values are converted."""
    for part in (_reward, _lengths, _placement, _asynchronous, _algorithm, _training, *_SHARED):
        part(flags)


def compute_supervised(flags: Computed) -> None:
    """Set such options of train_sft, train_rm and train_dpo."""
    for part in (*_SHARED, _columns, _split):
        part(flags)


@functools.cache
def train_ppo() -> TableAdapter:
    """Return the adapter of train_ppo_ray's flags, for the recipe openrlhf_ppo."""
    return TableAdapter.load(TABLE, "shared", "ppo", compute=compute)


@functools.cache
def train_sft() -> TableAdapter:
    """Return the adapter of train_sft's flags."""
    return _supervised("sft")


@functools.cache
def train_dpo() -> TableAdapter:
    """Return the adapter of train_dpo's flags."""
    return _supervised("pairs", "dpo")


@functools.cache
def train_rm() -> TableAdapter:
    """Return the adapter of train_rm's flags."""
    return _supervised("pairs", "reward_model")


@functools.cache
def serve_rm() -> TableAdapter:
    """Return the adapter of serve_rm's flags."""
    return TableAdapter.load(TABLE, "serve")


def _supervised(*sections: str) -> TableAdapter:
    """Return the adapter of a supervised recipe, with additional sections of the table."""
    return TableAdapter.load(TABLE, "shared", "supervised", *sections, compute=compute_supervised)


def _reward(flags: Computed) -> None:
    """Set the source of rewards: the first one given of an agent, a URL or file, and reward models."""
    sources = {
        "agent.func_path": ("agent_func_path", "train.agent_func_path"),
        "reward.source": ("remote_rm_url", "reward.remote_url"),
        "reward_model.path": ("reward_pretrain", "reward.model_name_or_path"),
    }
    first = None
    # A command may set several sources. The later ones have no effect, and a note says so.
    for option, names in sources.items():
        if first is not None:
            flags.idle(f"{first} gives the rewards", *names)
        elif (first := flags.name(*names)) is not None:
            flags.put(option, flags.get(*names))
    buffer = flags.get("overlong_buffer_len", "reward.overlong_buffer_len")
    if buffer is not None:
        flags.put("algorithm.overlong_buffer", int(buffer))


def _lengths(flags: Computed) -> None:
    """Set the limits on tokens. max_len limits prompt and response together, and a complete episode. Without
    max_new_tokens a response may use all tokens that its prompt leaves.
    """
    names = ("max_len", "data.max_len")
    most = flags.get(*names)
    prompt = flags.option("data.max_prompt_tokens")
    new = flags.option("rollout.max_new_tokens")
    has_agent = flags.option("agent.func_path") is not None
    if has_agent and prompt and new:
        # Each limit would apply to an episode if it were set alone, so the lower one applies.
        flags.put("agent.max_tokens", min(prompt + new, most or prompt + new))
        if most is not None and most > prompt + new:
            flags.idle(f"prompt_max_len + generate_max_len={prompt + new} is the lower limit", *names)
    elif has_agent and most is not None and prompt is not None:
        flags.put("agent.max_tokens", most)
    elif most is None:
        return
    elif prompt is not None:
        flags.idle("prompt_max_len and generate_max_len set it", *names)
    elif new is None:
        # A response may take all tokens that its prompt leaves, so only their sum has a limit.
        flags.put("data.max_prompt_tokens", most - 1)
        flags.put("rollout.max_new_tokens", most)
        flags.put("agent.max_tokens", most)
    elif new >= most:
        flags.faults.append(f"max_len={most} leaves no tokens for a prompt beside max_new_tokens={new}; raise it")
    else:
        flags.put("data.max_prompt_tokens", most - new)
        if has_agent:
            flags.put("agent.max_tokens", most)


def _template(flags: Computed) -> None:
    """Set the input template. As in OpenRLHF it is ignored without a placeholder, or with a chat template."""
    names = ("input_template", "data.input_template")
    template = flags.get(*names)
    if template is None:
        return
    if "{}" not in template:
        flags.notes.append(f"no effect of input_template={template!r}: it has no {{}}, where the prompt would go")
    elif flags.option("data.apply_chat_template"):
        flags.idle("apply_chat_template is on", *names)
    else:
        flags.put("data.input_template", template)


def _placement(flags: Computed) -> None:
    """Set the workers of each role, shared devices, and sleeping, which generation ahead of training restricts."""
    for role, option in _WORKERS.items():
        if role == "reward" and flags.option("reward_model.path") is None:
            continue  # code and servers take no device
        nodes = flags.get(f"{role}_num_nodes", f"{role}.num_nodes")
        each = flags.get(f"{role}_num_gpus_per_node", f"{role}.num_gpus_per_node")
        if nodes is not None:
            flags.put(f"placement.{_ROLE_NAMES.get(role, role)}_nodes", nodes)
        if each is not None:
            nodes = nodes or 1
            flags.put(f"placement.{option}", nodes * each)
    if flags.option("placement.rollout_engines") == 0:
        flags.put("placement.rollout_engines", None)
        flags.put("rollout.engine", "hf")
        flags.put("rollout.tensor_parallel", 1)
        flags.notes.append(
            "vllm_num_engines=0: transformers generates responses (rollout_engine=hf), with one device per engine"
        )
    overlaps = flags.option("asynchronous.enabled", False)
    colocates = flags.get("colocate_all_models", "train.colocate_all", default=False)
    if colocates and overlaps:
        flags.put("placement.colocate_models", True)
        flags.notes.append(
            "with asynchronous generation, colocate_all_models applies to all models but not to the engines"
        )
    elif colocates:
        flags.put("placement.colocate", True)
    engines_sleep = ("vllm_enable_sleep", "vllm.enable_sleep")
    if flags.get(*engines_sleep) and overlaps and colocates:
        flags.faults.append(
            f"async_train with {flags.name(*engines_sleep)}: with asynchronous generation the engines work during "
            "training, so they cannot sleep (the hybrid engine); unset one of the two"
        )
    elif flags.get(*engines_sleep) and (overlaps or not colocates):
        flags.idle("the engines share no devices", *engines_sleep)
    elif flags.get(*engines_sleep):
        flags.put("placement.engines_sleep", True)
    learners_sleep = ("deepspeed_enable_sleep", "ds.enable_sleep")
    if flags.get(*learners_sleep) and overlaps:
        flags.idle("actor and critic train while responses are generated", *learners_sleep)
    elif flags.get(*learners_sleep):
        flags.put("placement.learners_sleep", True)


def _asynchronous(flags: Computed) -> None:
    """Set dynamic sampling or partial rollouts, which exclude each other."""
    range_names = ("dynamic_filtering_reward_range", "algo.dynamic_filtering_range")
    filters = flags.get("dynamic_filtering", "algo.dynamic_filtering_enable")
    if filters:
        flags.put("algorithm.filter_range", flags.get(*range_names, default=FILTER_RANGE))
    else:
        flags.idle("dynamic_filtering is off", *range_names)
    partial = ("partial_rollout", "train.partial_rollout_enable")
    ahead = ("vllm_generate_batch_size", "rollout.vllm_generate_batch_size")
    if filters:
        why = "with dynamic_filtering new weights are loaded after the running responses have ended"
        flags.idle(why, *(name for name in partial if flags.get(name)), *ahead)
        return
    if flags.name(*partial):
        flags.put("asynchronous.partial_rollout", flags.get(*partial))
    prompts = flags.get(*ahead)
    if prompts not in (None, flags.option("prompts_per_step", 1024)):
        flags.put("asynchronous.in_flight_prompts", prompts)


def _algorithm(flags: Computed) -> None:
    """Set the clip range, and the importance weights between policy and engine."""
    symmetric = ("eps_clip", "actor.eps_clip")
    both = ("eps_clip_low_high", "actor.eps_clip_low_high")
    if flags.name(*both):
        flags.idle("eps_clip_low_high has both bounds", *symmetric)
    clip = flags.get(*symmetric)
    clips = flags.get(*both, default=[clip, clip])
    if clips[0] is not None:
        flags.put("algorithm.clip_low", clips[0])
        flags.put("algorithm.clip_high", clips[-1])
    kinds = ("vllm_is_correction_type", "algo.advantage.is_correction_type")
    level = flags.get("algo.advantage.is_correction_level", default="off")
    mode = flags.get("algo.advantage.is_correction_mode", default="mask")
    if (level, mode) in _CORRECTIONS:
        flags.put("algorithm.correction", _CORRECTIONS[level, mode], "algo.advantage.is_correction_level")
    elif level != "off":
        flags.faults.append(
            f"is_correction_level={level} with is_correction_mode={mode}; use token with clip or mask, or seq with mask"
        )
    elif flags.get("enable_vllm_is_correction", "vllm_enable_is_correction", "algo.advantage.is_correction_enable"):
        kind = flags.get(*kinds, default="tis")
        correction = _OLDER_TYPES.get(kind, kind)
        if flags.get("use_icepop"):
            correction = "icepop"
        flags.put("algorithm.correction", correction)
    else:
        flags.idle("enable_vllm_is_correction is off", "use_icepop", *kinds)
    bounds = flags.get("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold")
    if bounds:
        # Up to OpenRLHF 0.9.0 it was one number: the maximum weight.
        if len(bounds) == 1:
            bounds = [0.0, *bounds]
        flags.put("algorithm.correction_range", bounds)


def _training(flags: Computed) -> None:
    """Set the sizes of passes, and the moving average of the weights."""
    if flags.get("use_dynamic_batch", "train.dynamic_batch_enable"):
        sizes = ("train.micro_batch_size", "train.forward_micro_batch_size")
        # With both limits a micro-batch would be cut by the smaller one.
        named = [size for size in sizes if flags.option(size) is not None]
        for size in named:
            flags.put(size, None)
        if named:
            flags.notes.append(f"no effect of {', '.join(named)}: use_dynamic_batch cuts by tokens")
    if flags.get("enable_ema", "train.enable_ema"):
        flags.put("train.ema_beta", flags.get("ema_beta") or flags.option("train.ema_beta", EMA_BETA))
    else:
        flags.idle("enable_ema is off", "ema_beta")


def _log(flags: Computed) -> None:
    """Set the loggers. A flag is W&B's key or TensorBoard's folder, or `true`."""
    names = {
        "wandb_key": ("use_wandb", "logger.wandb.key"),
        "tensorboard_dir": ("use_tensorboard", "logger.tensorboard_dir"),
    }
    for option, flag_names in names.items():
        value = flags.get(*flag_names)
        is_on = as_value(value)
        # `true` only switches the logger on. Any other value also names the key or the folder.
        if isinstance(is_on, bool):
            flags.put(f"log.{option.partition('_')[0]}", is_on)
        elif value is not None:
            flags.put(f"log.{option}", value)


def _schedule(flags: Computed) -> None:
    """Set the learning-rate schedule, by transformers' name, and the layers with adapters."""
    schedule = flags.get("lr_scheduler", "actor.lr_scheduler")
    if schedule is not None and schedule not in _SCHEDULES:
        flags.faults.append(f"lr_scheduler={schedule}: use one of {', '.join(_SCHEDULES)}")
    elif schedule is not None:
        flags.options |= {"train.lr_scheduler": schedule, **_SCHEDULES[schedule]}
    modules = flags.get("target_modules", "ds.lora.target_modules")
    if modules is not None:
        if not isinstance(modules, str):
            modules = ",".join(modules)
        flags.put("train.lora_target_modules", modules)


def _axes(flags: Computed) -> None:
    """Set the context and tensor axes. They need fsdp, because DeepSpeed's ZeRO has only the data axis."""
    axes = {
        "context": ("ring_attn_size", "ds.ring_attn_size", "ranks exchange heads (Ulysses)"),
        "tensor": ("ds_tensor_parallel_size", "ds.tensor_parallel_size", "ranks share each layer"),
    }
    moves = flags.option("train.engine", "deepspeed") == "deepspeed"
    for axis, (older, newer, how) in axes.items():
        size = flags.get(older, newer, default=1)
        if size <= 1:
            continue
        flags.put(f"parallel.{axis}", size, older)
        if moves:
            flags.put("train.engine", "fsdp")
            # fsdp shards everything between optimizer steps, so it has the stages 2 and 3 only.
            flags.put("train.zero_stage", max(2, flags.option("train.zero_stage", 2)))
            flags.put("train.overlap_comm", False)
            flags.notes.append(f"{older}={size}: {how}, with train.engine=fsdp")


def _columns(flags: Computed) -> None:
    """Set the columns of train_sft. As there, a default template applies, and only the last response is trained on."""
    is_plain = flags.get("pretrain_mode", "model.pretrain_mode_enable")
    if is_plain:
        flags.put("data.plain_text", True)
    turns = flags.get("multiturn", "data.multiturn")
    if turns is not None:
        flags.put("data.multiturn", turns)
    prompt = ("input_key", "data.input_key")
    response = ("output_key", "data.output_key")
    if not flags.name(*prompt, *response):
        return
    flags.put("data.prompt_key", flags.get(*prompt, default="input"))
    if flags.name(*response):
        flags.put("data.response_key", flags.get(*response))
    if flags.option("data.multiturn") is None:
        flags.put("data.multiturn", False)
    has_template = flags.name("input_template", "data.input_template") is not None
    if not (is_plain or has_template or flags.option("data.apply_chat_template")):
        flags.put("data.input_template", INPUT_TEMPLATE)
        text = f"data.input_template={INPUT_TEMPLATE!r}, as input_key is OpenRLHF's; another may be given"
        flags.notes.append(text)


def _split(flags: Computed) -> None:
    """Set the split of the data by its name up to 0.6. Later releases read `dataset_split`."""
    split = flags.get("train_split")
    if split is None:
        return
    if flags.option("data.split") is not None:
        flags.idle("dataset_split names the split", "train_split")
    else:
        flags.put("data.split", split, "train_split")


_SHARED = (_template, _schedule, _log, _axes)
