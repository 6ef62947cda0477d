"""Checks before a run starts: limits of the shell, folders of the machine, free space, and a trial export."""

PROVIDES = {"start check": {"machine": "limits:check_machine", "writes": "writes:check_writes"}}
