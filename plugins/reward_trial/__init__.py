"""Trial of a user's rewards before a run starts."""

PROVIDES = {"reward trial": {"rewards": "trial:try_rewards", "code": "trial:try_code"}}
