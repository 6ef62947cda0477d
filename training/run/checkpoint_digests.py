"""Digests of a checkpoint's files, so that damage on the disk is found before a run resumes from it."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

STATE_FILE = Path("state", "trainer.json")
DIGESTS_FILE = Path("state", "digests.json")
_THREADS = 4
_BLOCK_BYTES = 2**20 * 4


class Digests:
    """Reads the files of a folder in threads, beside whatever else the caller does with them.

    Args:
        folder: nothing in it changes before `write`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_THREADS)
        self._pending = {name: self._pool.submit(_digest, folder / name) for name in _files(folder)}
        self._pool.shutdown(wait=False)

    def write(self) -> Path:
        """Wait for all of them and write them down. Returns the file.

        Raises:
            OSError: a file cannot be read, or the disk is full.
        """
        found = {name: pending.result() for name, pending in self._pending.items()}
        file = self._folder / DIGESTS_FILE
        file.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        return file


def damage(folder: Path) -> str | None:
    """Compare the files of a checkpoint with what was written.

    Returns:
        What is wrong, in words; None where all is as it was written. Files that were added are passed over.
    """
    files = [*_files(folder), str(DIGESTS_FILE)]
    if not (folder / DIGESTS_FILE).is_file():
        # Without a state nothing is resumed from it, whatever else it holds.
        return f"{DIGESTS_FILE} is missing" if (folder / STATE_FILE).exists() else None
    facts = []
    for name in files:
        fact = (folder / name).stat()
        facts.append((name, fact.st_size, fact.st_mtime_ns))
    return _damage(folder, tuple(facts))


@functools.lru_cache(maxsize=16)
def _damage(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """See `damage`. Files whose sizes and times are those of an earlier call are not read again."""
    written = _json_in(folder / DIGESTS_FILE)
    if written is None:
        return f"{DIGESTS_FILE} is no JSON object"
    missing = sorted(written.keys() - {name for name, _, _ in files})
    if missing:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), written)
        changed = [name for name, digest in zip(written, digests, strict=True) if digest != written[name]]
    if changed:
        return f"{changed[0]} is not as it was written"
    return None


def _json_in(file: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _files(folder: Path) -> list[str]:
    """Regular files below a folder but for the digests; what a link leads to is not of the checkpoint."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = [str(path.relative_to(folder)) for path in paths]
    return sorted(name for name in names if name != str(DIGESTS_FILE))


def _digest(file: Path) -> str:
    """32 hexadecimal digits. It finds damage, not forgery."""
    found = xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
