"""What a process of each role will hold."""

from components.engines.memory import Need, together
from core import Job
from training.plan import Estimate

from .config import VerlPPOConfig


def memory_needs(config: VerlPPOConfig, job: Job) -> dict[str, Need]:
    """What a process of each role takes: the parts of the policy that its name says, or a model of its own."""
    policy, dtype, batch = config.actor_rollout_ref.model.path, config.dtype, config.minibatch_sequences
    critic, reward = config.critic.model.path or policy, config.reward_model.model.path or ""
    estimate = Estimate(job, policy, config.data.max_prompt_length, config.data.max_response_length, config.agent)
    responses, needs = config.prompts_per_step * config.samples_per_prompt, dict[str, Need]()
    for role in job.placement.processes:
        held, parts = list[Need](), role.lower().split("_")
        if "actor" in parts:
            held.append(estimate.trained(role, policy, config.engine("actor", 1), batch("actor"), publishes=True))
        if "rollout" in parts:
            held.append(estimate.sampled(role, policy, config.rollout_engine(), responses))
        if "ref" in parts and config.needs_reference:
            held.append(estimate.inferred(policy, dtype, config.forward_limits("ref")))
        if "critic" in parts:
            held.append(estimate.trained(role, critic, config.engine("critic", 1), batch("critic"), has_head=False))
        if "rm" in parts:
            held.append(estimate.inferred(reward, dtype, config.forward_limits("rm"), has_head=False))
        needs[role] = together(Need(), *held)
    return needs
