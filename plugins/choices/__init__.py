"""Choice of the options that a user leaves to the machine, by the memory plan of a run on GPUs.

No option loads it. A run uses it if the folder exists.
"""

PROVIDES = {"plan": {"choices": "choose:choose"}}
