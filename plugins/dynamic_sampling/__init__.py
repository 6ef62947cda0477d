"""Dynamic sampling (DAPO): replaces prompts without a learning signal before a step is trained on.

`algorithm.filter_range` loads it, as do the options of other recipes that set the same value.
"""

PROVIDES = {"rollout strategy": {"dynamic_sampling": "strategy:DynamicSampling"}}
