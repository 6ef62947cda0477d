"""The real OpenRLHF compared with recipes/openrlhf_ppo: the same flags, responses and weights, three training steps."""

# pyright: reportMissingImports=false
# OpenRLHF is in the environment that scripts/oracle.sh makes, and in no other.
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openrlhf_parts as parts
import pytest
import torch
from differences import Differences
from openrlhf.models import Actor, get_llm_for_sequence_regression
from openrlhf.trainer.ppo_utils import AdaptiveKLController, Experience, FixedKLController
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer
from steps import (
    EPS,
    LONGEST,
    PROMPTS,
    SAMPLES,
    SIZE,
    STEPS,
    Apart,
    Trace,
    make_model,
    make_steps,
    roles,
    value_model,
    weights_of,
)
from transformers import AutoModelForCausalLM

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from recipes.openrlhf_ppo.algorithm import AdaptedKL, add_advantages
from recipes.openrlhf_ppo.layout import resolved
from recipes.openrlhf_ppo.main import read_config
from recipes.openrlhf_ppo.roles.actor import Actor as OwnActor
from recipes.openrlhf_ppo.roles.critic import Critic as OwnCritic
from recipes.openrlhf_ppo.roles.reference import Reference


@dataclass
class Case:
    name: str
    flags: str
    why: str = ""
    """Reasons of intended differences."""
    holes: bool = False


def flags_of(case: Case, path: str) -> list[str]:
    """Return the command line that both sides parse."""
    common = f"""--actor.model_name_or_path {path} --critic.model_name_or_path {path} --data.prompt_dataset task:sort
        --rollout.batch_size {PROMPTS} --rollout.n_samples_per_prompt {SAMPLES} --rollout.micro_batch_size 8
        --train.batch_size {SIZE // 2} --train.micro_batch_size 4 --rollout.max_new_tokens {LONGEST}
        --actor.num_gpus_per_node 1 --critic.num_gpus_per_node 1 --ref.num_gpus_per_node 1
        --actor.adam.lr 1e-3 --critic.adam.lr 1e-3 --actor.adam.eps {EPS} --critic.adam.eps {EPS}
        --actor.lr_scheduler constant --critic.lr_scheduler constant"""
    return [*common.split(), *case.flags.split()]


def ours(case: Case, path: str, folder: Path) -> Trace:
    recipe_options = [f"run_dir={folder}", "train.engine=fsdp", "train.zero_stage=2"]
    config = resolved(read_config([*recipe_options, *flags_of(case, path)]))
    trace, critic, reference = Trace(), None, None
    with roles(folder) as stage:
        actor = stage.role(OwnActor, config)
        actor["actor_init"](path, STEPS)
        forwards = [partial(actor["actor_forward"], temperature=1.0)]
        if config.needs_critic:
            critic = stage.role(OwnCritic, config)
            critic["critic_init"](path, STEPS)
            forwards.append(critic["critic_forward"])
        if config.needs_reference:
            reference = stage.role(Reference, config)
            reference["reference_init"](path)
            forwards.append(reference["reference_forward"])
        kl = AdaptedKL(config)
        for number, step in enumerate(make_steps(path, holes=case.holes), 1):
            experience = step
            for forward in forwards:
                experience = experience.with_tokens(**forward(step.only("tokens")).per_token)
            experience = add_advantages(experience, config, kl.coef)
            trace.advantages.append(experience["advantage"][experience["action_mask"]])
            if critic is not None:
                critic["append_experience"](experience)
                trace.value_losses.append(critic["critic_update"](number)["loss"])
            actor["append_experience"](experience)
            metrics = actor["actor_update"](number, kl.coef)
            kl.adapt(experience, {f"actor/{name}": value for name, value in metrics.items()})
            trace.losses.append(metrics["loss"])
            trace.grad_norms.append(metrics["grad_norm"])
        actor["save"](str(folder / "after"))
        trace.weights = weights_of(AutoModelForCausalLM.from_pretrained(folder / "after"))
    return trace


def theirs(case: Case, path: str, order: parts.Order) -> Trace:
    args = parts.settings_of([*flags_of(case, path), "--reward.remote_url", "none"])
    policy, reference = (Actor(AutoModelForCausalLM.from_pretrained(path)) for _ in range(2))
    for model in (policy, reference):
        model.packing_samples = False
        model.temperature = args.rollout.temperature
    held = parts.Strategy(args, policy, args.actor, optimizer_steps(args))
    actor = ActorPPOTrainer(
        held,
        policy,
        ema_model=None,
        actor_optim=held.optimizer,
        actor_scheduler=held.scheduler,
        micro_train_batch_size=args.train.micro_batch_size,
        dataloader_pin_memory=False,
    )
    critic, of_critic = critic_of(args, path)
    kl = args.algo.kl
    coef = AdaptiveKLController(kl.init_coef, kl.target, kl.horizon) if kl.target else FixedKLController(kl.init_coef)
    models = [policy, critic and critic.critic, None, reference if kl.init_coef > 0 else None]
    maker, trace = parts.ExperienceMaker(*models, coef, held, Padding()), Trace()
    for number, step in enumerate(make_steps(path, holes=case.holes), 1):
        experiences = maker.make_experience_batch(samples_of(step))
        trace.advantages.append(torch.cat([part.advantages[part.action_mask.bool()] for part in experiences]))
        for trainer in (critic, actor):
            if trainer is not None:
                trainer.replay_buffer.clear()
                for part in experiences:
                    trainer.replay_buffer.append(part)
        if critic is not None:
            order.epochs = shuffled(args, number)
            critic.ppo_train()
            trace.value_losses.append(of_critic.taken()[0])
        order.epochs = shuffled(args, number)
        status = actor.ppo_train(coef.value)
        if "kl" in status:
            coef.update(status["kl"], SIZE)
        loss, norm = held.taken()
        trace.losses.append(loss)
        trace.grad_norms.append(norm)
    trace.weights = weights_of(policy.model)
    return trace


def optimizer_steps(args: Any) -> int:
    """Return the number of optimizer steps of the run, as OpenRLHF's trainer counts them."""
    return STEPS * SIZE // args.train.batch_size * args.train.max_epochs


def critic_of(args: Any, path: str) -> tuple[Any, Any]:
    """Return OpenRLHF's trainer of the critic with the head of our critic, if the settings have a critic."""
    if args.critic.model_name_or_path is None:
        return None, None
    model = get_llm_for_sequence_regression(path, "critic", param_dtype="bf16", attn_implementation="sdpa").float()
    start: Any = value_model(path)
    model.load_state_dict({f"model.{name}": x for name, x in start.backbone.state_dict().items()}, strict=False)
    model.score.load_state_dict(start.score.state_dict())
    held = parts.Strategy(args, model, args.critic, optimizer_steps(args))
    trainer = CriticPPOTrainer(
        held,
        model,
        held.optimizer,
        held.scheduler,
        micro_train_batch_size=args.train.micro_batch_size,
        value_clip=args.critic.value_clip,
        dataloader_pin_memory=False,
    )
    return trainer, held


def shuffled(args: Any, step: int) -> list[list[int]]:
    """Return the response order of the recipe, which shuffles like OpenRLHF but with its own random numbers."""
    epochs = args.train.max_epochs
    drawn = shuffled_minibatches(SIZE, 2, epochs, seed=args.train.seed, step=step)
    return torch.cat([torch.as_tensor(part) for part in drawn]).view(epochs, SIZE).tolist()


class Padding:
    """A tokenizer with the only attribute that OpenRLHF reads."""

    pad_token_id = 0


def samples_of(step: Batch) -> list[Experience]:
    """Return one Experience per response, as OpenRLHF's samples generator creates them."""
    experiences = []
    for row in range(len(step)):
        acts = step.row(row, "action_mask").long()
        tokens, drawn = step.row(row, "tokens"), step.row(row, "rollout_logprob")
        where = acts.nonzero().flatten()
        reward = step["reward"][row : row + 1].clone()
        experiences.append(
            Experience(
                sequences=tokens[None],
                attention_mask=torch.ones_like(tokens)[None],
                action_mask=acts[None, 1:],
                rollout_log_probs=drawn[None, 1:],
                prompts=[""],
                labels=[""],
                images=[None],
                mm_train_inputs=[None],
                rewards=reward,
                scores=reward.clone(),
                response_length=(where[-1:] - where[:1] + 1),
                truncated=step["truncated"][row : row + 1].clone(),
                total_length=torch.tensor([len(tokens)]),
                info={"reward": reward.clone()},
            )
        )
    return experiences


ESTIMATOR = "--algo.advantage.estimator"
KL = "--algo.kl.init_coef"
KL_LOSS = "--algo.kl.use_loss --algo.kl.estimator"
PLAIN = f"{ESTIMATOR} rloo {KL} 0"
CORRECTED = "--algo.advantage.is_correction_threshold 0.8 1.25 --algo.advantage.is_correction_level"
CASES = [
    Case("PPO with a critic, the defaults", ""),
    Case("PPO, discounted", f"--algo.advantage.gamma 0.95 --algo.advantage.lambd 0.9 {KL} 0.1"),
    Case("PPO, the KL's weight adapted", f"{KL} 0.1 --algo.kl.target 0.001 --algo.kl.horizon 100"),
    Case("PPO, advantages not scaled", "--algo.advantage.no_std_norm"),
    Case("PPO, twice over a batch", "--train.max_epochs 2"),
    Case("REINFORCE++", f"{ESTIMATOR} reinforce --algo.advantage.gamma 0.9"),
    Case("REINFORCE++, an environment in between", f"{ESTIMATOR} reinforce", holes=True),
    Case("REINFORCE++-baseline", f"{ESTIMATOR} reinforce_baseline {KL_LOSS} k2 {KL} 0.1"),
    Case(
        "REINFORCE++-baseline, a KL of k3 in the loss",
        f"{ESTIMATOR} reinforce_baseline {KL_LOSS} k3 {KL} 0.1",
    ),
    Case("RLOO", f"{ESTIMATOR} rloo {KL} 0.1"),
    Case("GRPO", f"{ESTIMATOR} group_norm {KL_LOSS} k3 {KL} 0.01"),
    Case("Dr. GRPO", f"{ESTIMATOR} dr_grpo {KL} 0"),
    Case("GSPO", f"{ESTIMATOR} group_norm {KL} 0 --actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4"),
    Case(
        "clip-higher, dual clip and an entropy bonus",
        f"{PLAIN} --actor.eps_clip_low_high 0.01 0.02 --actor.dual_clip 1.5 --actor.entropy_coef 0.01",
    ),
    Case("TIS", f"{PLAIN} {CORRECTED} token --algo.advantage.is_correction_mode clip"),
    Case("IcePop", f"{PLAIN} {CORRECTED} token"),
    Case("sequences masked by their mean ratio", f"{PLAIN} {CORRECTED} seq"),
    Case("means over responses", f"{PLAIN} --actor.loss_agg_mode seq-mean-token-mean"),
    Case(
        "overlong penalty",
        f"{PLAIN} --reward.overlong_buffer_len 4 --reward.overlong_penalty_factor 0.5",
    ),
    Case("rewards of what was cut off halved", f"{PLAIN} --reward.stop_properly_penalty_coef 0.5"),
    Case("rewards cut to a range", "--reward.clip_range -0.3 0.3"),
    Case(
        "a cosine after a warm-up",
        f"{PLAIN} --actor.lr_scheduler cosine_with_min_lr --actor.lr_warmup_ratio 0.3 --actor.adam.weight_decay 10.0",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_recipe_matches_openrlhf(
    case: Case, tmp_path: Path, differences: Differences, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = parts.Order()
    parts.on_a_cpu(monkeypatch, order)
    path = make_model(tmp_path / "model")
    start = weights_of(AutoModelForCausalLM.from_pretrained(path))
    apart = Apart.of(ours(case, path, tmp_path / "run"), theirs(case, path, order), start)
    differences.hold("openrlhf", case.name, apart, case.why)
