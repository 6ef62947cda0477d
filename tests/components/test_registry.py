"""Plug-ins are loaded from the folder and by entry points, and a missing one is named in the error."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from components import registry
from components.registry import MissingPlugin
from tests.messages import says


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package of another project with an entry point, and return the objects that it provides."""
    files = {
        "theirs/__init__.py": 'PROVIDES = {"colour": {"red": "paint:RED"}}',
        "theirs/paint.py": "RED = 3",
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": "[troupe.plugins]\ntheirs = theirs\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    registry._provided.cache_clear()
    yield tmp_path
    registry._provided.cache_clear()


def test_a_package_with_an_entry_point_provides_by_kind_and_name(installed: Path) -> None:
    assert registry.names("colour") == ["red"]
    assert registry.load("colour", "red") == registry.find("colour", "red") == 3
    assert registry.find("colour", "blue") is None
    message = says(
        "paint.colour=blue: no plug-in in plugins/ or among the installed packages provides it; provided: red"
    )
    with pytest.raises(MissingPlugin, match=message):
        registry.load("colour", "blue", "paint.colour")


def test_two_plug_ins_with_the_same_name_are_refused(installed: Path) -> None:
    (installed / "others").mkdir()
    (installed / "others" / "__init__.py").write_text('PROVIDES = {"colour": {"red": "paint:RED"}}')
    entries = "[troupe.plugins]\ntheirs = theirs\nothers = others\n"
    (installed / "theirs-1.0.dist-info" / "entry_points.txt").write_text(entries)
    with pytest.raises(ValueError, match=says("others and theirs both provide the colour 'red'; remove one")):
        registry.names("colour")
