"""Both training engines with one process and with two ranks. Each combination runs once, and every test reads its
record.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from components.batch import Batch
from components.generate.hf_engine import HFRolloutEngine, SamplingConfig
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.train.config import TrainConfig
from components.train.optimizer import adam_of
from tests.components.helpers import train_cases as cases
from tests.components.helpers.ranks import WORLD_SIZES, run_ranks
from tests.components.helpers.train_worker import meet_nowhere, trained_in_many_ways
from tests.messages import says

STAGES = (0, 1, 2, 3)


class Run(NamedTuple):
    folder: Path
    records: list[dict[str, Any]]
    """One record per rank."""


RunOf = Callable[[int], Run]
"""Return the records of the run with this number of ranks."""


@pytest.fixture(scope="module")
def run_of(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Each run starts when a test first requests it."""
    root = tmp_path_factory.mktemp("train")

    @cache
    def run(world_size: int) -> Run:
        folder = root / str(world_size)
        return Run(folder, run_ranks(trained_in_many_ways, world_size, folder, str(tied_model), folder))

    return run


def whole(run: Run, case: str, column: str) -> Tensor:
    """Return a column of the evaluated batch, concatenated over the ranks."""
    return torch.cat([record[case][column] for record in run.records])


class Plain(NamedTuple):
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    before: Tensor
    after: Tensor


@pytest.fixture(scope="module")
def plain(tied_model: Path) -> Plain:
    """The same training in plain torch: one process, one padded batch per step, no micro-batches."""
    model = load_policy(tied_model)
    evaluated = Batch.concat(cases.evaluated())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": cases.WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=cases.BETAS, eps=cases.EPS)
    before = cases.logprobs(model, evaluated).detach()
    metrics = []
    # 4 steps in total, linear decay without warm-up
    for share, batch in zip((1.0, 0.75, 0.5), cases.minibatches(), strict=True):
        loss = -token_logprobs(model, batch).logprob_N[batch["loss_mask"]].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cases.MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = cases.LEARNING_RATE * share
        optimizer.step()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": cases.LEARNING_RATE * share})
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Plain(metrics, weights, before, cases.logprobs(model, evaluated).detach())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "case",
    [
        *(f"fp32-{stage}" for stage in STAGES),
        *("large_micro_batches", "few_sequences", "offload", "fsdp-checkpointing"),
        *(case for case in cases.FSDP if case not in {"fsdp-bf16-2", "fsdp-bf16-3", "fsdp-learning_rate_0"}),
    ],
)
def test_training_equals_plain_torch(run_of: RunOf, plain: Plain, world_size: int, case: str) -> None:
    """Holds for any engine, stage, number of ranks and micro-batch size."""
    run = run_of(world_size)
    for actual, expected in zip(run.records[0][case]["metrics"], plain.metrics, strict=True):
        assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=2e-5)
    found_weights = run.records[0][case]["weights"]
    assert found_weights.keys() == plain.weights.keys()
    for name, expected in plain.weights.items():
        torch.testing.assert_close(found_weights[name], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(whole(run, case, "before"), plain.before, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole(run, case, "after"), plain.after, atol=1e-3, rtol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["bf16-0", "bf16-2", "bf16-3", "fsdp-bf16-2", "fsdp-bf16-3"])
def test_bf16_training_follows_float32(run_of: RunOf, plain: Plain, world_size: int, case: str) -> None:
    record = run_of(world_size).records[0][case]
    for actual, expected in zip(record["metrics"], plain.metrics, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=0.03)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert {tensor.dtype for tensor in record["weights"].values()} == {torch.bfloat16}
    for name, expected in plain.weights.items():
        # Adjacent bfloat16 numbers below 1 differ by at most 0.0039.
        torch.testing.assert_close(record["weights"][name].float(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["fp32-0", "fp32-3", "bf16-2", "fsdp-2", "fsdp-3"])
def test_metrics_are_sums_over_micro_batches_and_ranks_and_equal_on_all_ranks(
    run_of: RunOf, world_size: int, case: str
) -> None:
    first, *others = (record[case] for record in run_of(world_size).records)
    for metrics in first["metrics"]:
        # The micro-batches' shares of the step add up to 1. Passes that only keep ranks in step do not count.
        assert metrics["token_share"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["sequence_share"] == pytest.approx(1.0, abs=1e-6)
    assert all(record["metrics"] == first["metrics"] for record in others)
    assert first["step_count"] == cases.STEPS


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_forward_keeps_the_order_of_the_batch(run_of: RunOf, tied_model: Path, world_size: int) -> None:
    batch, model = Batch.concat(cases.evaluated()), load_policy(tied_model)
    with torch.no_grad():
        alone_N = torch.cat([token_logprobs(model, batch.select([i])).logprob_N for i in range(len(batch))])
    for case in ("fsdp-2", "fsdp-3", *(f"fp32-{stage}" for stage in STAGES)):
        torch.testing.assert_close(whole(run_of(world_size), case, "before"), alone_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["learning_rate_0-0", "learning_rate_0-3", "fsdp-learning_rate_0"])
def test_learning_rate_0_changes_nothing(run_of: RunOf, world_size: int, case: str) -> None:
    record = run_of(world_size).records[0][case]
    assert record["metrics"][0]["grad_norm"] > 0
    for name, start_weight in record["start"].items():
        assert torch.equal(record["weights"][name], start_weight)


@pytest.mark.full
def test_only_rank_0_gets_parameters(run_of: RunOf) -> None:
    assert [len(record["fp32-3"]["weights"]) for record in run_of(2).records] == [26, 0]
    assert [len(record["fp32-1"]["weights"]) for record in run_of(2).records] == [26, 0]
    assert [len(record["fsdp-3"]["weights"]) for record in run_of(2).records] == [26, 0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["nan", "nan-fsdp"])
def test_a_loss_that_is_nan_on_one_rank_stops_all_before_the_step(run_of: RunOf, world_size: int, case: str) -> None:
    for record in run_of(world_size).records:
        message = record[case]["message"]
        assert re.search(says("step 1", "loss=nan", "token_share=inf"), message)
        assert "\n" not in message
        assert record[case]["unchanged"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [*(str(stage) for stage in STAGES), "bf16", "fsdp-2", "fsdp-3"])
def test_a_gradient_that_is_not_finite_stops_all_before_the_step(run_of: RunOf, world_size: int, case: str) -> None:
    for record in run_of(world_size).records:
        failed = record[f"infinite_gradient-{case}"]
        assert re.search(r"(?=.*step 1\b).*grad_norm=(nan|inf)\b", failed["message"])
        assert failed["unchanged"]
        assert failed["step_count"] == 1


def test_passes_without_gradients_have_separate_micro_batch_limits(run_of: RunOf) -> None:
    # 7 sequences of at least 2 tokens, each of them alone because the budget is 1 token. 5 of them are trained on, two
    # at a time.
    counted = run_of(1).records[0]["forward_tokens"]
    assert counted["forward"] == [1] * 7
    assert max(counted["training"]) == 2
    assert sum(counted["training"]) == 5


@pytest.mark.parametrize(("world_size", "training", "forward"), [(1, 4, [7]), (2, 2, [6, 1])])
def test_each_micro_batch_and_each_gathered_or_saved_tensor_reports_progress(
    run_of: RunOf, world_size: int, training: int, forward: list[int]
) -> None:
    for record, inputs in zip(run_of(world_size).records, forward, strict=True):
        beats, parameters = record["beats"], len(run_of(1).records[0]["fp32-3"]["weights"])
        # 7 sequences, two at a time, on one rank or on each of two.
        assert (beats["training"], beats["forward"], beats["gathering"]) == (training, inputs, parameters)
        assert beats["state"] >= 3 * parameters


@pytest.mark.full
def test_each_of_two_ranks_evaluates_its_own_part(run_of: RunOf) -> None:
    assert [record["forward_tokens"]["forward"] for record in run_of(2).records] == [[1] * 6, [1]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_saved_folder_loads_with_from_pretrained(run_of: RunOf, world_size: int) -> None:
    folder = run_of(world_size).folder / "hf"
    model = load_policy(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, run_of(world_size).records[0]["fp32-3"]["weights"][name])
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(folder).eos_token == "$"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", cases.SAVED)
def test_fsdp_saves_the_same_model_files_as_deepspeed(run_of: RunOf, world_size: int, case: str) -> None:
    folder, weights = run_of(world_size).folder, run_of(world_size).records[0][case]["weights"]
    saved = load_file(folder / f"hf-{case}" / "model.safetensors")
    assert saved.keys() == weights.keys() == load_file(folder / "hf" / "model.safetensors").keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    note = json.loads((folder / f"hf-{case}" / "config.json").read_text())
    other = json.loads((folder / "hf" / "config.json").read_text())
    assert note == other | {"dtype": "bfloat16" if "bf16" in case else "float32"}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp_equals_deepspeed_and_itself_with_other_micro_batches(run_of: RunOf, world_size: int, stage: int) -> None:
    expected = run_of(world_size).records[0][f"fp32-{stage}"]
    for case in (f"fsdp-{stage}", f"fsdp-large_micro_batches-{stage}"):
        actual = run_of(world_size).records[0][case]
        for one, other in zip(actual["metrics"], expected["metrics"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert actual["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(actual["weights"][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_partitioned_weights_reach_the_rollout_engine(run_of: RunOf, tied_model: Path, world_size: int) -> None:
    engine = HFRolloutEngine(tied_model)
    engine.receive(run_of(world_size).records[0]["handle"])
    batch = Batch.concat(cases.evaluated())
    with torch.no_grad():
        engine_N = token_logprobs(engine.model, batch).logprob_N
    torch.testing.assert_close(engine_N, whole(run_of(world_size), "fp32-3", "after"), atol=1e-4, rtol=0)
    prompts = batch.only("tokens").with_sequences(
        prompt_id=torch.arange(7), sample_id=torch.zeros(7, dtype=torch.int64)
    )
    assert engine.generate(prompts, SamplingConfig(max_new_tokens=2))["weight_version"].tolist() == [1] * 7


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["deepspeed-value", "fsdp-value"])
def test_a_value_model_trains_and_is_saved(run_of: RunOf, world_size: int, case: str) -> None:
    run = run_of(world_size)
    record = run.records[0][case]
    for actual, expected in zip(record["metrics"], run_of(1).records[0]["deepspeed-value"]["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)
    model = load_value_model(run.folder / case)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, record["weights"][name])
    value_N = token_values(model, Batch.concat(cases.evaluated()))
    torch.testing.assert_close(value_N, whole(run, case, "after"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_process_group_of_another_size_is_an_error(run_of: RunOf, world_size: int) -> None:
    message = run_of(world_size).records[-1]["group"]
    assert re.search(says("WORLD_SIZE=5", f"group of {world_size}"), message)


def test_a_process_group_without_an_address_raises_an_error(tmp_path: Path) -> None:
    (message,) = run_ranks(meet_nowhere, 1, tmp_path)
    assert re.search(says("WORLD_SIZE=2", "MASTER_ADDR", "MASTER_PORT"), message)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_compiles_no_native_code(run_of: RunOf, world_size: int) -> None:
    assert not (run_of(world_size).folder / "extensions").exists()


def test_the_learning_rate_rises_linearly_and_decays_to_its_minimum() -> None:
    def rates(scheduler: str) -> list[float]:
        config = TrainConfig(
            learning_rate=1.0, lr_scheduler=scheduler, lr_warmup_ratio=0.2, min_lr_ratio=0.1, total_steps=10
        )
        return [config.learning_rate_at(step) for step in range(12)]

    # 2 warm-up steps, then 8 steps of decay to 0.1. Halfway (0.1 + 1) / 2 = 0.55, after a quarter 1 - 0.9 / 4 = 0.775.
    assert rates("constant") == [0.5] + [1.0] * 11
    assert [rates("linear")[step] for step in (0, 1, 2, 4, 6, 10, 11)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.775, 0.55, 0.1, 0.1]
    )
    # (1 + cos(45 degrees)) / 2 = 0.853553, 0.1 + 0.9 * 0.853553 = 0.868198
    assert [rates("cosine_with_min_lr")[step] for step in (0, 1, 2, 4, 6, 10, 11)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.868198, 0.55, 0.1, 0.1]
    )


def test_a_warm_up_from_zero_is_shifted_by_one_step_and_steps_may_share_a_rate() -> None:
    config = TrainConfig(learning_rate=1.0, lr_warmup_ratio=0.4, lr_warmup_from_zero=True, total_steps=10)
    assert [config.learning_rate_at(step) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    # 5 learning rates of two steps each. ceil(0.4 * 5) = 2 of them rise.
    pairs = dataclasses.replace(config, steps_per_rate=2)
    assert [pairs.learning_rate_at(step) for step in range(6)] == [0, 0, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize(("decays_all", "norm"), [(False, 1.0), (True, 0.95)])
def test_weight_decay_applies_to_vectors_on_request(decays_all: bool, norm: float) -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    adam = adam_of(model, TrainConfig(learning_rate=0.1, weight_decay=0.5, weight_decay_all=decays_all))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    assert [model.weight.item(), model.bias.item()] == pytest.approx([0.95, norm])


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"zero_stage": 4}, ["zero_stage=4", 0, 1, 2, 3]),
        ({"precision": "fp16"}, ["precision=fp16", "bf16_autocast"]),
        ({"learning_rate": -1.0}, ["learning_rate=-1.0"]),
        ({"lr_scheduler": "cosine"}, ["lr_scheduler=cosine", "cosine_with_min_lr"]),
        ({"lr_scheduler": "linear"}, ["total_steps"]),
        ({"max_tokens": 0}, ["max_tokens=0"]),
        ({"max_sequences": -1}, ["max_sequences=-1", 0]),
        ({"forward_max_tokens": -1}, ["forward_max_tokens=-1", 0]),
        ({"forward_max_sequences": -2}, ["forward_max_sequences=-2", 0]),
        ({"ema_beta": 1.0}, ["ema_beta=1.0", "below 1"]),
        ({"ema_beta": -0.1}, ["ema_beta=-0.1"]),
        ({"ema_beta": float("nan")}, ["ema_beta=nan"]),
        ({"adam_offload": True}, ["adam_offload", "zero_stage", 1, 2, 3]),
        ({"engine": "megatron"}, ["engine=megatron", "deepspeed", "fsdp"]),
        ({"engine": "fsdp"}, ["zero_stage=0", "fsdp", 2, 3]),
        ({"engine": "fsdp", "zero_stage": 2, "overlap_comm": True}, ["overlap_comm=True", "fsdp"]),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        TrainConfig(**settings)
