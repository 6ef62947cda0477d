import numpy as np
import pytest

from components.generate.config import SamplingConfig
from components.generate.sampling import uniform

WORD = 2**64


def splitmix64(state: int) -> int:
    """Return one output of the published generator, computed with Python integers."""
    z = (state + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def slow_uniform(*parts: int) -> float:
    state = 0
    for part in parts:
        state = splitmix64((state + part) % WORD)
    return (state >> 11) / 2**53


def test_the_mixing_function_is_splitmix64() -> None:
    # The first output of splitmix64 for seed 0, as published with its reference implementation.
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("parts", [(0, 0, 0, 0, 0), (42, 7, 123456789, 3, 511), (-1, 0, 2**62, -5, 1)])
def test_uniform_equals_the_scalar_definition(parts: tuple[int, int, int, int, int]) -> None:
    seed, step, prompt_id, sample_id, position = parts
    assert uniform(seed, step, [prompt_id], [sample_id], position)[0] == slow_uniform(*parts)


def test_the_random_number_of_a_row_does_not_depend_on_other_rows() -> None:
    prompt_id_B, sample_id_B, position_B = np.arange(50) // 4, np.arange(50) % 4, np.arange(50) % 7
    together_B = uniform(1, 2, prompt_id_B, sample_id_B, position_B)
    alone_B = [uniform(1, 2, [p], [s], t)[0] for p, s, t in zip(prompt_id_B, sample_id_B, position_B, strict=True)]
    assert together_B.tolist() == alone_B


def test_exchanging_two_arguments_changes_the_number() -> None:
    first, *others = [
        slow_uniform(*parts)
        for parts in [(1, 2, 3, 4, 5), (2, 1, 3, 4, 5), (1, 3, 2, 4, 5), (1, 2, 4, 3, 5), (1, 2, 3, 5, 4)]
    ]
    assert all(abs(first - other) > 1e-6 for other in others)
    assert uniform(1, 2, [3], [4], 5)[0] == first


def test_numbers_of_neighbouring_ids_are_uniform_and_uncorrelated() -> None:
    prompt_id_B, sample_id_B = np.repeat(np.arange(2000), 50), np.tile(np.arange(50), 2000)
    draw_B = uniform(42, 0, prompt_id_B, sample_id_B, 6)
    assert draw_B.min() >= 0.0
    assert draw_B.max() < 1.0
    # With 100,000 samples the mean has a standard error of 0.0009, a bin of 100 has 1000 +- 31.5, a correlation 0 +-
    # 0.003.
    assert abs(draw_B.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(draw_B, bins=100, range=(0, 1))[0] - 1000).max() < 160
    assert abs(np.corrcoef(draw_B[:-1], draw_B[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(draw_B, uniform(42, 0, prompt_id_B, sample_id_B, 7))[0, 1]) < 0.015
    assert abs(np.corrcoef(draw_B, uniform(42, 1, prompt_id_B, sample_id_B, 6))[0, 1]) < 0.015


@pytest.mark.parametrize(("field", "value"), [("temperature", -0.1), ("max_new_tokens", 0)])
def test_impossible_sampling_settings_are_named(field: str, value: float) -> None:
    settings: dict[str, float] = {field: value}
    with pytest.raises(ValueError, match=f"{field}={value}"):
        SamplingConfig(**settings)  # pyright: ignore[reportArgumentType]
