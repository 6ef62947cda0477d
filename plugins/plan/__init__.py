"""Memory plan: computes the memory of each process before a run starts, and refuses a run that cannot fit.

No option loads it. A run uses it if the folder exists.
"""

PROVIDES = {"plan": {"memory": "memory_plan:plan_memory", "use": "collect:estimate_use", "pools": "pools:gpu_pools"}}
