"""Dynamic sampling (DAPO): prompts whose responses teach nothing are replaced before the step is trained on.

`algorithm.filter_range` loads it, and the options of other recipes that stand for it.
"""

PROVIDES = {"rollout strategy": {"dynamic_sampling": "strategy:DynamicSampling"}}
