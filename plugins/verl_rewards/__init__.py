"""Lets a user's reward file import verl's reward functions, if verl is not installed."""

PROVIDES = {"reward code": {"verl": "standins:with_standins"}}
