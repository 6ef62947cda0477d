"""Tasks of the library reasoning-gym, with their verifiers.

`data.path=reasoning_gym:<task>` loads it, and `reward.source=reasoning_gym` for the labels of such rows.
"""

PROVIDES = {
    "data source": {"reasoning_gym": "rows:ReasoningGymSource"},
    "scorer": {"reasoning_gym": "scorer:reasoning_gym_score"},
}
