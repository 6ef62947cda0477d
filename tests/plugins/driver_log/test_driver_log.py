"""Output of libraries in the driver, which is kept off the terminal."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from plugins.driver_log.driver_log import driver_log


def test_file_descriptors_are_restored_after_success_and_errors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), driver_log(tmp_path / "logs" / "driver.log", said.append, (1, 2)):
        os.write(1, b"to the log\n")
        os.write(2, b"this too\n")
        logging.getLogger("tests").warning("of %s own", "our")
        raise KeyboardInterrupt
    os.write(1, b"out\n")
    os.write(2, b"err\n")
    assert capfd.readouterr() == ("out\n", "err\n")
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert log.startswith("to the log\nthis too\n")
    assert said == ["warning: of our own"]


def test_output_stays_on_the_terminal_if_the_log_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file")
    with driver_log(tmp_path / "logs" / "driver.log", print, (2,)):
        os.write(2, b"err\n")
    assert capfd.readouterr().err.endswith("err\n")


def test_a_full_disk_for_the_driver_log_gives_one_line_and_hides_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with pytest.raises(RuntimeError, match="the reason"), driver_log(Path("/dev/full"), said.append, (2,)):
        for number in range(3):
            logging.getLogger("project").warning("warning %d", number)
        raise RuntimeError("the reason")
    assert [line for line in said if "warning: warning" not in line] == [
        "warning: 3 warnings could not be written to /dev/full (No space left on device)"
    ]
    assert "Traceback" not in capfd.readouterr().err
