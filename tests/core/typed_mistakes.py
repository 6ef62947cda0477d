"""Mistakes in the use of groups, one per line. test_typing.py checks that pyright reports each by the noted rule."""

from core import BaseTrainer, RoleGroup, WorkerGroup, register, trainer_invocation
from recipes.dpo.trainer import DPOTrainer
from recipes.grpo.trainer import GRPOTrainer
from recipes.multi_turn.trainer import MultiTurnTrainer
from recipes.openrlhf_ppo import remote_call
from recipes.reinforce_pp.trainer import ReinforceTrainer
from recipes.reward_model.trainer import RewardModelTrainer
from recipes.sft.trainer import SFTTrainer
from recipes.verl_ppo.trainer import VerlPPOTrainer
from tests.core.typed_uses import Actor, Critic, Keeper, Model, Options, publish, score


class Wrong(Model[Options]):
    """A role."""

    def update(self, batch: list[int], step: int = 0) -> dict[str, float]:  # reportIncompatibleVariableOverride
        return {"rate": self.config.learning_rate}  # reportAttributeAccessIssue

    @trainer_invocation
    def version(self) -> int:  # reportIncompatibleVariableOverride
        return self.raank  # reportAttributeAccessIssue

    @trainer_invocation(blocking=False)
    def load(self, path: int) -> object:  # reportIncompatibleVariableOverride
        return path

    @trainer_invocation(target="rank0")  # reportCallIssue, reportArgumentType
    def in_small_letters(self) -> None: ...

    @trainer_invocation(block=False)  # reportCallIssue
    def with_no_such_option(self) -> None: ...

    @register(dispatch_mode="ONE_TO_ALL")  # reportCallIssue, reportArgumentType
    def with_no_such_mode(self) -> None: ...


class Trainer(BaseTrainer):
    """A trainer with wrong calls."""

    RG_ACTOR: RoleGroup[Actor]
    actor_wg: WorkerGroup[Actor]
    critic_wg: WorkerGroup[Critic] | None

    def init(self) -> None:
        self.actor_wg = WorkerGroup("actor", Critic)  # reportAttributeAccessIssue
        self.critic_wg.update([1])  # reportOptionalMemberAccess
        self.RG_ACTORS.update([1])  # reportAttributeAccessIssue
        self.infos("a typo")  # reportAttributeAccessIssue

    def fit(self) -> None:
        self.RG_ACTOR.updat([1])  # reportAttributeAccessIssue
        self.RG_ACTOR.update("a")  # reportArgumentType
        self.RG_ACTOR.update()  # reportCallIssue
        self.RG_ACTOR.update([1], 2, 3)  # reportCallIssue
        self.RG_ACTOR.update([1], stpe=2)  # reportCallIssue
        self.RG_ACTOR.on(1).updat([1])  # reportAttributeAccessIssue
        self.RG_ACTOR.on("1").update([1])  # reportArgumentType
        self.RG_ACTOR.inner()  # reportCallIssue
        self.RG_ACTOR.update([1])["rate"]  # reportCallIssue, reportArgumentType
        self.RG_ACTOR.version()[0]  # reportIndexIssue
        self.RG_ACTOR.load("model")[0]  # reportIndexIssue
        later = self.RG_ACTOR.version_later() + 1  # reportOperatorIssue
        self.info(str(later))
        self.RG_ACTOR.count([1]).result()  # reportAttributeAccessIssue
        self.RG_ACTOR.count("a")  # reportArgumentType
        self.RG_ACTOR.first(1)  # reportArgumentType
        self.RG_ACTOR.joined("a", "b")  # reportCallIssue

    def call_stubs(self) -> None:
        """Call stubs directly and through the group."""
        publish("1")  # reportArgumentType
        publish(1, digest=True)  # reportCallIssue
        self.RG_ACTOR.call(publish, "1")  # reportCallIssue, reportArgumentType
        self.RG_ACTOR.call_rank0(publish, 1, 2)  # reportCallIssue
        self.RG_ACTOR.call_batch(score, 1, ["a"])  # reportCallIssue
        RoleGroup("actor").call(publish)  # reportCallIssue

    def call_worker_groups(self) -> None:
        """Call worker groups."""
        self.actor_wg.doubel([1])  # reportAttributeAccessIssue
        self.actor_wg.double(1)  # reportArgumentType
        self.actor_wg.begin(7).upper()  # reportAttributeAccessIssue
        self.actor_wg.begin_later(7)[0]  # reportIndexIssue
        self.actor_wg.seed()[0]  # reportIndexIssue
        self.actor_wg.double_later([1])[0]  # reportIndexIssue
        Keeper(self.actor_wg).group.doubel([1])  # reportAttributeAccessIssue


def policies(grpo: GRPOTrainer, reinforce: ReinforceTrainer, multi_turn: MultiTurnTrainer) -> None:
    """Call groups of recipes that train a policy."""
    grpo.RG_ACTOR.updat(None)  # reportAttributeAccessIssue
    grpo.RG_ACTOR.update(None, 1)  # reportArgumentType
    grpo.RG_ACTOR.save_state()  # reportCallIssue
    grpo.RG_ROLLOUT.generat()  # reportAttributeAccessIssue
    grpo.RG_REFERENCE.logprobs(1)  # reportArgumentType
    reinforce.RG_ACTOR.logprobs().per_token()  # reportCallIssue
    reinforce.RG_ROLLOUT.collect("soon")  # reportCallIssue
    multi_turn.RG_ACTOR.load("model", "2")  # reportArgumentType
    multi_turn.RG_REFERENCE.load("model", 2)  # reportCallIssue
    remote_call.actor_update(1)  # reportCallIssue


def models(sft: SFTTrainer, dpo: DPOTrainer, reward: RewardModelTrainer, verl: VerlPPOTrainer) -> None:
    """Call groups of the other recipes."""
    sft.RG_ACTOR.train_step(None)  # reportArgumentType
    sft.RG_ACTOR.logprobs_of(None)  # reportAttributeAccessIssue
    dpo.RG_ACTOR.load_reference()  # reportCallIssue
    reward.RG_REWARD.score("a")  # reportArgumentType
    verl.actor_wg.update_critic()  # reportAttributeAccessIssue
    verl.rollout_wg.generate_sequences("a")  # reportCallIssue
    verl.critic_wg.update_critic()  # reportOptionalMemberAccess, reportCallIssue
