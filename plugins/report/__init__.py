"""report.html: a run in one file that opens without a network, made of what the run writes."""

RUN_FILES = ("metrics.jsonl", "events.jsonl", "summary.json", "plan.json")
"""What it is made of, besides the rollouts."""
