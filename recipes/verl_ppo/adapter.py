"""Translation of verl's keys to the options of this recipe: verl.yaml, and here the keys that need arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from components.registry import MissingPlugin, find, load
from training.options.ppo_options import BY_RESPONSE
from training.options.rl_options import RLOptions
from training.options.table_adapter import Computed

from .agent_keys import read_agent
from .dataset_keys import VerlAdapter
from .nested_keys import listed, values_within
from .pool_keys import ACTOR, ROLLOUT, read_pools
from .reward_keys import read_reward

REFERENCE = "actor_rollout_ref.ref"
DTYPES = (("model_dtype",), ("dtype", "mixed_precision.param_dtype"))
"""verl's keys of the dtype of weights, and of matrix products."""
OTHERS = ("megatron", "veomni", "torchtitan", "automodel", "automodel_config")
"""Groups of keys of other training engines, which have the dtypes and the offloading too."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of KL estimators -> names here."""
RELEASES = ("verl keys", "releases")
"""Registry key of the function that reads the keys of some releases and recipes."""
ENGINES, AXES = ("verl keys", "engines"), ("verl keys", "axes")
"""Registry keys of the functions that read the keys of engines, and of the axes of parallelism."""


def compute(keys: Computed) -> None:
    """See `training.options.table_adapter.Compute`."""
    read_by_plugin(keys, *ENGINES)
    for part in (
        read_data,
        read_agent,
        read_batches,
        read_models,
        read_gradients,
        read_critic_config,
        read_loss,
        read_algorithm,
        read_correction,
        read_reward,
        read_run,
        read_pools,
    ):
        part(keys)
    read_by_plugin(keys, *AXES)
    if read_releases := find(*RELEASES):
        read_releases(keys)


def read_by_plugin(keys: Computed, kind: str, name: str) -> None:
    """Read keys by a function of a plug-in. Without it the command is refused, as these keys change results."""
    try:
        read = load(kind, name)
    except MissingPlugin as error:
        keys.faults.append(str(error))
    else:
        read(keys)


def read_loss(keys: Computed) -> None:
    """Set the policy loss, if verl uses another loss or aggregation than the key names."""
    name, kind = f"{ACTOR}.policy_loss.loss_mode", keys.option("algorithm.policy_loss", "ppo")
    if keys.option("algorithm.bypass") and "algorithm.rollout_correction.bypass_mode" in keys.names:
        loss = "reinforce" if keys.get("algorithm.rollout_correction.loss_type") == "reinforce" else "ppo"
        keys.put("algorithm.policy_loss", loss, "algorithm.rollout_correction.loss_type")
        if kind not in ("ppo", loss):
            keys.notes.append(
                f"no effect of {name}={kind}: with bypass_mode verl takes rollout_correction.loss_type, ppo_clip or "
                "reinforce"
            )
    elif kind in BY_RESPONSE and keys.option("algorithm.policy_aggregation") is None:
        keys.put("algorithm.policy_aggregation", "seq-mean-token-mean", name)
        if keys.option("algorithm.loss_aggregation", "token-mean") != "seq-mean-token-mean":
            keys.notes.append(
                f"{name}={kind} is a mean over responses for any {ACTOR}.loss_agg_mode, as in verl; that key "
                "only applies to entropy and KL"
            )
    if keys.option("algorithm.estimator") == "optimal_token_baseline" and keys.option("agent.func_path"):
        keys.notes.append(
            "optimal_token_baseline compares responses after equal numbers of policy tokens, like verl's "
            "tir_optimal_token_baseline; verl's optimal_token_baseline also counts environment tokens"
        )


def read_gradients(keys: Computed) -> None:
    """Set the maximum gradient norm: from the optimizer's key, or from the older key of actor and critic."""
    for group, owner in (("train", ACTOR), ("critic", "critic")):
        older = f"{owner}.grad_clip"
        newer = f"{owner}.optim.clip_grad"
        if (norm := keys.get(newer, older)) is None:
            continue
        keys.put(f"{group}.max_grad_norm", norm, keys.name(newer, older) or newer)
        if keys.name(newer) and keys.get(older) not in (None, norm):
            keys.idle(f"{newer}={norm} is the limit", older)
        elif not keys.name(newer) and norm != 1.0:
            keys.notes.append(
                f"{older}={norm} is the maximum gradient norm, as in verl up to 0.6; later releases only read {newer}, "
                "whose default is 1.0"
            )


def read_critic_config(keys: Computed) -> None:
    """Check overrides of the critic's config.json, of which only the attention kernels are accepted."""
    group = "critic.model.override_config"
    for name, value in values_within(keys, group).items():
        if name == "attn_implementation":
            keys.notes.append(f"no effect of {group}.{name}: the critic has the policy's attention kernels")
        elif value:
            keys.faults.append(
                f"{group}.{name}={value}: the critic is what its config.json has, with the policy's attention kernels; "
                "its own weights are trained"
            )


def read_data(keys: Computed) -> None:
    """Set the data files, the treatment of long prompts, and the sampling of validation."""
    for key, option in (("data.train_files", "data.path"), ("data.val_files", "evaluation.path")):
        if key in keys.values:
            files = keys.values[key] or []
            keys.put(option, ",".join(map(str, listed(files))) or None, key)
    if keys.get("data.filter_overlong_prompts"):
        keys.put("data.overlong", "leave_out", "data.filter_overlong_prompts")
    samples = f"{ROLLOUT}.val_kwargs.do_sample"
    temperature = f"{ROLLOUT}.val_kwargs.temperature"
    # Where requests go to a server (mode=async, and all releases since 0.7) verl reads the temperature alone.
    mode = keys.get(f"{ROLLOUT}.mode")
    samples_anyway = mode == "async" or (mode is None and keys.get(samples) is None)
    if (samples_anyway or keys.get(samples)) and keys.get(temperature, default=0.0):
        keys.put("evaluation.temperature", keys.get(temperature), temperature)
    elif keys.option("evaluation.samples_per_prompt", 1) > 1 and not keys.option("evaluation.temperature"):
        keys.put("evaluation.samples_per_prompt", 1, f"{ROLLOUT}.val_kwargs.n")
        keys.notes.append(f"no effect of {ROLLOUT}.val_kwargs.n: greedy responses are all the same")
    longest = keys.option("data.max_prompt_tokens", 512) + keys.option("rollout.max_new_tokens", 512)
    # A smaller limit of the engine is a limit on prompt and response together, which agent.max_tokens is here.
    limits = [name for name in keys.values if name.endswith((".max_model_len", ".context_length"))]
    room = min((keys.values[name] for name in limits if keys.values[name] is not None), default=None)
    if room is not None and room < longest:
        keys.put("agent.max_tokens", room, limits[0])
        keys.notes.append(
            f"{ROLLOUT}.max_model_len={room}: maximum number of tokens of a prompt and its response together, less "
            f"than data.max_prompt_length + data.max_response_length = {longest}"
        )


def read_batches(keys: Computed) -> None:
    """Set the mini-batch sizes (prompts in verl, responses here), and the limits of a forward or backward pass."""
    samples, prompts = keys.option("samples_per_prompt", 1), keys.option("prompts_per_step", 1024)
    for prefix, group in ((ACTOR, "train"), ("critic", "critic")):
        key = f"{prefix}.ppo_mini_batch_size"
        # verl's default, if no mini-batch size is set.
        usual = min(256, prompts) if group == "train" and keys.option("train.mini_batch_size") is None else None
        if (size := keys.get(key, default=usual)) is not None:
            if prompts % size:
                keys.faults.append(f"{key}={size} does not divide data.train_batch_size={prompts}; set a divisor")
            keys.put(f"{group}.mini_batch_size", size * samples, f"{key} x {ROLLOUT}.n")
    dynamic = keys.get(f"{ACTOR}.use_dynamic_bsz", default=False)
    critics = keys.get("critic.use_dynamic_bsz", default=dynamic)
    passes = {
        ("train.max_tokens", "train.micro_batch_size"): [(dynamic, f"{ACTOR}.ppo_", "")],
        ("train.forward_max_tokens", "train.forward_micro_batch_size"): [
            (keys.get(f"{part}.log_prob_use_dynamic_bsz", default=dynamic), f"{part}.log_prob_", "")
            for part in (ROLLOUT, REFERENCE)
        ],
        ("critic.max_tokens", "critic.micro_batch_size"): [(critics, "critic.ppo_", "")],
        ("critic.forward_max_tokens", "critic.forward_micro_batch_size"): [(critics, "critic.forward_", "")],
        ("reward.model_max_tokens", "reward.model_micro_batch_size"): [
            (keys.get("reward_model.use_dynamic_bsz", default=critics), "reward_model.forward_", "reward_model.")
        ],
    }
    for options, limits in passes.items():
        _limit_passes(keys, options, limits)


def _limit_passes(keys: Computed, options: tuple[str, str], limits: Sequence[tuple[bool, str, str]]) -> None:
    """Limit passes by tokens, or by responses of maximum length. The smallest of several limits applies."""
    longest = keys.option("data.max_prompt_tokens", 512) + keys.option("rollout.max_new_tokens", 512)
    tokens, counts = list[int](), list[int]()
    for is_dynamic, prefix, other in limits:
        if is_dynamic and (limit := keys.get(f"{prefix}max_token_len_per_gpu")) is not None:
            tokens.append(limit)
        elif not is_dynamic and (limit := keys.get(f"{other or prefix}micro_batch_size_per_gpu")) is not None:
            tokens.append(limit * longest)
            counts.append(limit)
    if tokens:
        keys.put(options[0], min(tokens))
    if counts:
        keys.put(options[1], min(counts))


def read_models(keys: Computed) -> None:
    """Set precision, offloading and adapters."""
    for group, owner, prefixes in (
        ("train", ACTOR, (f"{ACTOR}.fsdp_config", *(f"{ACTOR}.{engine}" for engine in OTHERS))),
        ("critic", "critic", ("critic.model.fsdp_config", "critic.fsdp", *(f"critic.{engine}" for engine in OTHERS))),
    ):
        kinds = [[f"{prefix}.{name}" for prefix in prefixes for name in names] for names in DTYPES]
        weights, products = (keys.get(*names) for names in kinds)
        weights, products = SHORT.get(weights, weights), SHORT.get(products, products or "bf16")
        if "fp16" in (weights, products):
            key = next(name for names in kinds for name in names if SHORT.get(keys.get(name), keys.get(name)) == "fp16")
            keys.faults.append(
                f"{key}=float16: gradients in float16 need a loss scale that follows their overflows, which engines "
                "here do not have; set bfloat16, whose range is that of float32"
            )
        elif (weights, products) == ("bf16", "fp32"):
            keys.faults.append(f"{prefixes[0]}.model_dtype={weights} with dtype={products}; set fp32, or both bf16")
        elif weights is not None or products == "fp32":
            # Weights in fp32 with products in bf16 are autocast.
            precision = "bf16_autocast"
            if products == "fp32":
                precision = "fp32"
            if weights == "bf16":
                precision = weights
            keys.put(f"{group}.precision", precision, f"{prefixes[0]}.model_dtype")
        switches = ("param_offload", "optimizer_offload", "offload_policy")
        offloads = [keys.get(f"{prefix}.{switch}") for prefix in prefixes for switch in switches]
        offloads.append(keys.get(f"{owner}.optim.override_optimizer_config.optimizer_cpu_offload"))
        if any(offload is not None for offload in offloads):
            keys.put(f"{group}.adam_offload", any(offloads), f"{prefixes[0]}.param_offload")
    if not keys.option("train.lora_rank", 0) and keys.option("train.lora_alpha") == 0:
        keys.put("train.lora_alpha", 16.0)  # there are no adapters
    if rank := keys.get("actor_rollout_ref.model.lora.rank"):
        keys.put("train.lora_rank", rank, "actor_rollout_ref.model.lora.rank")
    adapters = ("actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.lora.adapter_path")
    if path := keys.get(*adapters):
        keys.put("train.lora_path", path, str(keys.name(*adapters)))
        # As in verl, rank and alpha of saved adapters replace the options.
        for option, default in (("train.lora_rank", 0), ("train.lora_alpha", 16.0)):
            if keys.option(option) is not None:
                keys.notes.append(f"no effect of {option}={keys.option(option)}: the adapters at {path} have their own")
                keys.put(option, default)
        keys.idle(f"the adapters at {path} have their own", "actor_rollout_ref.model.target_modules")
    elif modules := keys.get("actor_rollout_ref.model.target_modules"):
        keys.put("train.lora_target_modules", ",".join(listed(modules)), "actor_rollout_ref.model.target_modules")


def read_algorithm(keys: Computed) -> None:
    """Set the clip range, and the KL to the reference: subtracted from the reward, in the loss, or both."""
    for side in ("low", "high"):
        both, one_side = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_{side}"
        if (size := keys.get(one_side, both)) is not None:
            # A ratio is never below 0, so all lower bounds below 0 are equivalent.
            is_ratio = keys.option("algorithm.policy_loss") not in ("geo_mean", "dppo_tv", "dppo_kl")
            if side == "low" and is_ratio:
                size = min(size, 1.0)
            keys.put(f"algorithm.clip_{side}", size, keys.name(one_side, both) or both)
    control = {"kl_coef": 0.001, "type": "fixed", "target_kl": 0.1, "horizon": 10000}
    control |= values_within(keys, "algorithm.kl_ctrl")
    coef = keys.get(f"{ACTOR}.kl_loss_coef", default=0.001) if keys.get(f"{ACTOR}.use_kl_loss") else 0.0
    estimator = _estimator(keys, f"{ACTOR}.kl_loss_type", "low_var_kl")
    if keys.get("algorithm.use_pf_ppo"):
        drawn = {"reweight_method": "pow", "weight_pow": 2.0} | values_within(keys, "algorithm.pf_ppo")
        keys.put("algorithm.resample", drawn["reweight_method"], "algorithm.pf_ppo.reweight_method")
        keys.put("algorithm.resample_power", drawn["weight_pow"], "algorithm.pf_ppo.weight_pow")
    if keys.get("algorithm.use_kl_in_reward"):
        keys.put("algorithm.kl_in_reward", True, "algorithm.use_kl_in_reward")
        keys.put("algorithm.kl_coef", control["kl_coef"], "algorithm.kl_ctrl.kl_coef")
        keys.put("algorithm.kl_estimator", _estimator(keys, "algorithm.kl_penalty", "kl"), "algorithm.kl_penalty")
        if control["type"] == "adaptive":
            keys.put("algorithm.kl_target", control["target_kl"], "algorithm.kl_ctrl.target_kl")
            keys.put("algorithm.kl_horizon", control["horizon"], "algorithm.kl_ctrl.horizon")
        if coef:
            keys.put("algorithm.kl_loss_coef", coef, f"{ACTOR}.kl_loss_coef")
            keys.put("algorithm.kl_loss_estimator", estimator, f"{ACTOR}.kl_loss_type")
            keys.notes.append("the KL is both subtracted from the reward and added to the loss")
    elif keys.get(f"{ACTOR}.use_kl_loss"):
        keys.put("algorithm.kl_coef", coef, f"{ACTOR}.kl_loss_coef")
        keys.put("algorithm.kl_estimator", estimator, f"{ACTOR}.kl_loss_type")


def _estimator(keys: Computed, key: str, usual: str) -> str:
    name = str(keys.get(key, default=usual))
    plain = name.removesuffix("+")
    if plain not in (*ESTIMATORS, "k1", "k2", "k3", "abs"):
        keys.faults.append(f"{key}={name}; use kl (k1), abs, mse (k2) or low_var_kl (k3), optionally followed by +")
    return name.replace(plain, ESTIMATORS.get(plain, plain))


def read_correction(keys: Computed) -> None:
    """Set the importance weights between policy and engine, from the keys of three releases."""
    group = "algorithm.rollout_correction"
    lower = keys.get(f"{group}.rollout_rs_threshold_lower")
    if lower is not None and keys.option("algorithm.rejection") is not None:  # up to 0.7
        # verl bounds the policy's probability divided by the engine's, the option here its inverse.
        upper = float(keys.option("algorithm.rejection_threshold", 2.0))
        keys.put("algorithm.rejection_threshold", f"{1 / upper}_{1 / lower}", f"{group}.rollout_rs_threshold")
    level = keys.get(f"{group}.rollout_is")
    bound = keys.get(f"{group}.rollout_is_threshold", default=2.0)
    if keys.get("algorithm.rollout_is") is True:  # 0.6.0
        level = keys.get("algorithm.rollout_is_level", default="token")
        bound = keys.get("algorithm.rollout_is_threshold", default=2.0)
        if keys.get("algorithm.rollout_is_mode") == "mask":
            bound = f"{keys.get('algorithm.rollout_is_threshold_lower', default=1 / bound)}_{bound}"
    if (cap := keys.get(f"{ACTOR}.tis_imp_ratio_cap", default=-1)) > 0:  # 0.5.0
        level, bound = "token", cap
    if level is None:
        return
    try:
        low, high = [float(part) for part in f"0_{bound}".split("_")[-2:]]
    except ValueError:
        low = high = math.nan
    if not 0 <= low < high or level not in ("token", "sequence", "geometric"):
        keys.faults.append(
            f"{group}.rollout_is={level} with rollout_is_threshold={bound}; set token or sequence, and a number above "
            "0, or low_high, as 0.5_2.0"
        )
        return
    keys.put("algorithm.correction", "icepop" if "_" in str(bound) else "tis", f"{group}.rollout_is")
    keys.put("algorithm.correction_range", [low, high], f"{group}.rollout_is_threshold")
    keys.put("algorithm.correction_level", level, f"{group}.rollout_is")


def read_run(keys: Computed) -> None:
    """Set the checkpoint to resume from, and the loggers."""
    if keys.get(f"{ROLLOUT}.mode") == "sync":
        keys.idle("engines get requests one by one, as with async", f"{ROLLOUT}.mode")
    mode, path = keys.get("trainer.resume_mode", default="auto"), keys.get("trainer.resume_from_path")
    if mode == "resume_path" and not path:
        keys.faults.append("trainer.resume_mode=resume_path without trainer.resume_from_path; set that too")
    elif mode != "auto" and keys.option("resume") is None:
        if mode == "disable":
            path = "none"
        keys.put("resume", path, "trainer.resume_mode")
    loggers = listed(keys.get("trainer.logger", default=[]))
    for logger in ("wandb", "tensorboard"):
        if logger in loggers:
            keys.put(f"log.{logger}", True, "trainer.logger")
    if others := [name for name in loggers if name not in ("console", "file", "wandb", "tensorboard")]:
        keys.notes.append(f"no effect of {', '.join(others)} in trainer.logger: the files in run_dir have all metrics")


def plain_arguments(arguments: Sequence[str]) -> list[str]:
    """Convert Hydra's syntax to that of `load_config`; see `plugins/verl/hydra.py`."""
    # Without the plug-in the run ends where it reads the rows, with a message that names the plug-in.
    convert = find("verl command line", "arguments") or list
    return convert(arguments)


_TABLE = VerlAdapter.load(Path(__file__).with_name("verl.yaml"), compute=compute)
VERL = replace(_TABLE, options={**RLOptions.ADAPTER.options, **_TABLE.options})
