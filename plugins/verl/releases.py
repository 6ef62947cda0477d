"""verl's keys that only some of its releases or recipes have, as the options of the recipe verl_ppo."""

import math
from collections.abc import Iterator, Mapping

from training.options.table_adapter import Computed

ACTOR = "actor_rollout_ref.actor"
LORA = "actor_rollout_ref.model.lora"
DISTILLATION = "distillation.distillation_loss"
MEGATRON_ALPHA = 32.0
"""verl's default of `model.lora.alpha`."""
MEGATRON_LAYERS: Mapping[str, str] = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_q": "q_proj",
    "linear_k": "k_proj",
    "linear_v": "v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc1_gate": "gate_proj",
    "linear_fc1_up": "up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron's name of a layer -> names of the same layers in transformers' models of the Llama and Qwen families."""
ALL_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SAMPLED_KL = ("kl", "k1")
"""verl's names of the estimator of the reverse KL whose gradient is a policy gradient."""
KL_LIMIT = 10.0
"""Maximum advantage of a token in distillation, in nats (components/rl/kl.py)."""


def read_releases(keys: Computed) -> None:
    """Read all keys of this file."""
    read_entropy_recipe(keys)
    if "trainer.ref_update_freq" in keys.names:
        keys.notes.append("trainer.ref_update_freq moves the reference; the loss of the spin recipe is not here")
    read_fully_async(keys)
    read_megatron_lora(keys)
    read_distillation(keys)


def read_entropy_recipe(keys: Computed) -> None:
    """Set the share of tokens from `k_percent`, a key of the entropy recipe before 0.5."""
    key = f"{ACTOR}.k_percent"
    if (share := keys.get(key)) is None:
        return
    if keys.option("algorithm.policy_loss") == "kl_cov" and keys.option("algorithm.cov_share") is None:
        keys.put("algorithm.cov_share", share / 100, key)
    else:
        keys.idle("kl_cov alone reads it, where kl_cov_ratio is not set", key)


def read_fully_async(keys: Computed) -> None:
    """Set the options of verl's fully_async_policy, whose steps consist of several mini-batches."""
    stale = keys.get("async_training.staleness_threshold")
    if stale is None:
        return
    size = keys.get(f"{ACTOR}.ppo_mini_batch_size", default=256)
    samples = keys.option("samples_per_prompt", 1)
    batches = keys.get("async_training.require_batches", default=1)
    prompts = size * batches * keys.get("async_training.trigger_parameter_sync_step", default=1)
    keys.put("prompts_per_step", prompts, "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step")
    keys.put("train.mini_batch_size", size * samples)
    if keys.get("async_training.recompute_old_log_prob") is False:
        keys.put("algorithm.bypass", True, "async_training.recompute_old_log_prob")
    # In 0.6 and 0.7 the policy before the step is the one that sampled, unless its log-probabilities are recomputed.
    takes_engines = keys.get("async_training.use_rollout_log_probs")
    if takes_engines and not keys.get("async_training.compute_prox_log_prob"):
        keys.put("algorithm.bypass", True, "async_training.use_rollout_log_probs")
    if total := keys.get("rollout.total_rollout_steps"):
        keys.put("max_steps", max(total // prompts, 1), "rollout.total_rollout_steps")
    # verl's threshold is a share of a step's samples. The queue holds whole steps, so the share is rounded up.
    keys.put("asynchronous.queue_size", math.ceil(stale), "async_training.staleness_threshold")
    if stale and keys.get("async_training.partial_rollout"):
        keys.put("asynchronous.partial_rollout", True, "async_training.partial_rollout")


def read_megatron_lora(keys: Computed) -> None:
    """Set the adapters from `model.lora`, verl's group of adapters in Megatron."""
    if not keys.get(f"{LORA}.rank"):
        return
    if keys.option("train.lora_alpha") is None:
        keys.put("train.lora_alpha", MEGATRON_ALPHA, f"{LORA}.alpha")
    kind = keys.get(f"{LORA}.type", default="lora")
    if kind not in ("lora", "canonical_lora"):
        keys.faults.append(f"{LORA}.type={kind} is not supported; use canonical_lora")
    elif kind == "lora":
        keys.notes.append(
            "layers that Megatron fuses (query, key and value; gate and up) have an adapter each, as "
            f"{LORA}.type=canonical_lora has; verl's lora shares one factor among them"
        )
    layers = keys.get(f"{LORA}.target_modules")
    if layers is None:
        return
    names = [name for layer in layers for name in MEGATRON_LAYERS.get(layer, layer).split(",")]
    targets = "all-linear" if set(names) == ALL_LAYERS else ",".join(dict.fromkeys(names))
    keys.put("train.lora_target_modules", targets, f"{LORA}.target_modules")


def _faults_of_distillation(keys: Computed, teachers: set[str]) -> Iterator[str]:
    """Yield the reasons against the keys of a distillation."""
    mode = keys.get(f"{DISTILLATION}.loss_mode", default="k3")
    if len(teachers) != 1:
        yield (
            f"distillation.enabled=true with {len(teachers)} teachers; give one, as "
            "distillation.teacher_models.teacher_model.model_path"
        )
    gradient = keys.get(f"{DISTILLATION}.use_policy_gradient", default=False)
    if mode not in SAMPLED_KL or not gradient:
        yield (
            f"{DISTILLATION}.loss_mode={mode} with use_policy_gradient={gradient}: only the reverse KL of the sampled "
            f"tokens is distilled here; set {DISTILLATION}.loss_mode=k1 and use_policy_gradient=true, or train with "
            "recipes/distill, whose algorithm.loss=divergence sums over the teacher's algorithm.top_k tokens"
        )
    if keys.get(f"{DISTILLATION}.use_task_rewards", default=True):
        yield (
            f"{DISTILLATION}.use_task_rewards=true: the teacher alone gives the advantages here; set it to false, or "
            "leave distillation out and set actor_rollout_ref.actor.use_kl_loss=true with "
            "actor_rollout_ref.ref.model.path=TEACHER"
        )
    limit = keys.get(f"{DISTILLATION}.loss_max_clamp")
    if limit is not None and limit != KL_LIMIT:
        yield f"{DISTILLATION}.loss_max_clamp={limit}; the limit is {KL_LIMIT:g} nats here, so set that or leave it out"


def read_distillation(keys: Computed) -> None:
    """Set on-policy distillation from one teacher, and the pool of the teacher."""
    if not keys.get("distillation.enabled"):
        return
    paths = [key for key in keys.values if key.startswith("distillation.teacher_model") and key.endswith("model_path")]
    teachers = {str(keys.values[key]) for key in paths if keys.values[key]}
    faults = list(_faults_of_distillation(keys, teachers))
    keys.faults += faults
    if faults:
        return
    keys.put("algorithm.estimator", "distillation", "distillation.enabled")
    keys.notes.append(
        "the teacher is a model of transformers that computes the log-probabilities of the sampled tokens; the keys of "
        f"its engine have no effect, nor have {DISTILLATION}.topk and .log_prob_min_clamp"
    )
    keys.put("algorithm.reference_path", teachers.pop(), paths[-1])
    clip = keys.get(f"{DISTILLATION}.clip_ratio", default=0.2)
    for side in ("low", "high"):
        keys.put(f"algorithm.clip_{side}", keys.get(f"{DISTILLATION}.clip_ratio_{side}", default=clip))
    responses = keys.option("prompts_per_step", 1024) * keys.option("samples_per_prompt", 1)
    if keys.option("train.mini_batch_size") != responses:
        keys.notes.append(
            "distillation: advantages are computed once per step from the policy before it; verl computes them again "
            "in each of its mini-batches"
        )
    machines = keys.get("distillation.nnodes", "distillation.teacher_model.nnodes", default=0)
    if not machines:
        return
    nodes = keys.option("placement.nodes", 1)
    devices = keys.option("placement.devices_per_node", 8)
    each = keys.get("distillation.n_gpus_per_node", "distillation.teacher_model.n_gpus_per_node", default=8)
    pools = keys.option("placement.pools") or {"global_pool": [devices] * nodes}
    pools = pools | {"teacher": [each] * machines}
    keys.put("placement.pools", pools, "distillation.n_gpus_per_node")
    keys.put("placement.role_pools", (keys.option("placement.role_pools") or {}) | {"ref": "teacher"})
    keys.put("placement.nodes", sum(map(len, pools.values())), "trainer.nnodes")
