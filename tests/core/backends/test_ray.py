"""Clean-up of a Ray cluster that did not start or did not shut down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from core.backends.ray import _end_all_of

OPENS_AND_CLOSES = """
print("started", flush=True)
while True:
    files = [open("/dev/null") for _ in range(200)]
    for file in files:
        file.close()
"""


def test_a_process_whose_command_line_names_the_folder_is_killed_while_it_opens_and_closes_files(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", OPENS_AND_CLOSES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        try:
            _end_all_of(tmp_path)
            assert process.wait(5) < 0
        finally:
            process.kill()
