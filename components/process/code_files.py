"""Loading of a user's Python file as a module."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_file(path: Path) -> ModuleType:
    """Run a file as a module, under the same name in every process."""
    # The name is a hash of the path, so that it cannot be the name of an installed package.
    name = f"troupe_file_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Registered before the file runs, because dataclasses and pickle look up their module meanwhile.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
