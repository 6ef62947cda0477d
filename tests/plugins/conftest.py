"""Fixtures for the tests of plug-ins: tiny models, and packages of other projects that provide plug-ins."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from components import registry
from tests.components.conftest import other_tied_model, other_untied_model, tied_model, untied_model

__all__ = ["other_tied_model", "other_untied_model", "tied_model", "untied_model"]

InstallPackage = Callable[[str, Mapping[str, str]], Path]


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallPackage]:
    """Return a function that installs a package with an entry point in `troupe.plugins`, for the duration of a test.

    It takes the name of the package and the texts of its files, `__init__.py` with PROVIDES among them.
    """
    site = tmp_path / "site-packages"
    site.mkdir()
    names: list[str] = []

    def install(name: str, files: Mapping[str, str]) -> Path:
        metadata = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            "entry_points.txt": f"[{registry.GROUP}]\n{name} = {name}\n",
        }
        # Another test may have loaded a file of the same name as a module.
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        for folder, texts in ((site / name, files), (site / f"{name}-1.0.dist-info", metadata)):
            folder.mkdir()
            for file, text in texts.items():
                (folder / file).write_text(text, encoding="utf-8")
        names.append(name)
        registry._provided.cache_clear()
        return site / name

    monkeypatch.syspath_prepend(site)
    yield install
    registry._provided.cache_clear()
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]
