"""A frozen model computes the same bits as a trained one: before the first update the KL is 0 and the ratio is 1.

One run with one process, and one with two ranks. Every test reads their records.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.models.loading import load_policy
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.rl.kl import kl_estimate
from tests.components.helpers import frozen_cases as cases
from tests.components.helpers.ranks import NIGHTLY_ON_TWO, run_ranks

ENGINES = [f"{precision}-{engine}" for precision in cases.PRECISIONS for engine in cases.ENGINES]


class Runs:
    """Records of the ranks. Each run starts when a test first requests it."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self._records: dict[int, list[dict[str, Any]]] = {}

    def __call__(self, world_size: int) -> list[dict[str, Any]]:
        if world_size not in self._records:
            folder = self.root / str(world_size)
            self._records[world_size] = run_ranks(cases.compared, world_size, folder, str(self.model))
        return self._records[world_size]


@pytest.fixture(scope="module")
def runs(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("frozen"), untied_model)


def rounding(precision: str, world_size: int) -> float:
    """Tolerance in nats. The training passes of two ranks contain other sequences than the passes before, and some CPUs
    round matrix products differently for other rows.
    """
    if world_size == 1:
        return 0.0
    return 2e-6 if precision == "fp32" else 0.02


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", ENGINES)
def test_before_the_first_update_the_kl_is_0_and_the_ratio_1(runs: Runs, world_size: int, case: str) -> None:
    precision = case.partition("-")[0]
    for rank in runs(world_size):
        policy_N = rank[case]["logprobs"]
        assert policy_N.abs().sum() > 1
        for layout in cases.LAYOUTS:
            reference_N = rank[f"{precision}-{layout}"]["logprobs"]
            everything = torch.ones_like(policy_N, dtype=torch.bool)
            for estimator in ("k1", "k2", "k3"):
                assert kl_estimate(policy_N, reference_N, everything, estimator).eq(0).all()
        assert rank[case]["log_ratio"] <= rounding(precision, world_size)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("engine", cases.LORA)
def test_a_trained_policy_without_its_adapters_equals_the_initial_model(
    runs: Runs, world_size: int, engine: str
) -> None:
    for rank in runs(world_size):
        trained, reference_N = rank[f"lora-{engine}"], rank[f"{cases.LORA[engine]}-whole"]["logprobs"]
        assert trained["log_ratio"] <= rounding(cases.LORA[engine], world_size)
        assert torch.equal(trained["logprobs"], reference_N)
        assert torch.equal(trained["adapters_off"], reference_N)
        assert (trained["trained"] - reference_N).abs().max() > 0.01
        assert torch.equal(trained["on_again"], trained["trained"])


def test_each_precision_setting_rounds_to_its_dtype(runs: Runs, untied_model: Path) -> None:
    record = runs(1)[0]
    batch: Batch = cases.cases.minibatches()[0]
    plain = load_policy(untied_model)
    exact_N = torch.cat([policy_logprobs(plain, batch.select([i])) for i in range(len(batch))]).detach()
    apart = {p: (record[f"{p}-whole"]["logprobs"] - exact_N).abs().mean().item() for p in cases.PRECISIONS}
    assert apart["fp32"] < 1e-5
    assert all(1e-4 < apart[precision] < 0.05 for precision in ("bf16", "bf16_autocast"))
    assert apart["bf16"] != apart["bf16_autocast"]


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_a_sharded_model_keeps_only_the_rows_of_its_rank(runs: Runs, world_size: int, untied_model: Path) -> None:
    """With bf16_autocast also half of the factors of products: all weights except embeddings, biases and norms."""
    config = AutoConfig.from_pretrained(untied_model)
    hidden, wide, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    matrices = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * wide) + config.vocab_size * hidden
    others = config.vocab_size * hidden + layers * (2 * hidden + hidden + 2 * keys) + hidden
    whole = {
        "fp32": 4 * (matrices + others),
        "bf16": 2 * (matrices + others),
        "bf16_autocast": 2 * matrices + 4 * others,
    }
    for rank in runs(world_size):
        for precision, size in whole.items():
            assert rank[f"{precision}-whole"]["bytes"] == size
            for layout in ("sharded", "offloaded"):
                assert rank[f"{precision}-{layout}"]["bytes"] == size // world_size
                assert torch.equal(rank[f"{precision}-{layout}"]["again"], rank[f"{precision}-whole"]["logprobs"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_a_value_model_can_be_sharded_too(runs: Runs, world_size: int, untied_model: Path) -> None:
    exact_N = state_values(load_value_model(untied_model, packing=True), cases.cases.minibatches()[0]).detach()
    values = [torch.cat([rank[f"values-{layout}"] for rank in runs(world_size)]) for layout in cases.LAYOUTS]
    assert values[0].tolist() == pytest.approx(exact_N.tolist(), abs=0.02)
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
