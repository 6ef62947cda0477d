"""Print the mean seconds of a digest of 1 MiB of host memory for each number of threads, as a JSON list.

    python scripts/digest_seconds.py 200 0 1 4 16     at most 200 digests each, with 1, 4 and 16 threads
    python scripts/digest_seconds.py 200 16 1 4 16    beside a process with 16 busy threads

check_gpu_sync.py runs it with several settings of OpenMP, which libgomp reads when a process starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from components.weights.digest import digest  # noqa: E402 (the project may not be installed)

LIMIT_S = 3.0
"""Maximum time of the digests with one number of threads in seconds."""
BUSY = """
import torch
torch.set_num_threads({threads})
matrix = torch.randn(2048, 2048)
print("ready", flush=True)
while True:
    matrix @ matrix
"""
"""Program that keeps a number of threads busy."""


def digest_seconds(most: int, threads: Sequence[int]) -> list[float]:
    """Return the mean seconds for each number of threads.

    Args:
        most: maximum number of digests per number of threads. LIMIT_S limits them too.
        threads: numbers of threads.
    """
    tensor = torch.ones(2**18, dtype=torch.int32)
    means: list[float] = []
    for thread_count in threads:
        torch.set_num_threads(thread_count)
        digest(tensor)  # starts the threads
        began = time.perf_counter()
        count = 0
        while count < most and time.perf_counter() < began + LIMIT_S:
            digest(tensor)
            count += 1
        means.append((time.perf_counter() - began) / count)
    return means


def main() -> None:
    """Measure with the numbers of the command line."""
    most, busy_threads, *threads = map(int, sys.argv[1:])
    if not busy_threads:
        print(json.dumps(digest_seconds(most, threads)))
        return
    program = [sys.executable, "-c", BUSY.format(threads=busy_threads)]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            print(json.dumps(digest_seconds(most, threads)))
        finally:
            busy.kill()


if __name__ == "__main__":
    main()
