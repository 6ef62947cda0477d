"""Digests of the files of a checkpoint, to detect damage on the disk before a run resumes from it."""

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
    """Computes the digests of the files of a folder in background threads.

    Args:
        folder: folder to read. Its files must not change until `write` returns.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_THREADS)
        self._pending = {name: self._pool.submit(_digest, folder / name) for name in _files(folder)}
        # No more files follow. The threads end by themselves after the last one.
        self._pool.shutdown(wait=False)

    def write(self) -> Path:
        """Wait for all digests, and write them to a file. Return its path.

        Raises:
            OSError: a file cannot be read, or the disk is full.
        """
        digests = {name: pending.result() for name, pending in self._pending.items()}
        file = self._folder / DIGESTS_FILE
        file.write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")
        return file


def damage(folder: Path) -> str | None:
    """Compare the files of a checkpoint with their digests.

    Returns:
        A description of the first difference, or None if there is none. Files that were added later are ignored.
    """
    files = [*_files(folder), str(DIGESTS_FILE)]
    if not (folder / DIGESTS_FILE).is_file():
        # A folder without a state is an exported model. No run resumes from it, so missing digests are no damage.
        return f"{DIGESTS_FILE} is missing" if (folder / STATE_FILE).exists() else None
    facts = []
    for name in files:
        fact = (folder / name).stat()
        facts.append((name, fact.st_size, fact.st_mtime_ns))
    # The checks before a run and the trainer ask for the same checkpoint, and digests take seconds per GB.
    return _damage(folder, tuple(facts))


@functools.lru_cache(maxsize=16)
def _damage(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """See `damage`. The result is cached by size and modification time, so unchanged files are read only once."""
    written = _json_in(folder / DIGESTS_FILE)
    if written is None:
        return f"{DIGESTS_FILE} is no JSON object"
    missing = sorted(written.keys() - {name for name, _, _ in files})
    if missing:
        return f"{missing[0]} is missing"
    # A thread that waits for the disk does not hold the interpreter lock, so several files are read at once.
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), written)
        changed = [name for name, digest in zip(written, digests, strict=True) if digest != written[name]]
    if changed:
        return f"the content of {changed[0]} has changed since it was written"
    return None


def _json_in(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _files(folder: Path) -> list[str]:
    """Return the relative paths of the regular files below a folder, without the file of digests and without links."""
    # The target of a link belongs to another checkpoint or to the user, who may change it without damage to this one.
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = [str(path.relative_to(folder)) for path in paths]
    return sorted(name for name in names if name != str(DIGESTS_FILE))


def _digest(file: Path) -> str:
    """Return the digest of a file as 32 hexadecimal digits. It detects damage, not tampering."""
    digest = xxh3_128()
    # Blocks of 4 MiB are read without Python's buffer, which would only copy them once more.
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
