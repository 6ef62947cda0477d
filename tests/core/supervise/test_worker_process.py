"""A worker process is assigned its devices before any module may have initialised CUDA."""

from __future__ import annotations

import os

import pytest
import torch

from core.supervise.worker_process import WorkerProcess


@pytest.mark.parametrize("initialised", [True, False])
def test_devices_that_come_after_cuda_was_initialised_raise_an_error(
    monkeypatch: pytest.MonkeyPatch, initialised: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = WorkerProcess.__new__(WorkerProcess)
    if initialised:
        # CUDA has read the variable, so the process would have no GPU, without any sign of it.
        with pytest.raises(AssertionError, match="initialised CUDA on import"):
            process.construct({}, {}, ["1", "3"])
    else:
        assert process.construct({}, {}, ["1", "3"]) == {}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
