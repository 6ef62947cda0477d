"""Transfer of weights from a rank to other processes on its device, here a CPU. On a GPU only the mapping differs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.weights.digest import digest
from components.weights.publisher import WeightHandle, WeightPublisher
from plugins.vllm.config import VLLMRolloutConfig
from plugins.weights_ipc.carrier import BucketSender, read_sent
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
    assert list(tmp_path.glob("*.socket")) == []


@pytest.mark.parametrize("dies_after", [None, 3])
def test_each_engine_receives_weights_bit_for_bit_even_if_another_dies(folder: Path, dies_after: int | None) -> None:
    sender = BucketSender(folder, CPU, readers=2, bucket_bytes=BUCKET_BYTES)
    reports_queue = FORKS.SimpleQueue()
    readers = [FORKS.Process(target=read, args=(folder, 7, dies, reports_queue)) for dies in (None, dies_after)]
    for reader in readers:
        reader.start()
    passed = dict(sender.sent(7, weights().items()))
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
    silent = read_sent(folder, 2, timeout_seconds=60)
    reader = threading.Thread(target=next, args=(silent,))
    reader.start()  # takes the first bucket, and never comes back for the next
    assert list(dict(sender.sent(2, weights().items()))) == list(weights())
    assert "given up: TimeoutError" in caplog.text
    assert time.monotonic() - began < 30
    reader.join()
    with pytest.raises((ConnectionError, EOFError)):
        list(silent)
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


def test_an_engine_uses_a_sent_version_or_reads_the_folder(
    tied_model: Path, other_tied_model: Path, folder: Path
) -> None:
    sender = BucketSender(folder, CPU, readers=1, bucket_bytes=BUCKET_BYTES)
    publisher = WeightPublisher(folder / "versions")
    newer = named_weights(other_tied_model)
    engine = HFRolloutEngine(tied_model)
    late = HFRolloutEngine(tied_model)
    announced = WeightHandle(4, str(folder), 0, is_sent=True, carrier="ipc")
    reader = threading.Thread(target=engine.receive, args=(announced, True))
    reader.start()
    handle = publisher.publish(4, sender.sent(4, newer.items()), with_digests=True)
    reader.join()
    sampling = SamplingConfig(max_new_tokens=8)
    expected = completions(HFRolloutEngine(other_tied_model).generate(some_prompts(), sampling))
    assert completions(engine.generate(some_prompts(), sampling)) == expected
    late.receive(handle, verify=True)
    # Nothing of the version is read but its digests: it is there.
    (Path(handle.path) / "weights.bin").write_bytes(bytes(handle.nbytes + 2**14))
    engine.receive(handle, verify=True)
    for each in (engine, late):
        assert completions(each.generate(some_prompts(), sampling)) == expected
        assert each.weight_version == 4
    other = publisher.publish(5, named_weights(tied_model).items(), with_digests=True)
    engine.received(WeightHandle(5, str(folder), 0, is_sent=True, carrier="ipc"), dict.fromkeys(newer, "damaged"))
    with pytest.raises(RuntimeError, match=says("version 5", "damaged")):
        engine.receive(other, verify=True)
    sender.close()
    publisher.close()


@pytest.mark.full
@pytest.mark.vllm
def test_vllm_uses_a_sent_version_or_the_folder_if_the_transfer_is_aborted(tmp_path: Path, folder: Path) -> None:
    from plugins.vllm.engine import VLLMRolloutEngine

    models = [write_vllm_model(tmp_path / f"{seed}", seed, tied=True) for seed in (1, 2)]
    engine = VLLMRolloutEngine(models[0], VLLMRolloutConfig(cpu_cache_gb=0.25))
    sender = BucketSender(folder, CPU, readers=1, bucket_bytes=2**16)
    publisher = WeightPublisher(tmp_path / "versions")

    def gathered(model: Path, breaks: bool) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(named_weights(model).items()):
            if breaks and number == 4:
                raise OSError("a rank is gone")
            yield item

    def send(version: int, model: Path, breaks: bool) -> None:
        with suppress(OSError):
            list(sender.sent(version, gathered(model, breaks)))

    def responses_after(version: int, model: Path, breaks: bool) -> list[list[int]]:
        sending = threading.Thread(target=send, args=(version, model, breaks))
        sending.start()
        announced = WeightHandle(version, str(folder), 0, is_sent=True, carrier="ipc")
        with suppress(EOFError, OSError):  # read or write at a closed connection
            engine.receive(announced, verify=True)
        sending.join()
        handle = publisher.publish(version, named_weights(model).items(), with_digests=True)
        assert (engine.sent_digests(handle) is None) is breaks
        engine.receive(handle, verify=True)
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
        sender.close()
        publisher.close()
