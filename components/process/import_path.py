"""The import path of child processes that run modules of this project."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[__name__.count(".")]
"""Folder from which this code is imported: the root of a clone, or the folder into which the wheel is installed."""


def import_path(inherited: str | None) -> str:
    """Return the PYTHONPATH with which a child process imports this code. `inherited` is the parent's PYTHONPATH."""
    folders = [inherited]
    site_folders = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    # Python searches its site folders anyway. On PYTHONPATH they would come before the standard library.
    if PROJECT not in site_folders:
        folders.insert(0, str(PROJECT))
    return os.pathsep.join(filter(None, folders))


def with_our_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds our modules before all others, in any working directory."""
    return {**environment, "PYTHONPATH": import_path(environment.get("PYTHONPATH"))}
