"""Handshake: checks of the channels between the processes of a job before a model is loaded.

`placement.handshake_timeout` loads it, and every job on several machines or GPUs.
"""

PROVIDES = {"handshake": {"group": "group:opened", "channels": "start:check_if_used"}}
