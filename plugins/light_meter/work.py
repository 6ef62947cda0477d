"""Work of each phase of a step: which models compute how many tokens, in how many processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from components.models.size import ModelSize, model_size

if TYPE_CHECKING:
    from components.batch import Batch

Kind = Literal["decode", "forward", "train"]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens of the responses of a step."""

    rows: int
    """Number of responses."""
    prompt_tokens: float
    """Number of tokens of all prompts, counted for each response."""
    distinct_prompt_tokens: float
    """Number of tokens of all prompts, counted once for the responses to the same prompt."""
    response_tokens: float
    """Number of tokens that the policy generated."""
    longest: float
    """Number of tokens of the longest response."""
    pairs: float
    """Sum over the responses of their tokens times all tokens before each: the queries and keys of attention."""

    @property
    def computed_tokens(self) -> float:
        """Number of tokens that a pass computes if each prompt is computed once."""
        return self.distinct_prompt_tokens + self.response_tokens

    @classmethod
    def of_batch(cls, batch: Batch) -> Lengths:
        """Return the lengths of a batch with `prompt_length`, `prompt_id` and `action_mask`."""
        prompt_B = batch["prompt_length"].double()
        response_B = batch.lengths.double() - prompt_B
        _, place_B = batch["prompt_id"].unique(return_inverse=True)
        prompt_U = prompt_B.new_zeros(int(place_B.max()) + 1).scatter_reduce_(0, place_B, prompt_B, "amax")
        return cls(
            rows=len(batch),
            prompt_tokens=float(prompt_B.sum()),
            distinct_prompt_tokens=float(prompt_U.sum()),
            response_tokens=float(response_B.sum()),
            longest=float(response_B.max()),
            pairs=float((response_B * (prompt_B + response_B / 2)).sum()),
        )

    @classmethod
    def assumed(cls, *, prompts: int, samples: int, prompt: float, response: float, longest: float) -> Lengths:
        """Return the lengths of a step with `samples` responses to each of `prompts` prompts of equal lengths."""
        rows = prompts * samples
        return cls(
            rows=rows,
            prompt_tokens=rows * prompt,
            distinct_prompt_tokens=prompts * prompt,
            response_tokens=rows * response,
            longest=longest,
            pairs=rows * response * (prompt + response / 2),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Computation of one model in a phase."""

    kind: Kind
    role: str
    size: ModelSize
    ranks: int
    """Number of processes, which share the responses."""
    updates: int = 1
    """Number of optimizer steps."""
    epochs: int = 1
    has_head: bool = True
    """True if the model has logits over the vocabulary."""

    @property
    def products(self) -> int:
        """Number of products of the size of a forward pass: 3 with the backward pass."""
        return {"train": 3}.get(self.kind, 1)

    def operations(self, lengths: Lengths) -> float:
        """Return the number of operations of all processes, without recomputation."""
        size = self.size
        # An embedding is only looked up. The output layer counts for the tokens that are read.
        per_token = 2 * (size.parameters - size.rest)
        if size.experts:
            unused = size.expert_parameters * (1 - size.experts_per_token / size.experts)
            per_token -= int(2 * unused)
        head = 0
        if self.has_head:
            head = 2 * size.vocabulary * size.hidden
        attention = 4 * size.layers * size.queries * lengths.pairs
        forward = per_token * lengths.computed_tokens + head * lengths.response_tokens + attention
        return self.epochs * forward * self.products


def phases(config: Any) -> dict[str, list[Work]]:
    """Return the work of each phase by the name that a recipe gives it. Phases of other recipes are among them.

    Args:
        config: resolved configuration of a recipe that trains a policy on its own rollouts.
    """
    placement = config.placement
    policy = model_size(config.model.path)
    if policy is None or not policy.layers:
        return {}
    ranks = placement.actor_ranks or 1
    epochs = config.train.epochs
    forward = Work(kind="forward", role="ACTOR", size=policy, ranks=ranks)
    train = Work(kind="train", role="ACTOR", size=policy, ranks=ranks, updates=config.updates_per_step, epochs=epochs)
    decode = Work(kind="decode", role="ROLLOUT", size=policy, ranks=placement.rollout_engines or 1)
    reference: list[Work] = []
    if config.needs_reference:
        count = placement.references or ranks
        size = model_size(_reference_path(config)) or policy
        reference = [Work(kind="forward", role="REFERENCE", size=size, ranks=count)]
    critic: list[Work] = []
    critic_train: list[Work] = []
    # Only the recipes with a critic have the property.
    if getattr(config, "needs_critic", False):
        size = model_size(config.critic.path or config.model.path) or policy
        shared = {"role": "CRITIC", "size": size.without_head, "has_head": False}
        count = getattr(placement, "critic_ranks", None) or ranks
        critic = [Work(kind="forward", ranks=count, **shared)]
        critic_train = [Work(kind="train", ranks=count, updates=train.updates, epochs=epochs, **shared)]
    old: list[Work] = []
    if config.needs_old_logprobs:
        old.append(forward)
    return {
        "generate": [decode],
        "gen": [decode],
        "logprobs": [*old, *reference],
        "experience": [forward, *reference, *critic],
        "old_log_prob": [forward],
        "ref": reference,
        "values": critic,
        "train": [train, *critic_train],
        "update_actor": [train],
        "update_critic": critic_train,
    }


def _reference_path(config: Any) -> str:
    """Return the path of the reference model, which is the teacher in a distillation."""
    paths = (getattr(config, "teacher", None), "path"), (config.algorithm, "reference_path")
    return next(filter(None, (getattr(*place, "") for place in paths)), config.model.path)


def worker_threads(plan: Mapping[str, Any]) -> int:
    """Return the number of threads of a worker that computes, from the fields of plan.json. 1 if it is not known."""
    hosts = plan.get("placement", {}).get("hosts", [])
    counts = [host["threads"] for host in hosts if not any(role == "TRAINER" for role, _ in host["workers"])]
    return max([1, *counts])
