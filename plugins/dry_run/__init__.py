"""Dry run of a command: all its checks, and its plan as JSON and as a table."""

PROVIDES = {"dry run": {"plan": "plan:show_plan", "models": "plan:absent_models"}}
