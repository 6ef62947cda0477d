"""The program that keeps the report of a run current, and the files that it reads."""

PROGRAM = __name__.rpartition(".")[0]
"""Name of the package for `python -m`. See `training.launch.launch.reporting`."""
RUN_FILES = ("metrics.jsonl", "events.jsonl", "summary.json", "plan.json")
"""Files of a run from which the report is made, besides the rollouts."""
