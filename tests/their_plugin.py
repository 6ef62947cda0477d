"""A third-party plug-in, which adds a group of options and names of another system."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components import registry

INIT = """
PROVIDES = {
    "options": {"model.attn_implementation=theirs": "options:TheirOptions"},
    "command adapter": {"theirs.train": "options:train"},
}
"""
OPTIONS = '''
from dataclasses import dataclass

from components.ranges import Count
from training.options.adapter import Adapter
from training.options.schema import Options


@dataclass(kw_only=True)
class TheirOptions(Options, group="theirs"):
    """Options of their kernels."""

    speed: Count = 3
    """Speed in tokens per second."""


def train() -> Adapter:
    return Adapter.of_names({"there.seed": "seed"})
'''


@pytest.fixture
def their_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the plug-in as a package with an entry point."""
    files = {
        "troupe_theirs/__init__.py": INIT,
        "troupe_theirs/options.py": OPTIONS,
        "troupe_theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: troupe_theirs\nVersion: 1.0\n",
        "troupe_theirs-1.0.dist-info/entry_points.txt": "[troupe.plugins]\ntheirs = troupe_theirs\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    registry._provided.cache_clear()
    yield
    registry._provided.cache_clear()
    for name in ("troupe_theirs", "troupe_theirs.options"):
        sys.modules.pop(name, None)
