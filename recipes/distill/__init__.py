"""On-policy distillation: the student samples, and a frozen teacher scores every token that it sampled.

One trainer drives the actor (the student, which is trained), the rollout engines that sample from it, and the teacher.
"""
