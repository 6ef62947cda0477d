"""Watch of the collectives of each rank: names the rank that others wait for. Every group of ranks uses it."""

PROVIDES = {"process group": {"guard": "guard:guarded"}}
