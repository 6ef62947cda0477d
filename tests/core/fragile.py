"""Workloads that die and hang when a test wants them to: a file `<when>-<role>-<rank>` in the job's folder says so."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from core import BaseTrainer, BaseWorkload, beat, trainer_invocation

LATE_S = 12.0
"""For who answers at once; who hangs is waited for so long."""


class StopsEarly:
    """Part of a configuration: where TOOL-0 unpacks it, before that is up, it stops the process, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if Path("/proc/self/fd/1").readlink().name == "tool-0.log":
            with contextlib.suppress(FileExistsError):
                (self.folder / "stopped").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGSTOP)


def strike(folder: Path, moment: str, worker: BaseWorkload) -> None:
    """Die or hang, once for each letter in the file of this moment: `k` is killed, `s` stopped, `l` loops, `m` has no
    memory left, which is fatal, and `b` works for longer than LATE_S.
    """
    file = folder / f"{moment}-{worker.name.lower()}"
    with contextlib.suppress(FileNotFoundError):
        how = file.read_text()
        if how[:1]:
            file.write_text(how[1:])
        if how[:1] == "l":
            while True:
                time.sleep(1)
        elif how[:1] == "m":
            raise MemoryError("no room for 7 pages\nand more")
        elif how[:1] == "b":
            began = time.monotonic()
            while time.monotonic() < began + 1.5 * LATE_S:
                beat()
                time.sleep(0.1)
        elif how[:1]:
            os.kill(os.getpid(), {"k": signal.SIGKILL, "s": signal.SIGSTOP}[how[0]])


class Fragile(BaseWorkload):
    """A worker that remembers what it was told, as an engine its weights."""

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
    """Runs the function that the test put into the configuration, and keeps what it returns."""

    def init(self) -> None:
        strike(self.config["folder"], "init", self)

    def fit(self) -> None:
        folder: Path = self.config["folder"]
        (folder / "result").write_text(repr(self.config["script"](self)))
        strike(folder, "end", self)
