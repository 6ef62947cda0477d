"""The program that keeps the report of a run current, and the files that it reads."""

PROGRAM = __name__.rpartition(".")[0]
"""Name of the package for `python -m`; see `training.launch.launch.reporting`."""
RUN_FILES = ("metrics.jsonl", "events.jsonl", "summary.json", "plan.json")
"""Files of a run that the report is made of, besides the rollouts."""
