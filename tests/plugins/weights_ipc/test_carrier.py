"""Transfer of weights from a rank to other processes on its device, here a CPU. On a GPU only the mapping differs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.weights.carrier import CarrierSetting
from components.weights.digest import digest
from components.weights.publisher import WeightHandle
from plugins.vllm.config import VLLMRolloutConfig
from plugins.weights_ipc.carrier import ATTEMPTS, REPLACEMENT_S, BucketSender, IPCCarrier, read_sent
from tests.components.generate.test_hf_engine import completions, named_weights, some_prompts
from tests.components.helpers.ranks import FORKS
from tests.components.helpers.vllm_models import answers_of, uneven_prompts, write_vllm_model
from tests.messages import says

CPU = torch.device("cpu")
BUCKET_BYTES = 4096


def weights() -> dict[str, Tensor]:
    """Return ten tensors that share buckets, one that is larger than a bucket, others after it, and empty and 0-d
    tensors.
    """
    generator = torch.Generator().manual_seed(5)
    tensors = {f"small {i}": torch.randn((17, 7), generator=generator) for i in range(10)}
    tensors["large"] = torch.randn((50, 100), generator=generator)
    tensors |= {f"half {i}": torch.randn(33, generator=generator).bfloat16() for i in range(10)}
    return tensors | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}


def read(folder: Path, version: int, dies_after: int | None, reports_queue: SimpleQueue[Any]) -> None:
    """Read a version in an engine's process and report its digests, or die in the middle."""
    digests = {}
    for name, tensor in read_sent(folder, version, timeout_seconds=60):
        digests[name] = digest(tensor)
        if len(digests) == dies_after:
            os._exit(9)
    reports_queue.put(digests)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert [*tmp_path.glob("*.socket"), *tmp_path.glob("*.newest")] == []


@pytest.mark.parametrize("dies_after", [None, 3])
def test_each_engine_receives_weights_bit_for_bit_even_if_another_dies(folder: Path, dies_after: int | None) -> None:
    sender = BucketSender(folder, CPU, readers=2, bucket_bytes=BUCKET_BYTES)
    reports_queue = FORKS.SimpleQueue()
    readers = [FORKS.Process(target=read, args=(folder, 7, dies, reports_queue)) for dies in (None, dies_after)]
    for reader in readers:
        reader.start()
    passed = dict(sender.sent(7, weights().items(), to_host=True))
    expected = {name: digest(tensor) for name, tensor in weights().items()}
    assert {name: digest(tensor) for name, tensor in passed.items()} == expected
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0 if dies_after is None else 9]
    assert [reports_queue.get() for reader in readers if reader.exitcode == 0] == [expected] * (
        1 + (dies_after is None)
    )
    sender.close()


def test_a_rank_continues_without_engines_or_with_a_silent_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sender = BucketSender(folder, CPU, readers=1, bucket_bytes=BUCKET_BYTES, timeout_seconds=0.5)
    began = time.monotonic()
    assert list(dict(sender.sent(1, weights().items()))) == list(weights())
    assert "0 of 1 readers on cpu came" in caplog.text
    with pytest.raises(ConnectionError, match="was sent before"):
        next(read_sent(folder, 1, timeout_seconds=60))
    silent = read_sent(folder, 2, timeout_seconds=60)
    reader = threading.Thread(target=next, args=(silent,))
    reader.start()  # receives the first bucket, and never requests the next one
    assert list(dict(sender.sent(2, weights().items()))) == list(weights())
    assert "given up: TimeoutError" in caplog.text
    assert time.monotonic() - began < 30
    reader.join()
    with pytest.raises((ConnectionError, EOFError)):
        list(silent)
    sender.close()


def read_versions(folder: Path, dies_at: int, reports_queue: SimpleQueue[Any]) -> None:
    """Read versions 1, 2, ... until the process dies within one."""
    for version in range(1, dies_at + 1):
        for _ in read_sent(folder, version, timeout_seconds=60):
            if version == dies_at:
                os._exit(9)
        reports_queue.put(version)


def test_a_rank_does_not_wait_for_an_engine_that_has_ended(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sender = BucketSender(folder, CPU, readers=1, bucket_bytes=BUCKET_BYTES, timeout_seconds=60)
    reports_queue = FORKS.SimpleQueue()
    engine = FORKS.Process(target=read_versions, args=(folder, 3, reports_queue))
    engine.start()
    for version in (1, 2, 3):
        list(sender.sent(version, weights().items()))
    engine.join()
    assert (engine.exitcode, reports_queue.get(), reports_queue.get()) == (9, 1, 2)
    began = time.monotonic()
    list(sender.sent(4, weights().items()))
    assert time.monotonic() - began < REPLACEMENT_S + 5
    assert "version 4 of the weights: 0 of 1 readers on cpu came" in caplog.text
    # The replacement starts while version 5 is sent. Version 4 was sent without an engine and without a wait.
    replacement = FORKS.Process(target=read, args=(folder, 5, None, reports_queue))
    replacement.start()
    list(sender.sent(5, weights().items()))
    replacement.join()
    assert reports_queue.get() == {name: digest(tensor) for name, tensor in weights().items()}
    sender.close()


def test_a_reader_without_a_rank_or_with_another_version_raises_an_error(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_sent(folder, 1, timeout_seconds=60))
    sender = BucketSender(folder, CPU, readers=1, timeout_seconds=0.5)
    late: list[Exception] = []

    def read_the_last() -> None:
        try:
            list(read_sent(folder, 1, timeout_seconds=60))
        except (ConnectionError, EOFError) as error:
            late.append(error)

    reader = threading.Thread(target=read_the_last)
    reader.start()
    list(sender.sent(2, weights().items()))
    reader.join()
    assert len(late) == 1
    with pytest.raises(TimeoutError, match=says("0.1 s")):
        list(read_sent(folder, 3, timeout_seconds=0.1))
    sender.close()


def carrier_of(folder: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> IPCCarrier:
    monkeypatch.setattr("plugins.weights_ipc.carrier.SENT_BYTES", bucket_bytes)
    return IPCCarrier(
        CarrierSetting(rank=0, device=CPU, shared_dir=folder, fallback_dir=folder / "disk", readers=1, serve=False)
    )


def test_a_rank_gives_up_after_repeated_failures_and_writes_later_versions(
    tied_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carrier = carrier_of(folder, monkeypatch, BUCKET_BYTES)
    assert carrier._sender is not None
    monkeypatch.setattr(carrier._sender, "_timeout_seconds", 0.1)
    for version in range(1, ATTEMPTS + 1):
        assert carrier.announce(version) is not None
        publish(carrier, version, tied_model)
    assert caplog.text.count("no more are sent") == 1
    assert carrier.announce(4) is None
    began = time.monotonic()
    handle = publish(carrier, 4, tied_model)
    assert time.monotonic() - began < 5
    assert not handle.is_sent
    engine = HFRolloutEngine(tied_model)
    engine.receive(handle, verify=True)
    assert engine.weight_version == 4
    # An engine of another rank that still expects a version sees at once that nothing comes.
    with pytest.raises(FileNotFoundError):
        next(read_sent(folder, 5, timeout_seconds=60))
    assert caplog.text.count("no more are sent") == 1
    carrier.close()


def publish(carrier: IPCCarrier, version: int, model: Path, *, again: WeightHandle | None = None) -> WeightHandle:
    tensors = named_weights(model).items()
    handle = carrier.publish(version, tensors, with_digests=True, adapter_scale=0.0, again=again)
    assert handle is not None
    return handle


def send_again(carrier: IPCCarrier, announced: WeightHandle, model: Path, engine: Any) -> None:
    """Send a version once more to one engine, which receives it."""
    again = replace(announced, resend=f"resend of {announced.version}")
    sending = threading.Thread(target=publish, args=(carrier, announced.version, model), kwargs={"again": again})
    sending.start()
    engine.receive(again, verify=True)
    sending.join()


def test_an_engine_uses_a_sent_version_or_requests_it(
    tied_model: Path, other_tied_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = carrier_of(folder, monkeypatch, BUCKET_BYTES)
    engine = HFRolloutEngine(tied_model)
    late = HFRolloutEngine(tied_model)

    def receive(engine: HFRolloutEngine, handle: WeightHandle) -> None:
        with suppress(ValueError, RuntimeError):
            engine.receive(handle, verify=True)

    def send(version: int, model: Path) -> WeightHandle:
        announced = carrier.announce(version)
        assert announced is not None
        reader = threading.Thread(target=receive, args=(engine, announced))
        reader.start()
        publish(carrier, version, model)
        reader.join()
        return announced

    announced = send(4, other_tied_model)
    sampling = SamplingConfig(max_new_tokens=8)
    expected = completions(HFRolloutEngine(other_tied_model).generate(some_prompts(), sampling))
    assert completions(engine.generate(some_prompts(), sampling)) == expected
    with pytest.raises(ConnectionError):
        late.receive(announced, verify=True)
    assert not late.has_weights
    send_again(carrier, announced, other_tied_model, late)
    for each in (engine, late):
        assert completions(each.generate(some_prompts(), sampling)) == expected
        assert each.weight_version == 4
    monkeypatch.setattr("plugins.weights_verify.verify.compare_digests", lambda *_: ["damaged"])
    announced = send(5, tied_model)
    assert not engine.has_weights
    with pytest.raises(RuntimeError, match=says("version 5", "damaged")):
        engine.receive(publish(carrier, 5, tied_model, again=replace(announced, is_sent=False)), verify=True)
    carrier.close()


@pytest.mark.full
@pytest.mark.vllm
def test_vllm_uses_a_sent_version_or_requests_it_if_the_transfer_is_aborted(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugins.vllm.engine import VLLMRolloutEngine

    models = [write_vllm_model(tmp_path / f"{seed}", seed, tied=True) for seed in (1, 2)]
    engine = VLLMRolloutEngine(models[0], VLLMRolloutConfig(cpu_cache_gb=0.25))
    carrier = carrier_of(folder, monkeypatch, 2**16)

    def gathered(model: Path, breaks: bool) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(named_weights(model).items()):
            if breaks and number == 4:
                raise OSError("a rank is gone")
            yield item

    def send(version: int, model: Path, breaks: bool) -> None:
        with suppress(OSError):
            carrier.publish(version, gathered(model, breaks), with_digests=True, adapter_scale=0.0)

    def responses_after(version: int, model: Path, breaks: bool) -> list[list[int]]:
        announced = carrier.announce(version)
        assert announced is not None
        sending = threading.Thread(target=send, args=(version, model, breaks))
        sending.start()
        with suppress(EOFError, OSError):  # read from or write to a closed connection
            engine.receive(announced, verify=True)
        sending.join()
        assert engine.has_weights is not breaks
        if breaks:
            send_again(carrier, announced, model, engine)
        return answers_of(engine.generate(uneven_prompts(8), SamplingConfig(max_new_tokens=8)))

    try:
        first = answers_of(engine.generate(uneven_prompts(8), SamplingConfig(max_new_tokens=8)))
        second = responses_after(1, models[1], breaks=False)
        assert second != first
        assert responses_after(2, models[0], breaks=False) == first
        assert responses_after(3, models[1], breaks=True) == second
        assert responses_after(4, models[0], breaks=False) == first
    finally:
        engine.close()
        carrier.close()
