"""Base of the roles: each waits for calls until the trainer ends the job."""

import threading

from core import rpc

from . import remote_call


@rpc
def version_of_common() -> str:
    """Exported, because the entry points import it."""
    return "1"


class BaseActor:
    """A plain class, because the roles of the guide have no base class of the library."""

    def __init__(self) -> None:
        self.model_path = ""
        self.experience: list[int] = []
        self.saved: list[str] = []
        self._end = threading.Event()

    def run(self) -> None:
        self._end.wait()

    def init(self, model_path: str) -> str:
        self.model_path = model_path
        return model_path

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self._end.set()
