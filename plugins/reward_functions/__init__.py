"""Reward functions of a user's file, in the signatures of OpenRLHF, TRL and verl.

`reward.source=FILE.py` loads them.
"""

PROVIDES = {
    "reward functions": {
        "check": "functions:reward_function",
        "file": "functions:code_of_file",
        "by names": "functions:by_names",
        "parameters of one": "functions:OF_ONE",
    },
}
