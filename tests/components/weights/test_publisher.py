import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from components.weights.digest import compare_digests, digest
from components.weights.publisher import WeightHandle, WeightPublisher, read_digests, read_weights, weight_shapes
from tests.messages import says


def some_weights(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6.0).view(2, 3) * scale,
        "b.weight": (torch.arange(4.0) * scale).bfloat16(),
        "c.weight": torch.full((5,), scale),
    }


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_reader_receives_the_published_weights(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=24)  # space for a.weight only: several buckets
    handle = publisher.publish(1, some_weights().items())
    arrived = dict(read_weights(handle))
    assert arrived.keys() == some_weights().keys() == weight_shapes(handle).keys()
    for name, tensor in some_weights().items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    # 6 float32, 4 bfloat16, 5 float32
    assert handle.nbytes == 24 + 8 + 20
    # a has its own bucket; b follows it; c begins 64 bytes after b, which is more than 24
    assert len(json.loads((Path(handle.path) / "index.json").read_text())["buckets"]) == 3
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_each_view_of_a_flat_buffer_is_published_without_the_rest(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    handle = WeightPublisher(tmp_path / "w").publish(1, [("a", flat[:4]), ("b", flat[4:].view(2, 3))])
    arrived = dict(read_weights(handle))
    assert arrived["a"].tolist() == [0, 1, 2, 3]
    assert arrived["b"].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert handle.nbytes == 40


def test_a_version_is_kept_until_two_versions_later(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w")
    first = publisher.publish(1, some_weights().items())
    second = publisher.publish(5, some_weights().items())
    assert folders(tmp_path / "w") == [Path(handle.path).name for handle in (first, second)]
    while_written: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        while_written.extend(folders(tmp_path / "w"))
        yield from some_weights().items()

    third = publisher.publish(9, weights())
    assert while_written == [Path(second.path).name, "weights-00000009.partial"]
    assert folders(tmp_path / "w") == [Path(handle.path).name for handle in (second, third)]
    with pytest.raises(FileNotFoundError, match=says("version 1", first.path)):
        next(read_weights(first))


def test_a_reader_with_open_files_survives_their_removal(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=24)
    reader = read_weights(publisher.publish(1, some_weights().items()))
    arrived = dict([next(reader)])
    publisher.publish(2, some_weights(scale=9.0).items())
    arrived |= dict(reader)
    assert arrived["c.weight"].tolist() == [1.0] * 5


def place_on_disk(handle: WeightHandle) -> int:
    return (Path(handle.path) / "weights.bin").stat().st_ino


def test_the_memory_of_an_unused_version_is_reused_two_versions_later(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=24)
    places = []
    for version in range(1, 7):
        handle = publisher.publish(version, some_weights(scale=version).items())
        assert all(torch.equal(dict(read_weights(handle))[name], w) for name, w in some_weights(version).items())
        places.append(place_on_disk(handle))
    assert places == places[:2] * 3
    assert places[0] != places[1]


def test_tensors_held_by_a_reader_are_never_overwritten(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w")
    first = publisher.publish(1, some_weights(1.0).items())
    place, kept = place_on_disk(first), dict(read_weights(first))["c.weight"]
    publisher.publish(2, some_weights(2.0).items())
    assert place_on_disk(publisher.publish(3, some_weights(3.0).items())) != place
    assert kept.tolist() == [1.0] * 5
    # Writing to the tensor writes to a copy.
    kept.zero_()
    again = publisher.publish(4, some_weights(4.0).items())
    dict(read_weights(again))["c.weight"].zero_()
    assert dict(read_weights(again))["c.weight"].tolist() == [4.0] * 5


@pytest.mark.parametrize("sizes", [(3000, 3000, 10, 10, 5000, 5000, 5000), (10, 10, 9000, 9000, 10, 9000, 10)])
def test_reused_memory_may_grow_and_shrink(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=4096)
    for version, size in enumerate(sizes, 1):
        weights = {"a": torch.full((size,), float(version)), "b": torch.arange(float(size))}
        arrived = dict(read_weights(publisher.publish(version, weights.items())))
        assert all(torch.equal(arrived[name], tensor) for name, tensor in weights.items())
        assert sum(tensor.nbytes for tensor in arrived.values()) == 8 * size


def test_digests_are_published_on_request(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w")
    with pytest.raises(ValueError, match=says("version 1", "with_digests=True")):
        read_digests(publisher.publish(1, some_weights().items()))
    handle = publisher.publish(2, some_weights().items(), with_digests=True)
    received = {name: digest(tensor) for name, tensor in read_weights(handle)}
    assert compare_digests(read_digests(handle), received) == []
    received["a.weight"] = digest(torch.zeros(2, 3))
    assert compare_digests(read_digests(handle), received) == ["a.weight"]


def test_a_failed_publication_leaves_no_files_and_keeps_the_last_version(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from some_weights().items()
        raise RuntimeError("a rank died")

    publisher = WeightPublisher(tmp_path / "w", bucket_bytes=24)
    first = publisher.publish(1, some_weights().items())
    with pytest.raises(RuntimeError, match="a rank died"):
        publisher.publish(2, failing())
    assert folders(tmp_path / "w") == [Path(first.path).name]
    assert publisher.publish(2, some_weights().items()).version == 2


def test_versions_must_increase(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w")
    publisher.publish(3, some_weights().items())
    with pytest.raises(ValueError, match="version 3"):
        publisher.publish(3, some_weights().items())


@pytest.mark.parametrize("bucket_bytes", [16, 1024])
def test_a_duplicate_tensor_name_raises_an_error(tmp_path: Path, bucket_bytes: int) -> None:
    twice = [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("a", torch.zeros(4))]
    with pytest.raises(ValueError, match="'a'"):
        WeightPublisher(tmp_path / "w", bucket_bytes=bucket_bytes).publish(1, twice)
    assert folders(tmp_path / "w") == []


def test_a_publisher_removes_only_the_versions_of_a_killed_predecessor(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(7, some_weights().items())
    (tmp_path / "weights-00000008.partial").mkdir()
    (tmp_path / "of_another_program").mkdir()
    successor = WeightPublisher(tmp_path)
    assert folders(tmp_path) == ["of_another_program"]
    successor.publish(1, some_weights().items())
    successor.close()
    assert folders(tmp_path) == ["of_another_program"]


def test_close_removes_all_files(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", fallback_directory=tmp_path / "f")
    publisher.publish(1, some_weights().items())
    publisher.close()
    assert folders(tmp_path) == []


def test_without_space_anywhere_the_error_names_the_option_to_set(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w", headroom_bytes=2**60)
    with pytest.raises(OSError, match=says(tmp_path / "w", "fallback_directory", "shm-size")):
        publisher.publish(1, some_weights().items())
    assert folders(tmp_path / "w") == []


def test_a_version_that_does_not_fit_is_written_completely_to_the_fallback(tmp_path: Path) -> None:
    """Two file systems with different free space. The headroom is between them, so only the larger one suffices."""
    shared_memory = Path("/dev/shm") / f"troupe-test-{os.getpid()}"
    shared_memory.mkdir()
    try:
        free = {place: os.statvfs(place) for place in (shared_memory, tmp_path)}
        space = {place: stat.f_bavail * stat.f_frsize for place, stat in free.items()}
        small, large = sorted(space, key=lambda place: space[place])
        publisher = WeightPublisher(
            small / "w", fallback_directory=large / "f", headroom_bytes=(space[small] + space[large]) // 2
        )
        handle = publisher.publish(1, some_weights().items())
        assert Path(handle.path).parent == large / "f"
        assert folders(small / "w") == []
        assert dict(read_weights(handle))["c.weight"].tolist() == [1.0] * 5
        publisher.close()
    finally:
        shared_memory.rmdir()


def test_a_handle_of_a_deleted_version_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=says("version 4", tmp_path / "nowhere")):
        weight_shapes(WeightHandle(version=4, path=str(tmp_path / "nowhere"), nbytes=0))
