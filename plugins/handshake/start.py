"""Start of the trainer's check of the channels."""

from __future__ import annotations

from typing import Any

from plugins.handshake.settings import limit_of


def check_if_used(trainer: Any, config: Any) -> None:
    """Check the channels of a job if its handshake is used; see `check` in channels.py."""
    if limit_of(config):
        # Imported here: a run in local mode does without Ray, whose import takes 0.4 s.
        from plugins.handshake.channels import check

        check(trainer, config)
