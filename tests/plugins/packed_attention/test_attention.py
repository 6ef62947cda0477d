"""The variable-length attention of packed rows, on a CPU with a kernel of plain torch, and on the meta device with
torch's.

Legend as in the modules under test.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from components.batch import Batch
from components.models.packing.packed_model import _by_sdpa
from components.models.packing.packed_row import PackedRow
from plugins.packed_attention.attention import VariableLength
from plugins.packed_attention.parts import Places, kernel_parts, picked
from plugins.prefix_sharing import shared_prompts
from plugins.prefix_sharing.shared_prompts import SharedPrompts
from tests.components.helpers.written_bytes import WrittenBytes

SCALE = 0.3


def by_part(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    query_borders: Tensor,
    key_borders: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel in plain torch: each part by itself, with its last query at its last key."""
    before, _ = window_size
    query_counts, key_counts = query_borders.diff().tolist(), key_borders.diff().tolist()
    assert (max(query_counts), max(key_counts)) == (most_queries, most_keys)
    outputs = []
    keys_and_values = (x.split(key_counts) for x in (key_NKD, value_NKD))
    for query_SHD, *both in zip(query_NHD.split(query_counts), *keys_and_values, strict=True):
        query_HSD, key_KTD, value_KTD = (x.transpose(0, 1) for x in (query_SHD, *both))
        distance_ST = torch.arange(len(both[0]))[-len(query_SHD) :, None] - torch.arange(len(both[0]))
        seen_ST = (distance_ST >= 0) & ((before < 0) | (distance_ST <= before))
        output_HSD = scaled_dot_product_attention(
            query_HSD, key_KTD, value_KTD, attn_mask=seen_ST, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output_HSD.transpose(0, 1))
    return torch.cat(outputs)


def without_groups(*inputs: Tensor | int, scale: float, window_size: tuple[int, int]) -> Tensor:
    """The kernel of a release of torch whose keys must have as many heads as queries."""
    query_NHD, key_NKD = inputs[:2]
    assert isinstance(query_NHD, Tensor)
    assert isinstance(key_NKD, Tensor)
    assert query_NHD.shape[1] == key_NKD.shape[1]
    return by_part(*inputs, scale=scale, window_size=window_size)  # pyright: ignore[reportArgumentType]


def two_prompts(device: str = "cpu") -> Batch:
    """Two prompts of 9 and 6 tokens with three responses each, a sequence alone, and one of a single token."""
    generator = torch.Generator().manual_seed(0)
    rows = [[7]]
    for prompt_length in (9, 6):
        prompt = torch.randint(50, (prompt_length,), generator=generator).tolist()
        rows += [[*prompt, *torch.randint(50, 99, (n,), generator=generator).tolist()] for n in (1, 5, 3)]
    rows.append(torch.randint(50, (4,), generator=generator).tolist())
    return Batch.from_rows({"tokens": rows}).to(device)


def shared_row(batch: Batch) -> PackedRow:
    plan = SharedPrompts().plan_row(batch.host)
    assert plan is not None
    return PackedRow(batch, plan)


def inputs_of(row: PackedRow, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as a model gives them: [1, heads, U, D], transposed from the row."""
    generator = torch.Generator().manual_seed(1)
    counts = heads, key_heads, key_heads
    numbers = [torch.randn(1, row.places, count, 8, generator=generator, requires_grad=True) for count in counts]
    query_1HUD, key_1KUD, value_1KUD = (x.transpose(1, 2) for x in numbers)
    return query_1HUD, key_1KUD, value_1KUD


def by_rectangles(row: PackedRow, window: int | None, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention as a CPU computes it."""
    attend = partial(_by_sdpa, SCALE, 0.0, window)
    parts = zip(row.queries(inputs[0]), *map(row.keys, inputs[1:]), strict=True)
    return row.from_rectangles([attend(*part) for part in parts])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("layout", ["end to end", "shared", "overlapping"])
def test_outputs_and_gradients_equal_those_of_rectangles(
    layout: str, heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = two_prompts()
    if layout == "overlapping":
        # All tokens of the sequences with a prompt of 9 tokens and a response of at least 3 are queries.
        monkeypatch.setattr(shared_prompts, "MOST_SEEN", 3 * 12 - 1)
    row = PackedRow(batch) if layout == "end to end" else shared_row(batch)
    results = []
    for attend in (by_rectangles, None):
        inputs = inputs_of(row, heads, 2)
        if attend is None:
            output_1UHD = VariableLength(by_part).attend(*inputs, row, SCALE, window)
        else:
            output_1UHD = attend(row, window, inputs)
        weight_1UHD = torch.rand(output_1UHD.shape, generator=torch.Generator().manual_seed(2))
        gradients = torch.autograd.grad((output_1UHD * weight_1UHD).sum(), inputs)
        results.append([output_1UHD, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_every_place_is_a_query_once_and_in_order() -> None:
    """The prompts' queries are not repeated, so queries and outputs need no copy. The keys are those of the parts."""
    batch = two_prompts()
    parts = kernel_parts(shared_row(batch))
    assert parts.queries is None
    assert parts.query_U is None
    # Sequence alone and single token; prompts; responses.
    counts = sorted(parts.query_borders.diff().tolist())
    assert counts == sorted([1, 4, 9, 6, 1, 5, 3, 1, 5, 3])
    assert parts.keys is not None
    assert len(parts.keys.place_N) == int(parts.key_borders[-1]) == batch.num_tokens + 9 + 6
    end_to_end = kernel_parts(PackedRow(batch))
    assert end_to_end.queries is None
    assert end_to_end.keys is None
    assert end_to_end.query_borders.tolist() == end_to_end.key_borders.tolist() == batch.offsets.tolist()


def test_keys_are_repeated_for_a_kernel_without_grouped_queries() -> None:
    row = shared_row(two_prompts())
    inputs = inputs_of(row, 6, 2)
    expected = VariableLength(by_part).attend(*inputs, row, SCALE, None)
    torch.testing.assert_close(VariableLength(without_groups).attend(*inputs, row, SCALE, None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_picked_entries_is_that_of_embedding(dtype: torch.dtype) -> None:
    row = shared_row(two_prompts())
    place_N = torch.randint(row.places - 1, (500,), generator=torch.Generator().manual_seed(0))
    x_UHD = torch.randn(row.places, 3, 8, dtype=dtype, requires_grad=True)
    weight_NHD = torch.randn(500, 3, 8, dtype=dtype)
    chosen_NHD = picked(x_UHD, Places(place_N, row))
    expected_NHD = embedding(place_N, x_UHD.flatten(1)).unflatten(1, (3, 8))
    assert torch.equal(chosen_NHD, expected_NHD)
    one, other = (torch.autograd.grad((x * weight_NHD).sum(), x_UHD)[0] for x in (chosen_NHD, expected_NHD))
    torch.testing.assert_close(one, other)


def test_bytes_and_sorts_of_four_layers() -> None:
    """Two groups of 8 responses with Qwen2.5-0.5B's heads and torch's kernel, forward and backward, on the meta device.

    Besides the kernel, only keys and values are written: gathered at their own width, and their gradients summed. With
    keys repeated for each query head and whole sequences as queries, 30,423 bytes were written per place and layer.
    """
    layers, heads, key_heads, size = 4, 14, 2, 64
    prompts = torch.randint(99, (2, 100), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[*prompts[i % 2], i, *range(199)] for i in range(16)]
    row = shared_row(Batch.from_rows({"tokens": rows}).to("meta"))
    assert row.places == 2 * (100 + 8 * 200)
    shapes = [(1, row.places, count, size) for count in (heads, key_heads, key_heads)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    attention = VariableLength()
    with WrittenBytes() as written:
        for _ in range(layers):
            query_1HUD, key_1KUD, value_1KUD = (x.transpose(1, 2) for x in tensors)
            assert attention.supports(query_1HUD, value_1KUD)
            output_1UHD = attention.attend(query_1HUD, key_1KUD, value_1KUD, row, SCALE, None)
            assert output_1UHD.shape == (1, row.places, heads, size)
            torch.autograd.grad(output_1UHD, tensors, output_1UHD.detach())
    # The parts, and the places of the keys.
    assert written.calls["sort"] == 2
    nbytes = sum(nbytes for name, nbytes in written.by_operation.items() if "varlen" not in name)
    # Keys of all parts, and the gradients of all places, in two bytes per number.
    keys = len(rows) * 300 + 2 * 100
    copies = layers * (keys + row.places) * 2 * key_heads * size * 2
    assert copies < nbytes < copies + 600 * row.places
    assert nbytes / layers / row.places < 1500
