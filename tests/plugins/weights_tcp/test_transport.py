import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from components.weights.digest import compare_digests, digest
from components.weights.publisher import (
    WeightHandle,
    WeightPublisher,
    read_digests,
    read_weights,
    weight_shapes,
)
from plugins.weights_tcp.nearby import nearby
from tests.components.helpers.weight_worker import BUCKET_BYTES, NUM_WEIGHTS, large_weights
from tests.messages import says

ROOT = Path(__file__).parents[3]


def some_weights(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "a": torch.arange(6.0).view(2, 3) * scale,
        "b": (torch.arange(4.0) * scale).bfloat16(),
        "scalar": torch.tensor(scale),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    """Yield a publisher with one bucket per weight."""
    serving = WeightPublisher(tmp_path / "w", bucket_bytes=1, serve=True, timeout_seconds=60)
    yield serving
    serving.close()


def elsewhere(handle: WeightHandle) -> WeightHandle:
    """Return the handle as on another machine, where the folder does not exist."""
    return replace(handle, path="/not/on/this/machine")


def port_of(handle: WeightHandle) -> int:
    assert handle.address is not None
    return handle.address[1]


def start_worker(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.components.helpers.weight_worker", *arguments]
    # The allocator keeps freed blocks below 32 MiB. A real bucket is larger.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_a_remote_reader_receives_every_byte_and_may_repeat_the_request(publisher: WeightPublisher) -> None:
    handle = elsewhere(publisher.publish(1, some_weights().items(), with_digests=True))
    for _ in range(2):
        arrived = dict(read_weights(handle))
        assert all(torch.equal(arrived[name], tensor) for name, tensor in some_weights().items())
        received = {name: digest(tensor) for name, tensor in arrived.items()}
        assert compare_digests(read_digests(handle), received) == []
    assert weight_shapes(handle) == {"a": (2, 3), "b": (4,), "scalar": (), "empty": (0, 3)}


def test_two_readers_are_served_at_once(publisher: WeightPublisher) -> None:
    handle = elsewhere(publisher.publish(1, some_weights().items()))
    names = [(one, other) for (one, _), (other, _) in zip(read_weights(handle), read_weights(handle), strict=True)]
    assert names == [(name, name) for name in some_weights()]


def test_a_version_deleted_during_a_transfer_still_arrives_completely(
    publisher: WeightPublisher,
) -> None:
    first = elsewhere(publisher.publish(1, some_weights(1.0).items()))
    reader = read_weights(first)
    arrived = dict([next(reader)])
    for version in (2, 3):
        publisher.publish(version, some_weights(9.0).items())
    arrived |= dict(reader)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in some_weights(1.0).items())
    with pytest.raises(FileNotFoundError, match=says("version 1", port_of(first))):
        next(read_weights(first))


def test_only_readers_with_the_handle_are_served(publisher: WeightPublisher) -> None:
    handle = elsewhere(publisher.publish(1, some_weights().items()))
    assert handle.token not in repr(handle)
    with pytest.raises(PermissionError, match=says(port_of(handle))):
        next(read_weights(replace(handle, token="guessed")))


def test_the_folder_of_another_publisher_is_not_read(tmp_path: Path, publisher: WeightPublisher) -> None:
    """Containers may share host names and paths. The handle must still lead to the publisher's machine."""
    handle = publisher.publish(1, some_weights(1.0).items())
    same_place = WeightPublisher(tmp_path / "other").publish(1, some_weights(2.0).items())
    seen_there = replace(handle, path=same_place.path)
    assert dict(read_weights(seen_there))["scalar"].item() == 1.0
    with pytest.raises(FileNotFoundError, match=says("version 1", same_place.path)):
        next(read_weights(replace(seen_there, address=None)))


def test_the_parts_of_an_engine_get_a_version_through_the_network_once(
    tmp_path: Path, publisher: WeightPublisher
) -> None:
    handle = elsewhere(publisher.publish(1, some_weights().items(), with_digests=True))
    (tmp_path / "arriving" / "weights-00000001.partial").mkdir(parents=True)  # folder of a killed predecessor
    with nearby(handle, tmp_path / "arriving") as here:
        publisher.close()  # no request is sent to it again
        first = dict(read_weights(here))
        arrived = dict(read_weights(here))
        for name, tensor in some_weights().items():
            assert torch.equal(first[name], tensor)
            assert torch.equal(arrived[name], tensor)
        received = {name: digest(tensor) for name, tensor in arrived.items()}
        assert compare_digests(read_digests(here), received) == []
    assert not (tmp_path / "arriving").exists()


def test_a_version_on_this_machine_is_not_copied_for_the_parts_of_an_engine(
    tmp_path: Path, publisher: WeightPublisher
) -> None:
    handle = publisher.publish(1, some_weights().items())
    with nearby(handle, tmp_path / "arriving") as here:
        assert here == handle
        assert not (tmp_path / "arriving").exists()


def test_without_serve_there_is_neither_address_nor_thread(tmp_path: Path) -> None:
    handle = WeightPublisher(tmp_path / "w").publish(1, some_weights().items())
    assert handle.address is None
    assert "weight-server" not in {thread.name for thread in threading.enumerate()}


def test_a_reader_holds_one_bucket_and_its_death_does_not_affect_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=BUCKET_BYTES, serve=True, timeout_seconds=60)
    handle = publisher.publish(1, large_weights())
    (tmp_path / "handle").write_bytes(pickle.dumps(elsewhere(handle)))
    with start_worker("read", str(tmp_path / "handle")) as reader:
        output, _ = reader.communicate(timeout=300)
    assert reader.returncode == 9
    # Of 64 MiB one bucket of 4 MiB, the clone of its only tensor, and the buffers of the connection.
    assert 4 * 2**20 < int(output) < 16 * 2**20
    with caplog.at_level(logging.WARNING):
        assert len(list(read_weights(elsewhere(handle)))) == NUM_WEIGHTS
        publisher.close()
    assert "version 1 " in caplog.text


def test_a_hanging_or_dead_publisher_raises_an_error_within_the_timeout(tmp_path: Path) -> None:
    with start_worker("publish", str(tmp_path)) as process:
        try:
            while not (tmp_path / "handle").exists():
                assert process.poll() is None
                time.sleep(0.05)
            handle = elsewhere(pickle.loads((tmp_path / "handle").read_bytes()))
            reader = read_weights(handle)
            next(reader)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(ConnectionError, match=says(port_of(handle), "1 s")):
                next(read_weights(handle, timeout_seconds=1))
        finally:
            process.kill()
    with pytest.raises(ConnectionError, match=says(port_of(handle))):
        list(reader)
    with pytest.raises(ConnectionError, match=says(port_of(handle), "5 s")):
        next(read_weights(handle, timeout_seconds=5))


def test_versions_are_served_at_an_ipv6_address(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", serve=True, host="::1", timeout_seconds=60)
    handle = publisher.publish(1, some_weights().items())
    assert handle.address is not None and handle.address[0] == "::1"
    received = dict(read_weights(elsewhere(handle)))
    assert {name: digest(tensor) for name, tensor in received.items()} == {
        name: digest(tensor) for name, tensor in some_weights().items()
    }
    publisher.close()
