"""The real verl compared with recipes/verl_ppo: the same keys, responses and weights, three training steps."""

# pyright: reportMissingImports=false
# verl is in the environment that scripts/oracle.sh makes, and in no other.
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import verl
from differences import Differences
from omegaconf import OmegaConf
from steps import (
    EPS,
    LONGEST,
    PROMPTS,
    SAMPLES,
    SIZE,
    STEPS,
    Apart,
    Padded,
    Trace,
    make_model,
    make_steps,
    roles,
    value_model,
    weights_of,
)
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.utils.losses import ppo_loss, value_loss

from recipes.verl_ppo.algorithm import AdaptedKL, add_advantages, minibatches
from recipes.verl_ppo.main import read_config
from recipes.verl_ppo.roles.actor_rollout_ref import ActorRolloutRefWorker
from recipes.verl_ppo.roles.critic import CriticWorker

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


@dataclass
class Case:
    name: str
    keys: str
    why: str = ""
    """Reasons of intended differences."""
    holes: bool = False
    update_twice: bool = True
    draws: bool = False
    """True if responses are resampled for training."""


def keys_of(case: Case, path: str) -> list[str]:
    """Return the command line that both sides parse."""
    common = f"""actor_rollout_ref.model.path={path} critic.model.path={path} data.train_files=task:sort
        data.train_batch_size={PROMPTS} actor_rollout_ref.rollout.n={SAMPLES} data.max_response_length={LONGEST}
        {ACTOR}.ppo_mini_batch_size={PROMPTS // (1 + case.update_twice)} critic.ppo_mini_batch_size={PROMPTS // 2}
        {ACTOR}.use_dynamic_bsz=true critic.use_dynamic_bsz=true
        {ACTOR}.optim.lr=1e-3 critic.optim.lr=1e-3 trainer.total_training_steps={STEPS}"""
    return [*common.split(), *case.keys.split()]


def ours(case: Case, path: str, folder: Path) -> Trace:
    config = read_config([*keys_of(case, path), f"run_dir={folder}", f"train.eps={EPS}", f"critic.eps={EPS}"])
    trace, critic = Trace(), None
    with roles(folder) as stage:
        policy = stage.role(ActorRolloutRefWorker, config, "actor_ref")
        policy["init_model"](path, STEPS)
        if config.needs_critic:
            critic = stage.role(CriticWorker, config)
            critic["init_model"](path, STEPS)
        kl = AdaptedKL(config)
        for number, responses in enumerate(make_steps(path, holes=case.holes), 1):
            step = responses
            forwards = [] if config.algorithm.bypass else [partial(policy["compute_log_prob"], temperature=1.0)]
            forwards += [policy["compute_ref_log_prob"]] if config.needs_reference else []
            forwards += [critic["compute_values"]] if critic is not None else []
            for forward in forwards:
                step = step.with_tokens(**forward(step.only("tokens")).per_token)
            if config.algorithm.estimator == "optimal_token_baseline":
                step = step.with_tokens(**policy["compute_sharp_log_prob"](step.only("tokens")).per_token)
            step = add_advantages(step, config, kl.coef)
            kl.adapt(step)
            order = torch.cat(minibatches(step, config, "critic", number)) if case.draws else slice(None)
            trained = step.select(order)
            trace.advantages.append(trained["advantage"][trained["action_mask"]])
            if critic is not None:
                trace.value_losses.append(critic["update_critic"](step, number)["loss"])
            metrics = policy["update_actor"](step, number)
            trace.losses.append(metrics["loss"])
            trace.grad_norms.append(metrics["grad_norm"])
        trace.weights = saved(policy, folder)
    return trace


def saved(policy: Any, folder: Path) -> dict[str, torch.Tensor]:
    policy["save"](str(folder / "after"))
    return weights_of(AutoModelForCausalLM.from_pretrained(folder / "after"))


class Model:
    """Return a model with verl's optimizer and schedule."""

    def __init__(self, model: Any, options: Any) -> None:
        self.model, self.options = model, options
        options.total_training_steps = STEPS
        self.optimizer = build_optimizer(model.parameters(), options)
        engine: Any = SimpleNamespace(optimizer_config=options, rank=1)
        self.scheduler = FSDPEngine._build_lr_scheduler(engine, self.optimizer)

    def step(self, loss: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_grad)
        self.optimizer.step()
        return float(norm)


def theirs(case: Case, path: str) -> Trace:
    defaults = OmegaConf.load(Path(verl.__path__[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    adam = {"optim": {"override_optimizer_config": {"eps": EPS}}}
    options_of_case = OmegaConf.from_dotlist(keys_of(case, path))
    config: Any = OmegaConf.merge(defaults, options_of_case, {"actor_rollout_ref": {"actor": adam}, "critic": adam})
    algorithm = config.algorithm
    correction, policy_loss = algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    if correction.bypass_mode:  # as verl's training loop passes it to the actor
        apply_bypass_mode(DataProto.from_dict({"rollout_log_probs": torch.zeros(1)}), correction, policy_loss)
    # As in verl's main program: the mini-batch size is converted to responses for the actor and critic, and the actor
    # also gets the settings of the rollout.
    options = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    policy = Model(AutoModelForCausalLM.from_pretrained(path), options.optim)
    reference = AutoModelForCausalLM.from_pretrained(path)
    critic, critic_options = None, None
    if algorithm.adv_estimator == "gae":
        critic_options = omega_conf_to_dataclass(config.critic)
        critic = Model(value_model(path), critic_options.optim)
    control, trace = core_algos.get_kl_controller(algorithm.kl_ctrl), Trace()
    for number, step in enumerate(make_steps(path, holes=case.holes), 1):
        rows = Padded(step)
        data = DataProto.from_dict(tensors={"responses": rows.ids[:, rows.S :], "response_mask": rows.mask_BT.long()})
        columns = data.batch
        with torch.no_grad():
            columns["old_log_probs"] = rows.logprobs(policy.model)[0]
            columns["ref_log_prob"] = rows.logprobs(reference)[0]
            columns["sum_pi_squared"] = calculate_sum_pi_squared_from_logits(rows.logits(policy.model))
            if critic is not None:
                columns["values"] = rows.values(critic.model)
        columns["rollout_log_probs"] = rows.of("rollout_logprob")
        columns["reward_baselines"] = step["greedy_reward"]
        columns["row"] = torch.arange(SIZE)
        data.non_tensor_batch["uid"] = np.array([str(i) for i in step["prompt_id"].tolist()], dtype=object)
        columns["token_level_scores"] = columns["token_level_rewards"] = rows.last(step["reward"])
        if algorithm.use_kl_in_reward:
            data, _ = apply_kl_penalty(data, control, algorithm.kl_penalty)
        if correction.bypass_mode:
            apply_bypass_mode(data, correction, policy_loss)
        elif correction.rollout_is or correction.rollout_rs:
            data, _ = compute_rollout_correction_and_add_to_batch(data, correction)
        data = with_advantages(data, algorithm, number)
        rows = Padded(step.select(data.batch["row"]))
        trace.advantages.append(data.batch["advantages"][data.batch["response_mask"].bool()])
        if critic is not None:
            values = [
                (critic.step(loss), float(loss.detach()))
                for loss in minibatch_losses(data, rows, critic, critic_options, PROMPTS // 2 * SAMPLES, value_loss)
            ]
            trace.value_losses.append(sum(loss for _, loss in values) / len(values))
            critic.scheduler.step()
        size = config.actor_rollout_ref.actor.ppo_mini_batch_size * SAMPLES
        updates = [
            (float(loss.detach()), policy.step(loss))
            for loss in minibatch_losses(data, rows, policy, options, size, ppo_loss)
        ]
        policy.scheduler.step()
        trace.losses.append(sum(loss for loss, _ in updates) / len(updates))
        trace.grad_norms.append(sum(norm for _, norm in updates) / len(updates))
    trace.weights = weights_of(policy.model)
    return trace


def with_advantages(data: DataProto, algorithm: Any, number: int) -> DataProto:
    """Return the advantages of verl's trainer. If responses are resampled, the recipe's selection is used."""
    by_std = algorithm.get("norm_adv_by_std_in_grpo", True)
    with mock.patch.object(torch, "multinomial", partial(drawn, number)):
        return compute_advantage(
            data, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, SAMPLES, by_std, algorithm
        )


def drawn(number: int, weights: torch.Tensor, count: int, replacement: bool) -> torch.Tensor:
    """Return the responses that the recipe selects in a step by verl's weights."""
    assert replacement
    draw = np.random.default_rng([42, number, 2])  # with the recipe's seed
    share = weights.double() / weights.double().sum()
    return torch.from_numpy(draw.choice(len(weights), size=count, p=share.numpy()))


def minibatch_losses(data: DataProto, rows: Padded, held: Model, options: Any, size: int, loss: Any) -> Any:
    """Return the loss of each mini-batch in order, with the model as updated so far."""
    for start in range(0, SIZE, size):
        chosen = slice(start, start + size)
        names = [
            "response_mask",
            "old_log_probs",
            "advantages",
            "rollout_is_weights",
            "ref_log_prob",
            "values",
            "returns",
        ]
        part = TensorDict({name: data.batch[name][chosen] for name in names if name in data.batch}, batch_size=size)
        part["responses"] = rows.ids[chosen, rows.S :]
        part["prompts"] = rows.ids[chosen, : rows.S]
        part["attention_mask"] = rows.attention[chosen]
        tu.assign_non_tensor(
            part,
            dp_size=1,
            batch_num_tokens=int(part["response_mask"].sum()),
            global_batch_size=size,
        )
        if loss is value_loss:
            output = {"values": unpadded(rows.values(held.model)[chosen], rows, chosen)}
        else:
            logprob_BT, entropy_BT = rows.logprobs(held.model)
            output = {
                "log_probs": unpadded(logprob_BT[chosen], rows, chosen),
                "entropy": unpadded(entropy_BT[chosen], rows, chosen),
            }
        yield loss(options, output, part)[0]


def unpadded(x_BT: torch.Tensor, rows: Padded, chosen: slice) -> torch.Tensor:
    """Return outputs in the layout of verl's engine: all tokens end to end, and each number one token earlier."""
    counts = zip(x_BT, rows.prompt_B[chosen].tolist(), rows.length_B[chosen].tolist(), strict=True)
    return torch.cat([torch.nn.functional.pad(row[:length], (prompt - 1, 1)) for row, prompt, length in counts])


SEQ = "seq-mean-token-mean"
OTB = f"{ACTOR}.calculate_sum_pi_squared=true algorithm.adv_estimator"
TIS = f"{CORRECTION}.loss_type=reinforce {CORRECTION}.rollout_is"
REJECTED = f"{CORRECTION}.rollout_rs"
CASES = [
    Case("PPO with a critic, the defaults", ""),
    Case(
        "PPO, discounted, with a KL in the reward",
        "algorithm.gamma=0.95 algorithm.lam=0.9 algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.1",
    ),
    Case(
        "PPO, the KL's weight adapted",
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive "
        "algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.target_kl=0.001 algorithm.kl_ctrl.horizon=100 "
        "algorithm.kl_penalty=low_var_kl",
    ),
    Case("GRPO", f"algorithm.adv_estimator=grpo {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.1"),
    Case("GRPO, an environment in between", "algorithm.adv_estimator=grpo", holes=True),
    Case(
        "Dr. GRPO",
        f"algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false "
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor={LONGEST}",
    ),
    Case("RLOO", "algorithm.adv_estimator=rloo"),
    Case("REINFORCE++", "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9"),
    Case("REINFORCE++, an environment in between", "algorithm.adv_estimator=reinforce_plus_plus", holes=True),
    Case("REINFORCE++-baseline", "algorithm.adv_estimator=reinforce_plus_plus_baseline"),
    Case("ReMax", "algorithm.adv_estimator=remax"),
    Case("OPO", "algorithm.adv_estimator=opo"),
    Case("optimal token baseline", f"{OTB}=optimal_token_baseline"),
    Case(
        "optimal token baseline, TIS",
        f"{OTB}=optimal_token_baseline {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=1.2",
    ),
    Case("optimal token baseline, an environment in between", f"{OTB}=tir_optimal_token_baseline", holes=True),
    Case("GRPO, pass@k", "algorithm.adv_estimator=grpo_passk"),
    Case(
        "clip-higher and dual clip",
        f"algorithm.adv_estimator=grpo {ACTOR}.clip_ratio_high=0.28 "
        f"{ACTOR}.clip_ratio_c=1.5 {ACTOR}.entropy_coeff=0.01",
    ),
    *(
        Case(f"{mode}", f"algorithm.adv_estimator=grpo {ACTOR}.loss_agg_mode={mode}")
        for mode in (SEQ, "seq-mean-token-sum", "token-sum")
    ),
    Case(
        "GSPO",
        f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode={SEQ} "
        f"{ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4",
    ),
    Case("SAPO", f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.loss_agg_mode={SEQ}"),
    Case(
        "GMPO",
        f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio=0.4 "
        f"{ACTOR}.loss_agg_mode={SEQ}",
    ),
    Case("CISPO", f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=cispo"),
    Case("DPPO, total variation", f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=dppo_tv"),
    Case("DPPO, KL", f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=dppo_kl {ACTOR}.clip_ratio=0.05"),
    Case(
        "DRO",
        f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=dro {ACTOR}.policy_loss.dro_beta=0.5",
    ),
    Case("REINFORCE", f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=gpg"),
    *(
        Case(
            f"KL in the loss, {kind}",
            f"algorithm.adv_estimator=grpo {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.5 "
            f"{ACTOR}.kl_loss_type={kind}",
        )
        for kind in ("kl", "abs", "mse", "low_var_kl+")
    ),
    Case("TIS", f"algorithm.adv_estimator=grpo {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=1.2"),
    Case(
        "TIS of sequences, over their mean",
        f"algorithm.adv_estimator=grpo {CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_batch_normalize=true",
    ),
    Case(
        "IcePop",
        f"algorithm.adv_estimator=grpo {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.8_1.25",
    ),
    *(
        Case(
            f"rejection, {rule}, {estimator}",
            f"algorithm.adv_estimator={estimator} {CORRECTION}.rollout_rs={rule} "
            f"{CORRECTION}.rollout_rs_threshold={bound} {ACTOR}.loss_agg_mode={mode}",
        )
        for rule, bound, estimator, mode in (
            ("token_k1", "0.8_1.25", "gae", "token-mean"),
            ("token_k1", "0.8_1.25", "reinforce_plus_plus", "token-mean"),
            ("token_k2", "0.05", "remax", "token-mean"),
            ("seq_mean_k1", "0.8_1.25", "opo", SEQ),
            ("seq_sum_k3", "0.2", "grpo", SEQ),
            ("seq_max_k2", "0.15", "rloo", "token-mean"),
        )
    ),
    *(
        Case(f"bypass, {name}", f"algorithm.adv_estimator=grpo {CORRECTION}.bypass_mode=true {keys}")
        for name, keys in (
            ("a clipped ratio", ""),
            ("a clipped ratio, seq_max_k3", f"{REJECTED}=seq_max_k3 {CORRECTION}.rollout_rs_threshold=0.15"),
            ("REINFORCE", f"{CORRECTION}.loss_type=reinforce"),
            ("REINFORCE, TIS, token_k1", f"{TIS}=token {REJECTED}=token_k1 {CORRECTION}.rollout_rs_threshold=0.8_1.25"),
            (
                "REINFORCE, TIS of sequences, seq_sum_k1",
                f"{TIS}=sequence {REJECTED}=seq_sum_k1 {CORRECTION}.rollout_rs_threshold=0.5_2.0",
            ),
        )
    ),
    *(
        Case(f"PF-PPO, {rule}", f"algorithm.use_pf_ppo=true algorithm.pf_ppo.reweight_method={rule}", draws=True)
        for rule in ("pow", "max_min", "max_random")
    ),
    Case(
        "warm-up, then a cosine",
        f"algorithm.adv_estimator=grpo {ACTOR}.optim.lr_warmup_steps=1 "
        f"{ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.min_lr_ratio=0.1 {ACTOR}.optim.weight_decay=10.0",
    ),
    Case(
        "GPG",
        "algorithm.adv_estimator=gpg",
        "verl counts responses with a reward that is not 0, here those whose "
        "group has unequal rewards count, as in the paper",
    ),
    Case(
        "Clip-Cov",
        f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=clip_cov "
        f"{ACTOR}.policy_loss.clip_cov_ratio=0.2 {ACTOR}.policy_loss.clip_cov_lb=-9",
        "tokens are drawn at random",
    ),
    Case(
        "KL-Cov",
        f"algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.2",
        "covariances are of the old log-probabilities here, and of those of each micro-batch there",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_recipe_matches_verl(case: Case, tmp_path: Path, differences: Differences) -> None:
    path = make_model(tmp_path / "model")
    start = weights_of(AutoModelForCausalLM.from_pretrained(path))
    apart = Apart.of(ours(case, path, tmp_path / "run"), theirs(case, path), start)
    differences.hold("verl", case.name, apart, case.why)
