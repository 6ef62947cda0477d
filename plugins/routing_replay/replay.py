"""Record and replay the experts that the routers of a mixture of experts choose.

A router chooses the experts with the largest scores. Two passes that round differently choose differently where two
scores are close, and a token that passes through another expert has a log-probability that is off by far more than
rounding. Under replay the choice is taken from an earlier pass, and the weights of the chosen experts are computed by
the router as it is now, so that its gradient flows. Ma et al. 2025, arXiv 2510.11370.

Legend: `N` tokens of a batch end to end, `R` rows of router logits in a pass, `L` routed layers, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.models.packing.layout import packs
from components.models.routers import find_routers, route_columns
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import LossFunction, TrainEngine
from plugins.routing_replay.routes import NO_EXPERT, expert_counts, from_columns, to_columns

_TOP_K: tuple[Callable[..., Any], ...] = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """Context manager in which a router's call of `topk` is recorded, and replaced if routes are replayed.

    The families differ in the use of the selection (softmax before or after it, sigmoid, groups of experts, a bias that
    affects only the selection). All of them select by `topk` over the experts and then read the scores of the selected
    experts.
    """

    def __init__(self, experts: int, top_k: int, given_RK: Tensor | None) -> None:
        super().__init__()
        self._size = (experts, top_k)
        self._given_RK = given_RK
        self.own_RK: Tensor | None = None
        """[R, K] choice of the router itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _TOP_K or output.indices.dim() != 2:  # three dimensions: the two best experts of each group
            return output
        if (args[0].shape[-1], output.indices.shape[-1]) != self._size:
            return output
        self.own_RK = output.indices
        if self._given_RK is None:
            return output
        chosen_RK = torch.where(self._given_RK == NO_EXPERT, output.indices, self._given_RK)
        return torch.return_types.topk((args[0].gather(-1, chosen_RK), chosen_RK))


class RoutingReplay:
    """Routes of a policy's tokens: recorded in the pass for old log-probabilities, or received from an engine."""

    def __init__(self, engine: TrainEngine, source: str) -> None:
        """
        Args:
            engine: training engine of the policy.
            source: "policy" records the routes in `logprobs`; "engine" reads them from the columns of the rollouts.

        Raises:
            ValueError: the model has no routers, or a router does not choose experts as `_Choice` expects.
        """
        self._engine = engine
        self._records = source == "policy"
        routers = find_routers(engine.model).modules
        config: Any = engine.model.config
        text = config.get_text_config()
        self.experts, self.top_k = expert_counts(config)
        self.layers = len(routers)
        if not routers or not self.experts or not self.top_k:
            raise ValueError(
                f"rollout.routing_replay={source}: model type {text.model_type} has no routers that are known here; "
                "set rollout.routing_replay=off"
            )
        self._given: dict[bool, Tensor | None] = {True: None, False: None}
        """Routes of the rows of a pass, [L, R, K] or None, for training (True) and evaluation. The routes of a training
        pass are kept until the next one, because activation checkpointing calls the routers again in the backward pass.
        """
        self._recorded: dict[int, Tensor] | None = None
        for layer, router in enumerate(routers):
            mode: list[_Choice] = []
            router.register_forward_pre_hook(partial(self._enter, layer, mode))
            # Also called after an exception. Otherwise the mode would stay active for the rest of the process.
            router.register_forward_hook(partial(self._leave, layer, mode), always_call=True)

    # --- hooks of the routers

    def _enter(self, layer: int, mode: list[_Choice], router: nn.Module, _: Any) -> None:
        given_RK = None
        if (given_LRK := self._given[router.training]) is not None:
            given_RK = given_LRK[layer]
        mode.append(_Choice(self.experts, self.top_k, given_RK))
        mode[-1].__enter__()

    def _leave(self, layer: int, mode: list[_Choice], _: nn.Module, __: Any, output: Any) -> None:
        choice = mode.pop()
        choice.__exit__(None, None, None)
        # Activation checkpointing leaves a layer by an exception, without an output, as soon as it has recomputed the
        # required tensors.
        if choice.own_RK is None and output is not None:
            raise RuntimeError(
                f"the router of routed layer {layer} does not choose {self.top_k} of {self.experts} experts by topk; "
                "set rollout.routing_replay=off"
            )
        if self._recorded is not None and choice.own_RK is not None:
            self._recorded[layer] = choice.own_RK

    # --- passes without gradients

    def logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """Return the column `logprob` [N], in nats, and the columns of the routes.

        Args:
            tokens: column `tokens`; the columns of routes too if they come from the engine.
            temperature: sampling temperature.
        """
        numbered = tokens.with_sequences(row=torch.arange(len(tokens)))
        route_NLK = torch.full((tokens.num_tokens, self.layers, self.top_k), NO_EXPERT)

        def compute(model: nn.Module, micro: Batch) -> Tensor:
            if not self._records:
                with self._replayed(micro, packs(model)):
                    return policy_logprobs(model, micro, temperature)
            with self._record() as recorded:
                logprob_N = policy_logprobs(model, micro, temperature)
            route_RLK = torch.stack([recorded[layer] for layer in range(self.layers)], 1)
            is_read_N, state_N = _states(micro, packs(model))
            position_N = tokens.token_index(micro["row"].to(tokens.lengths.device))
            route_NLK[position_N[is_read_N.cpu()]] = route_RLK[state_N].cpu()
            return logprob_N

        logprob_N = self._engine.forward(numbered, compute)
        if not self._records:
            return Batch(tokens.lengths, {"logprob": logprob_N})
        return Batch(tokens.lengths, {"logprob": logprob_N} | to_columns(route_NLK, self.experts))

    # --- training passes

    def replaying(self, loss_fn: LossFunction) -> LossFunction:
        """Return `loss_fn` with passes that replay the routes of the batch. A batch without routes is unchanged.

        The metric `routes_differ_share` is added: the share of trained tokens for which, in at least one layer, the
        router would now select other experts than the replayed ones.
        """

        def compute(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
            self._given[True] = None
            if not route_columns(micro.per_token):
                return loss_fn(model, micro, totals)
            is_packed = packs(model)
            given_LRK = self._given[True] = self._rows(micro, is_packed)
            with self._record() as recorded:
                output = loss_fn(model, micro, totals)
            if given_LRK is None:
                return output
            own_LRK = torch.stack([recorded[layer] for layer in range(self.layers)])
            is_other_LRK = own_LRK.sort(-1).values != given_LRK.sort(-1).values
            is_other_R = (is_other_LRK & (given_LRK != NO_EXPERT)).any(-1).any(0)
            is_read_N, state_N = _states(micro, is_packed)
            # The state of a token predicts the next one, which is the token that is trained.
            is_trained_N = micro["action_mask"].roll(-1)[is_read_N]
            share = (is_other_R[state_N] & is_trained_N).sum() / max(1, totals.tokens)
            return LossOutput(output.loss, output.metrics | {"routes_differ_share": share})

        return compute

    @contextmanager
    def _record(self) -> Iterator[dict[int, Tensor]]:
        """Context manager that collects the routers' own selections by layer, [R, K] each."""
        recorded: dict[int, Tensor] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    @contextmanager
    def _replayed(self, micro: Batch, is_packed: bool) -> Iterator[None]:
        self._given[False] = self._rows(micro, is_packed)
        try:
            yield
        finally:
            self._given[False] = None

    def _rows(self, micro: Batch, is_packed: bool) -> Tensor | None:
        """Return the routes of a micro-batch in the order of the model's rows, [L, R, K], or None if no token
        is read.
        """
        is_read_N, state_N = _states(micro, is_packed)
        if not len(state_N):
            return None
        route_NLK = from_columns(micro.per_token, self.layers, self.top_k, self.experts)
        rows = len(state_N) if is_packed else len(micro) * (int(micro.lengths.max()) - 1)
        given_RLK = route_NLK.new_full((rows, self.layers, self.top_k), NO_EXPERT)
        given_RLK[state_N] = route_NLK[is_read_N]
        return given_RLK.transpose(0, 1)


def _states(micro: Batch, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens that the model reads, and the rows of their states.

    The last token of a sequence predicts nothing and is not read, except as padding; see `components/models/causal.py`.

    Returns:
        [N] bool; [M] int64 index of a row for each token that is read.
    """
    position_N = micro.packed().positions
    is_read_N = position_N < micro.lengths[micro.sequence_ids] - 1
    if is_packed:
        return is_read_N, torch.arange(int(is_read_N.sum()), device=is_read_N.device)
    width = int(micro.lengths.max()) - 1
    return is_read_N, (micro.sequence_ids * width + position_N)[is_read_N]
