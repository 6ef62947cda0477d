"""GRPO: group relative policy optimization.

One trainer drives the actor (the policy that is trained), the rollout engines that sample from it, and a frozen
reference model if a KL penalty is set.
"""
