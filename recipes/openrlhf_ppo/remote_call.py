"""Every call of this recipe that crosses processes, typed. What a call does is in the role that binds it. Those of
weights and their sync are in training/remote_call.py, those of checkpoints and sleep in training/run/policy_calls.py.

`B` sequences, `N` all their tokens end to end. A call that returns a Future or a FutureSequence has only been sent:
the trainer sends several, then waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.rewards.base import READ_COLUMNS
from core import Future, FutureSequence, Role, RoleGroup
from training.remote_call import wait_all

if TYPE_CHECKING:
    from components.batch import Batch
    from components.generate.config import SamplingConfig

# --- set-up: every rank loads its model


def actor_init(model_path: str, steps: int) -> Future[list[None]]:
    """Load the policy; `steps` rollout steps set the length of its schedule."""
    return RoleGroup(Role.ACTOR).call(actor_init, model_path, steps)


def critic_init(model_path: str, steps: int) -> Future[list[None]]:
    """Load the critic; `steps` rollout steps set the length of its schedule."""
    return RoleGroup(Role.CRITIC).call(critic_init, model_path, steps)


def reward_init(tokenizer_path: str) -> Future[list[None]]:
    """Load the reward models, or reward code and the tokenizer that turns responses into text."""
    return RoleGroup(Role.REWARD).call(reward_init, tokenizer_path)


def reference_init(model_path: str) -> Future[list[None]]:
    """Load the frozen policy that the KL is measured to."""
    return RoleGroup(Role.REFERENCE).call(reference_init, model_path)


def rollout_init(model_path: str) -> Future[list[None]]:
    """Load the policy that samples."""
    return RoleGroup(Role.ROLLOUT).call(rollout_init, model_path)


# --- experience: the batch is split over the workers of the role


def generate_samples(prompts: list[Batch], sampling: SamplingConfig) -> FutureSequence[Batch]:
    """One response per prompt: tokens, action_mask, rollout_logprob per token; truncated, weight_version per response.
    With an agent one episode, which may be several sequences. The list has an item for each engine that is to generate,
    and so has the result.
    """
    return RoleGroup(Role.ROLLOUT).call_batch(generate_samples, len(prompts), prompts, sampling)


def reward_forward(samples: Batch, heldout: bool = False, step: int = 0) -> FutureSequence[Batch]:
    """`reward` (what is trained on), `score` (how right it was) and `reward_failed` (1 where there was none to be
    had and the other two are 0), one of each per response; of held-out ones as `reward.heldout_source` says, where it
    is set. Reward functions may read `step`, the number of finished training steps, and every column of the data.
    """
    read = samples.only(*(name for name in READ_COLUMNS if name in samples))
    return RoleGroup(Role.REWARD).call_batch(reward_forward, len(samples), read, heldout, step)


def actor_forward(samples: Batch, temperature: float) -> FutureSequence[Batch]:
    """`logprob` per token, in nats, under the policy as it is now, at a temperature."""
    return RoleGroup(Role.ACTOR).call_batch(actor_forward, len(samples), samples, temperature)


def critic_forward(samples: Batch) -> FutureSequence[Batch]:
    """`value` per token: of the state before it, in units of reward."""
    return RoleGroup(Role.CRITIC).call_batch(critic_forward, len(samples), samples)


def reference_forward(samples: Batch) -> FutureSequence[Batch]:
    """Compute `reference_logprob` per token, in nats, in the role of the frozen policy, or in the actor without it."""
    role = Role.ACTOR
    if RoleGroup(Role.REFERENCE, optional=True):
        role = Role.REFERENCE
    return RoleGroup(role).call_batch(reference_forward, len(samples), samples)


# --- training


def append_experience(experience: Batch) -> None:
    """Give actor and critic the step's batch, whole: every rank then takes its share of each optimizer step, so the
    number of ranks changes nothing. The object store holds the batch once.
    """
    wait_all([RoleGroup(role).call(append_experience, experience) for role in learners()])


def actor_update(step: int, kl_coef: float) -> Future[list[dict[str, float]]]:
    """Train the policy on the experience, a KL in the loss weighed by `kl_coef`; all ranks return the same metrics."""
    return RoleGroup(Role.ACTOR).call(actor_update, step, kl_coef)


def critic_update(step: int) -> Future[list[dict[str, float]]]:
    """Train the critic on the experience; the metrics are the same on every rank."""
    return RoleGroup(Role.CRITIC).call(critic_update, step)


# --- what involves several roles


def learners() -> list[Role]:
    """Return the roles of this job that are trained."""
    return [role for role in (Role.ACTOR, Role.CRITIC) if RoleGroup(role, optional=True)]


def end_job() -> None:
    """Let the roles release what they hold outside of their process: no call will follow."""
    wait_all([RoleGroup(role).call(end_job) for role in (Role.ROLLOUT, Role.REWARD, Role.ACTOR)])
