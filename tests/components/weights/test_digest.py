import hashlib
import math

import pytest
import torch

from components.weights import digest as digest_module
from components.weights.digest import Digests, compare_digests, digest


def mixed(word: int) -> int:
    """Return the digest of a four-byte word with Python integers: a signed product that wraps and a signed shift,
    twice.
    """
    for factor, shift in ((-1640531527, 15), (-2048144789, 13)):
        word = (word * factor + 2**31) % 2**32 - 2**31
        word ^= word >> shift
    return word


def test_a_digest_equals_that_of_a_slow_loop() -> None:
    words = [5, -7, 2**31 - 1, -(2**31)]
    total = sum(mixed(word ^ mixed(place)) for place, word in enumerate(words))
    text = repr((torch.int32, (2, 2), [total], b"")).encode()
    assert (
        digest(torch.tensor(words, dtype=torch.int32).view(2, 2)) == hashlib.blake2b(text, digest_size=16).hexdigest()
    )


@pytest.mark.parametrize("chunks_at_once", [2, 64])
def test_batched_digests_equal_single_ones(chunks_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = (0, 1, 7, 2**18, 5 * 2**18 + 77)
    tensors = {f"{size}": torch.randn(size, generator=generator).bfloat16() for size in sizes}
    tensors |= {f"{size} float32": torch.randn(size, generator=generator) for size in sizes}
    expected = {name: digest(tensor) for name, tensor in tensors.items()}
    monkeypatch.setitem(digest_module._CHUNKS_AT_ONCE, "cpu", chunks_at_once)
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor)
        # A bucket is refilled after the sums of its tensors were computed.
        tensor.zero_()
    assert digests.result() == expected
    assert Digests().result() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flipping_any_single_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 9).to(dtype)  # bfloat16: 18 bytes, so that an incomplete word remains
    flipped = set()
    for bit in range(tensor.nbytes * 8):
        other = tensor.clone()
        other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        flipped.add(digest(other))
    assert len(flipped - {digest(tensor)}) == tensor.nbytes * 8


def test_swapping_two_values_at_any_distance_changes_the_digest() -> None:
    tensor = torch.zeros(3 * 2**18)  # three chunks
    tensor[0], tensor[1], tensor[2**18] = 1.0, 0.5, 2.0
    for here, second in ((0, 1), (0, 2**18), (1, 3 * 2**18 - 1)):
        other = tensor.clone()
        other[here], other[second] = tensor[second], tensor[here]
        assert digest(other) != digest(tensor)
    assert digest(torch.cat(tensor.chunk(3)[::-1])) != digest(tensor)


def test_the_layout_in_memory_does_not_matter() -> None:
    tensor = torch.randn(33, 7)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    # Bytes that do not begin at a word boundary.
    halves = torch.randn(11).bfloat16()
    assert digest(halves[1:]) == digest(halves[1:].clone())
    assert digest(torch.nn.Parameter(tensor)) == digest(tensor)


def test_dtype_and_shape_affect_the_digest() -> None:
    same_bytes = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8).bfloat16()]
    others = [
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.tensor(0.0),
        torch.tensor([True, False]),
        torch.tensor([0.0, -0.0]),
    ]
    assert len({digest(tensor) for tensor in same_bytes + others}) == 9


def test_nan_is_equal_to_itself() -> None:
    assert digest(torch.tensor([math.nan, 1.0])) == digest(torch.tensor([math.nan, 1.0]))


def test_differing_tensors_are_named() -> None:
    assert compare_digests({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert compare_digests({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == ["a", "c", "d"]
