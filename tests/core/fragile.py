"""Workloads that die or hang at a moment set by a file `<moment>-<role>-<rank>` in the job's folder."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from core import BaseTrainer, BaseWorkload, beat, trainer_invocation

LATE_S = 12.0
"""Timeout in seconds of methods that return immediately, after which a hung worker is detected."""


class StopsEarly:
    """Part of a configuration that stops the process of TOOL-0 once, when it is unpickled during the start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if Path("/proc/self/fd/1").readlink().name == "tool-0.log":
            with contextlib.suppress(FileExistsError):
                (self.folder / "stopped").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGSTOP)


def strike(folder: Path, moment: str, worker: BaseWorkload) -> None:
    """Die or hang as the next letter in the file of this moment says, and remove the letter.

    `k` kills the process, `s` stops it, `l` loops for ever, `m` raises MemoryError (which is fatal), and `b` is busy
    for longer than LATE_S.
    """
    file = folder / f"{moment}-{worker.name.lower()}"
    with contextlib.suppress(FileNotFoundError):
        letters = file.read_text()
        if letters[:1]:
            file.write_text(letters[1:])
        if letters[:1] == "l":
            while True:
                time.sleep(1)
        elif letters[:1] == "m":
            raise MemoryError("no room for 7 pages\nand more")
        elif letters[:1] == "b":
            began = time.monotonic()
            while time.monotonic() < began + 1.5 * LATE_S:
                beat()
                time.sleep(0.1)
        elif letters[:1]:
            os.kill(os.getpid(), {"k": signal.SIGKILL, "s": signal.SIGSTOP}[letters[0]])


class Fragile(BaseWorkload):
    """A worker whose state consists of the calls that it has received, as an engine's consists of its weights."""

    def __init__(self, master_handle: Any = None, config: Any = None) -> None:
        super().__init__(master_handle, config)
        self.folder: Path = self.config["folder"]
        self.seen: list[Any] = []
        strike(self.folder, "construct", self)

    def setup(self) -> None:
        strike(self.folder, "setup", self)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    @trainer_invocation(idempotent=True, replay="last")
    def load(self, value: str) -> None:
        self.seen.append(("load", value))
        strike(self.folder, "load", self)

    @trainer_invocation(idempotent=True, replay="last")
    def receive(self, version: int) -> None:
        self.seen.append(("receive", version))
        strike(self.folder, "receive", self)

    @trainer_invocation(replay="last")
    def tune(self, value: int) -> None:
        if value < 0:
            raise ValueError("below zero")
        self.seen.append(("tune", value))

    @trainer_invocation
    def forget(self) -> None:
        self.seen.append(("forget",))

    @trainer_invocation(idempotent=True)
    def double(self, items: list[int]) -> list[int]:
        strike(self.folder, "double", self)
        return [2 * item for item in items]

    @trainer_invocation
    def once(self, items: list[int]) -> list[int]:
        strike(self.folder, "once", self)
        return items

    @trainer_invocation(idempotent=True, is_async=True, timeout=LATE_S, end_on_timeout=True)
    def quick(self) -> int:
        strike(self.folder, "quick", self)
        return self.rank

    @trainer_invocation(is_async=True, timeout=LATE_S, end_on_timeout=True)
    def quick_once(self) -> int:
        strike(self.folder, "quick_once", self)
        return self.rank

    @trainer_invocation(blocking=False)
    def save(self, step: int) -> int:
        time.sleep(0.5)
        strike(self.folder, "save", self)
        (self.folder / f"saved-{self.name}-{step}").write_text("whole")
        return step

    @trainer_invocation
    def story(self) -> tuple[int, list[Any]]:
        return self.attempt, self.seen

    @trainer_invocation
    def pid(self) -> int:
        return os.getpid()


class Script(BaseTrainer):
    """Trainer that runs the function in the configuration and writes its return value to a file."""

    def init(self) -> None:
        strike(self.config["folder"], "init", self)

    def fit(self) -> None:
        folder: Path = self.config["folder"]
        (folder / "result").write_text(repr(self.config["script"](self)))
        strike(folder, "end", self)
