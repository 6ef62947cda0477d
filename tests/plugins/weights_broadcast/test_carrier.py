"""Broadcast of weights from rank 0 to the processes of several engines, with gloo. On GPUs NCCL replaces it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.weights.carrier import CarrierSetting
from components.weights.digest import digest
from components.weights.publisher import WeightHandle, read_weights
from plugins.weights_broadcast.carrier import ATTEMPTS, BroadcastCarrier, Broadcaster, _Member, read_broadcast
from tests.components.generate.test_hf_engine import completions, named_weights, some_prompts
from tests.components.helpers.fake_gpus import FakeGPUs
from tests.components.helpers.ranks import FORKS
from tests.plugins.weights_ipc.test_carrier import BUCKET_BYTES, CPU, weights
from tests.plugins.weights_ipc.test_copies import bytes_in

Report = tuple[int, int, Any]
"""Reader, version, and the digests of the received tensors or the name of the error."""


def read(
    address: tuple[str, int], reader: int, versions: list[int], dies_after: int, reports_queue: SimpleQueue[Any]
) -> None:
    """Read some versions in an engine's process, which dies after `dies_after` tensors of the last one (0: never)."""
    for version in versions:
        digests: dict[str, str] = {}
        try:
            for name, tensor in read_broadcast(address, reader, version, timeout_seconds=20):
                digests[name] = digest(tensor)
                if version == versions[-1] and len(digests) == dies_after:
                    os._exit(9)
            reports_queue.put((reader, version, digests))
        except (OSError, RuntimeError) as error:
            reports_queue.put((reader, version, type(error).__name__))


def start(
    address: tuple[str, int], reports_queue: SimpleQueue[Any], reader: int, versions: list[int], dies: int = 0
) -> Any:
    process = FORKS.Process(target=read, args=(address, reader, versions, dies, reports_queue))
    process.start()
    return process


def expected_of(version: int) -> dict[str, str]:
    return {name: digest(tensor + version) for name, tensor in weights().items()}


def send(broadcaster: Broadcaster, version: int) -> None:
    """Send a version. All tensors pass through, even if the broadcast is aborted."""
    tensors = {name: tensor + version for name, tensor in weights().items()}
    passed = dict(broadcaster.sent(version, tensors.items(), to_host=True))
    assert {name: digest(tensor) for name, tensor in passed.items()} == expected_of(version)


def broadcaster_of(readers: int, arrival_seconds: float = 60) -> tuple[Broadcaster, tuple[str, int]]:
    """Return a broadcaster and its address."""
    broadcaster = Broadcaster(
        CPU, readers, bucket_bytes=BUCKET_BYTES, timeout_seconds=20, arrival_seconds=arrival_seconds
    )
    assert broadcaster.address is not None
    return broadcaster, broadcaster.address


def reports(reports_queue: SimpleQueue[Any], count: int) -> list[Report]:
    return sorted((reports_queue.get() for _ in range(count)), key=lambda report: report[:2])


def test_each_reader_receives_each_version_bit_for_bit() -> None:
    broadcaster, address = broadcaster_of(2)
    reports_queue = FORKS.SimpleQueue()
    processes = [start(address, reports_queue, reader, [2, 3]) for reader in (1, 2)]
    send(broadcaster, 2)
    send(broadcaster, 3)
    expected = [(reader, version, expected_of(version)) for reader in (1, 2) for version in (2, 3)]
    assert reports(reports_queue, 4) == expected
    for process in processes:
        process.join()
    broadcaster.close()


def test_a_dead_reader_aborts_one_version_and_its_replacement_gets_the_next() -> None:
    broadcaster, address = broadcaster_of(2)
    reports_queue = FORKS.SimpleQueue()
    survivor = start(address, reports_queue, 1, [2, 3, 4])
    dies = start(address, reports_queue, 2, [2, 3], dies=3)
    send(broadcaster, 2)
    send(broadcaster, 3)
    dies.join()
    assert dies.exitcode == 9
    before = reports(reports_queue, 3)
    assert [report[:2] for report in before] == [(1, 2), (1, 3), (2, 2)]
    assert before[0][2] == before[2][2] == expected_of(2)
    assert before[1][2] in ("RuntimeError", "ConnectionError", "TimeoutError")
    replacement = start(address, reports_queue, 2, [4])
    send(broadcaster, 4)
    assert reports(reports_queue, 2) == [(1, 4, expected_of(4)), (2, 4, expected_of(4))]
    survivor.join()
    replacement.join()
    broadcaster.close()


def test_a_rank_without_readers_aborts_versions_and_then_stops_broadcasting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broadcaster, address = broadcaster_of(2, arrival_seconds=0.5)
    reports_queue = FORKS.SimpleQueue()
    alone = start(address, reports_queue, 1, [2])
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        assert broadcaster.address == address
        send(broadcaster, 2 + attempt)
    assert broadcaster.address is None
    assert "no more are broadcast" in caplog.text
    send(broadcaster, 9)
    assert time.monotonic() - began < 30
    assert reports(reports_queue, 1) == [(1, 2, "ConnectionError")]
    alone.join()
    broadcaster.close()


def test_a_reader_that_stops_within_a_version_gets_the_next() -> None:
    broadcaster, address = broadcaster_of(1)
    arriving: Any = read_broadcast(address, 1, 2, timeout_seconds=20)
    began = threading.Thread(target=send, args=(broadcaster, 2))
    began.start()
    name, tensor = next(arriving)
    assert torch.equal(tensor, weights()[name] + 2)
    # A reader that stops within a version has left the group, and gets the next version in a new group.
    arriving.close()
    began.join()
    began = threading.Thread(target=send, args=(broadcaster, 3))
    began.start()
    again = dict(read_broadcast(address, 1, 3, timeout_seconds=20))
    began.join()
    assert {name: digest(tensor) for name, tensor in again.items()} == expected_of(3)


def carrier_of(folder: Path, monkeypatch: pytest.MonkeyPatch, readers: int) -> BroadcastCarrier:
    monkeypatch.setattr("plugins.weights_broadcast.carrier.SENT_BYTES", BUCKET_BYTES)
    return BroadcastCarrier(
        CarrierSetting(
            rank=0, device=CPU, shared_dir=folder, fallback_dir=folder / "disk", readers=readers, serve=False
        )
    )


def test_an_engine_requests_a_version_if_its_broadcast_is_aborted(
    tied_model: Path, other_tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = carrier_of(tmp_path, monkeypatch, readers=1)
    sampling = SamplingConfig(max_new_tokens=8)
    engine = HFRolloutEngine(tied_model)
    late = HFRolloutEngine(tied_model)
    failed: list[Exception] = []

    def receive(handle: WeightHandle) -> None:
        try:
            engine.receive(handle, verify=True)
        except ConnectionError as error:
            failed.append(error)

    def gathered(model: Path, breaks: bool) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(named_weights(model).items()):
            if breaks and number == 4:
                raise RuntimeError("a rank is gone")
            yield item

    def publish(version: int, model: Path, *, breaks: bool = False, again: WeightHandle | None = None) -> WeightHandle:
        handle = carrier.publish(version, gathered(model, breaks), with_digests=True, adapter_scale=0.0, again=again)
        assert handle is not None
        return handle

    def announce(version: int) -> tuple[WeightHandle, threading.Thread]:
        announced = carrier.announce(version)
        assert announced is not None
        announced = replace(announced, reader=1)
        reader = threading.Thread(target=receive, args=(announced,))
        reader.start()
        return announced, reader

    def send_again(announced: WeightHandle, model: Path, engine: HFRolloutEngine) -> None:
        again = replace(announced, resend=f"resend of {announced.version}")
        sending = threading.Thread(target=publish, args=(announced.version, model), kwargs={"again": again})
        sending.start()
        engine.receive(again, verify=True)
        sending.join()

    announced, reader = announce(4)
    publish(4, other_tied_model)
    reader.join()
    expected = completions(HFRolloutEngine(other_tied_model).generate(some_prompts(), sampling))
    assert completions(engine.generate(some_prompts(), sampling)) == expected
    with pytest.raises(ConnectionError, match="was sent before"):
        late.receive(announced, verify=True)
    send_again(announced, other_tied_model, late)
    assert completions(late.generate(some_prompts(), sampling)) == expected
    announced, reader = announce(5)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        publish(5, tied_model, breaks=True)
    reader.join()
    assert len(failed) == 1
    assert not engine.has_weights
    send_again(announced, tied_model, engine)
    expected = completions(HFRolloutEngine(tied_model).generate(some_prompts(), sampling))
    assert completions(engine.generate(some_prompts(), sampling)) == expected
    assert bytes_in(tmp_path) == 0
    written = publish(5, tied_model, again=replace(announced, is_sent=False))
    late.receive(written, verify=True)
    assert completions(late.generate(some_prompts(), sampling)) == expected
    assert bytes_in(tmp_path) > 0
    carrier.close()


def test_a_carrier_that_stops_broadcasting_writes_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = carrier_of(tmp_path, monkeypatch, readers=1)
    broadcaster = carrier._broadcaster
    assert broadcaster is not None
    monkeypatch.setattr(broadcaster, "_arrival_seconds", 0.2)
    for version in range(1, ATTEMPTS + 1):
        assert carrier.announce(version) is not None
        carrier.publish(version, weights().items(), with_digests=False, adapter_scale=0.0)
    assert carrier.announce(9) is None
    handle = carrier.publish(9, weights().items(), with_digests=False, adapter_scale=0.0)
    assert handle is not None
    assert {name: digest(tensor) for name, tensor in read_weights(handle)} == expected_of(0)
    carrier.close()


@pytest.mark.full
@pytest.mark.vllm
def test_every_part_of_a_vllm_engine_is_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plugins.vllm.config import VLLMRolloutConfig
    from plugins.vllm.engine import VLLMRolloutEngine
    from tests.components.helpers.vllm_models import answers_of, uneven_prompts, write_vllm_model

    models = [write_vllm_model(tmp_path / f"{seed}", seed, tied=True) for seed in (1, 2)]
    engine = VLLMRolloutEngine(models[0], VLLMRolloutConfig(cpu_cache_gb=0.25, tensor_parallel_size=2))
    carrier = carrier_of(tmp_path, monkeypatch, readers=2)
    try:
        received = []
        for version, model in ((2, models[1]), (3, models[0])):
            announced = carrier.announce(version)
            assert announced is not None
            reader = threading.Thread(target=engine.receive, args=(replace(announced, reader=1), True))
            reader.start()
            carrier.publish(version, named_weights(model).items(), with_digests=True, adapter_scale=0.0)
            reader.join()
            assert engine.has_weights
            received.append(answers_of(engine.generate(uneven_prompts(8), SamplingConfig(max_new_tokens=8))))
    finally:
        engine.close()
        carrier.close()
    expected = []
    for model in (models[1], models[0]):
        alone = VLLMRolloutEngine(model, VLLMRolloutConfig(cpu_cache_gb=0.25))
        expected.append(answers_of(alone.generate(uneven_prompts(8), SamplingConfig(max_new_tokens=8))))
        alone.close()
    assert received == expected


def test_the_group_is_created_on_the_gpu_of_the_rank_although_threads_start_on_gpu_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = FakeGPUs(monkeypatch, count=4)

    class RecordedGroup:
        """Stand-in for a group of NCCL, which is created on the current device of the thread."""

        class Options:
            _timeout: Any = None

        def __init__(self, *_: Any) -> None:
            # torch reads the variable in the constructor, and only groups with it raise an error on a timeout.
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
            raise RuntimeError(f"created on GPU {gpus.current()}")

    c10d: Any = dist
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", RecordedGroup, raising=False)
    member = _Member(c10d.HashStore(), 0, 1, torch.device("cuda", 3), timeout_seconds=20)
    with pytest.raises(RuntimeError, match="created on GPU 3"):
        member.join(1)
