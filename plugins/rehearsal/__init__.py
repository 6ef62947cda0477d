"""Rehearsal of a cluster's command on this machine: `rehearse=true` loads it."""

PROVIDES = {"rehearsal": {"command": "command:rehearse"}}
