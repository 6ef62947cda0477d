"""Memory plan: computes the memory of each process before a run starts, and refuses a run that cannot fit.

No option loads it; it is used wherever it is there.
"""

PROVIDES = {"plan": {"memory": "memory_plan:plan_memory"}}
