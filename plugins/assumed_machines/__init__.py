"""Machines that a dry run plans for instead of this one."""

PROVIDES = {"assumed machines": {"check": "machines:check", "assuming": "machines:assuming_text"}}
