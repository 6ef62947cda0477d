"""All remote calls of the roles, as the guide defines them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from core import Future, FutureSequence, RLRoleType, RoleGroup


def vllm_wakeup() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_wakeup).result()


def vllm_sleep() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_sleep).result()


def vllm_generate(prompt_token_ids: Sequence[list[int]], params: Any) -> FutureSequence[list[int]]:
    return group(RLRoleType.ROLLOUT).call_batch(vllm_generate, len(prompt_token_ids), prompt_token_ids, params)


def reference_init(strategy: Any, model_path: str) -> Future[Any]:
    return group(RLRoleType.REFERENCE).call(reference_init, strategy, model_path)


def reward_init(strategy: Any, model_path: str) -> Future[Any]:
    return group(RLRoleType.REWARD).call(reward_init, strategy, model_path)


def critic_init(strategy: Any, model_path: str) -> Future[Any]:
    return group(RLRoleType.CRITIC).call(critic_init, strategy, model_path)


def actor_init(strategy: Any, model_path: str) -> Future[Any]:
    return group(RLRoleType.ACTOR).call(actor_init, strategy, model_path)


def actor_forward(
    sequences: Sequence[Any], action_mask: Sequence[Any], attention_mask: Sequence[Any]
) -> FutureSequence[Any]:
    return group(RLRoleType.ACTOR).call_batch(actor_forward, len(sequences), sequences, action_mask, attention_mask)


def reference_forward(sequences: Sequence[Any]) -> FutureSequence[Any]:
    return group(RLRoleType.REFERENCE).call_batch(reference_forward, len(sequences), sequences)


def critic_forward(sequences: Sequence[Any]) -> FutureSequence[Any]:
    return group(RLRoleType.CRITIC).call_batch(critic_forward, len(sequences), sequences)


def reward_forward(sequences: Sequence[Any]) -> FutureSequence[float]:
    return group(RLRoleType.REWARD).call_batch(reward_forward, len(sequences), sequences)


def actor_append_experience(experience: list[Any]) -> Future[Any]:
    return group(RLRoleType.ACTOR).call(actor_append_experience, experience)


def critic_append_experience(experience: list[Any]) -> Future[Any]:
    return group(RLRoleType.CRITIC).call(critic_append_experience, experience)


def actor_update(kl: float) -> dict[str, float]:
    return group(RLRoleType.ACTOR).call_rank0(actor_update, kl).result()


def critic_update() -> Future[Any]:
    return group(RLRoleType.CRITIC).call(critic_update)


def broadcast_to_vllm() -> None:
    group(RLRoleType.ACTOR).call_rank0(broadcast_to_vllm).result()


def weight_sync(version: int) -> None:
    group(RLRoleType.ROLLOUT).call(weight_sync, version).result()


def weight_version() -> list[int]:
    return group(RLRoleType.ROLLOUT).call(weight_version).result()


def save_checkpoint(tag: str) -> None:
    futures = [group(role).call(save_checkpoint, tag) for role in (RLRoleType.CRITIC, RLRoleType.ACTOR)]
    for future in futures:
        future.result()


def end_job() -> None:
    """End the job by calling the end_job method on the group."""
    futures = [
        group(role).call(end_job)
        for role in [
            RLRoleType.ROLLOUT,
            RLRoleType.REFERENCE,
            RLRoleType.REWARD,
            RLRoleType.ACTOR,
            RLRoleType.CRITIC,
        ]
    ]
    for future in futures:
        future.result()


@cache
def group(role: RLRoleType) -> RoleGroup[Any]:
    """Get the role group for the given role."""
    return RoleGroup(role.name)


@contextmanager
def vllm_running(enable_sleep: bool) -> Iterator[None]:
    """Context manager to handle vLLM sleep and wakeup."""
    if enable_sleep:
        vllm_wakeup()
    try:
        yield
    finally:
        if enable_sleep:
            vllm_sleep()
