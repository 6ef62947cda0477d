"""Multi-turn RL: policy gradients over episodes in an environment.

One trainer drives the actor (the policy that is trained) and the rollout engines, which run its episodes. A frozen
reference model is added if a KL penalty is set.
"""
