"""A copy of a version on this machine, for several readers of the whole version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from components.weights.folder import VersionWriter, prove
from components.weights.publisher import WeightHandle, open_handle
from components.weights.transport import RemoteVersion


@contextmanager
def nearby(handle: WeightHandle, directory: Path) -> Iterator[WeightHandle]:
    """Context manager that provides a copy of a version on this machine, so that several readers of the whole version,
    such as the parts of one engine, transfer it over the network once.

    Args:
        handle: handle of the version. It is returned unchanged if the version is on this machine.
        directory: directory that only the caller uses, usually below /dev/shm. It is removed at the end.
    """
    opened = open_handle(handle, False)
    if not isinstance(opened, RemoteVersion):
        yield handle
        return
    # A predecessor that was killed during a transfer has left files here, which would count as used space.
    shutil.rmtree(directory, ignore_errors=True)
    writer = VersionWriter([directory], f"weights-{handle.version:08d}", bucket_bytes=2**28, headroom_bytes=2**24)
    try:
        for name, tensor in opened.tensors:
            writer.write(name, tensor)
        written = writer.finish(prove(handle.token, "folder"), opened.digests)
        yield replace(handle, path=str(written.folder), address=None)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
