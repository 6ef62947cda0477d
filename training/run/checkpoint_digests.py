"""Digests of the files of a checkpoint, to detect damage on the disk before a run resumes from it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

STATE_FILE = Path("state", "trainer.json")
DIGESTS_FILE = Path("state", "digests.json")
THREADS = 4
_BLOCK_BYTES = 2**20 * 4


class Digests:
    """Computes the digests of the files of a folder in background threads.

    Args:
        folder: folder to read. Its files must not change until `write` returns.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(THREADS)
        self._pending = {name: self._pool.submit(digest_of, folder / name) for name in files_of(folder)}
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


def files_of(folder: Path) -> list[str]:
    """Return the relative paths of the regular files below a folder, without the file of digests and without links."""
    # The target of a link belongs to another checkpoint or to the user, who may change it without damage to this one.
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = [str(path.relative_to(folder)) for path in paths]
    return sorted(name for name in names if name != str(DIGESTS_FILE))


def digest_of(file: Path) -> str:
    """Return the digest of a file as 32 hexadecimal digits. It detects damage, not tampering."""
    digest = xxh3_128()
    # Blocks of 4 MiB are read without Python's buffer, which would only copy them once more.
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
