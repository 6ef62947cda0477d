"""A process of vLLM ends when the process of its engine is killed, whatever it waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from multiprocessing.queues import SimpleQueue

from components.generate.engine_start import ENGINE_PID
from plugins.vllm_weights.worker import end_with_engine
from tests.components.helpers.ranks import FORKS


def wait_forever(engine: int, ready: SimpleQueue[str]) -> None:
    """Wait without a limit, as in a collective whose other members are gone."""
    os.environ[ENGINE_PID] = str(engine)
    end_with_engine()
    ready.put("waits")
    threading.Event().wait()


def test_a_worker_of_a_killed_engine_ends_although_it_waits_without_a_limit() -> None:
    engine = subprocess.Popen(["sleep", "600"])
    ready = FORKS.SimpleQueue()
    worker = FORKS.Process(target=wait_forever, args=(engine.pid, ready), daemon=True)
    worker.start()
    assert ready.get() == "waits"
    assert worker.is_alive()
    engine.kill()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL
    engine.wait()
