"""REINFORCE++: policy gradients with whitened returns, without a critic.

One trainer drives the actor (the policy that is trained), the rollout engines that sample from it, and a frozen
reference model for the KL penalty in the reward.
"""
