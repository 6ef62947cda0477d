"""B sequences, N all tokens of a batch end to end, V vocabulary."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.batch import Batch
from components.generate.hf_engine import HFRolloutConfig, HFRolloutEngine, SamplingConfig, _invert, likeliest
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.weights.publisher import WeightPublisher
from tests.messages import says

END = 1


def some_prompts(count: int = 24) -> Batch:
    """Prompts of 1 to 6 tokens, each of them twice. They include token 0, which could be mistaken for padding."""
    rows = [[(3 * i + 5 * t * t) % 20 for t in range(1 + i % 6)] for i in range(count // 2)]
    return Batch.from_rows(
        {"tokens": [row for row in rows for _ in range(2)]},
        {"prompt_id": [i // 2 for i in range(count)], "sample_id": [i % 2 for i in range(count)]},
    )


def same_prompt(tokens: list[int], count: int) -> Batch:
    return Batch.from_rows({"tokens": [tokens] * count}, {"prompt_id": [0] * count, "sample_id": list(range(count))})


def completions(batch: Batch) -> list[list[int]]:
    return [batch.row(i, "tokens")[batch.row(i, "action_mask")].tolist() for i in range(len(batch))]


@pytest.fixture(scope="module")
def engine(tied_model: Path) -> HFRolloutEngine:
    return HFRolloutEngine(tied_model)


def test_tokens_do_not_depend_on_chunk_size_or_order(tied_model: Path, engine: HFRolloutEngine) -> None:
    prompts, sampling = some_prompts(), SamplingConfig(max_new_tokens=10)
    whole = engine.generate(prompts, sampling)
    assert len({tuple(row) for row in completions(whole)}) > 12
    for max_rows in (1, 5):
        small = HFRolloutEngine(tied_model, HFRolloutConfig(max_num_seqs=max_rows)).generate(prompts, sampling)
        assert completions(small) == completions(whole)
        torch.testing.assert_close(small["rollout_logprob"], whole["rollout_logprob"], atol=1e-5, rtol=0)
    order_B = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))
    shuffled = engine.generate(prompts.select(order_B), sampling)
    assert completions(shuffled.select(order_B.argsort())) == completions(whole)


def test_a_completion_may_use_the_remaining_positions_and_at_least_one_token(
    engine: HFRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts of 1 to 6 tokens.
    prompts, sampling = some_prompts(), SamplingConfig(max_new_tokens=4)
    monkeypatch.setattr(engine, "max_tokens", 5)
    result = engine.generate(prompts, sampling)
    for i, tokens in enumerate(completions(result)):
        room = max(1, min(4, 5 - int(prompts.lengths[i])))
        assert len(tokens) == room or (len(tokens) < room and tokens[-1] == END)
    assert "max_new_tokens" not in result
    assert max(map(len, completions(result))) == 4


def test_prompts_and_their_columns_are_returned_in_order(engine: HFRolloutEngine) -> None:
    prompts = some_prompts().with_objects(label=[f"label {i}" for i in range(24)])
    prompts = prompts.with_sequences(difficulty=torch.arange(24.0))
    result = engine.generate(prompts, SamplingConfig(max_new_tokens=4))
    for name in ("prompt_id", "sample_id", "difficulty"):
        assert torch.equal(result[name], prompts[name])
    assert result["label"] == prompts["label"]
    assert torch.equal(result["prompt_length"], prompts.lengths)
    for i in range(len(prompts)):
        length = int(prompts.lengths[i])
        assert torch.equal(result.row(i, "tokens")[:length], prompts.row(i, "tokens"))
        assert result.row(i, "action_mask").tolist() == [False] * length + [True] * (
            len(result.row(i, "tokens")) - length
        )
        assert result.row(i, "rollout_logprob")[:length].tolist() == [0.0] * length


def test_a_completion_ends_with_its_end_token_or_is_truncated(engine: HFRolloutEngine) -> None:
    result = engine.generate(some_prompts(200), SamplingConfig(max_new_tokens=6))
    assert 0 < result["truncated"].sum() < 200
    for row, truncated in zip(completions(result), result["truncated"].tolist(), strict=True):
        assert END not in row[:-1]
        assert truncated == (row[-1] != END)
        assert len(row) == 6 or not truncated


def test_a_row_ends_at_its_limit_and_frees_its_cache(engine: HFRolloutEngine) -> None:
    prompts, sampling = same_prompt([2, 9, 4], 64), SamplingConfig(max_new_tokens=12)
    whole = completions(engine.generate(prompts, sampling))
    limits = [12] * 4 + [3] * 60
    rows_per_call: list[int] = []
    hook = engine.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows_per_call.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        result = engine.generate(prompts.with_sequences(max_new_tokens=torch.tensor(limits)), sampling)
    finally:
        hook.remove()
    assert completions(result) == [row[:limit] for row, limit in zip(whole, limits, strict=True)]
    assert result["truncated"].tolist() == [row[-1] != END for row in completions(result)]
    assert max(rows_per_call[3:]) <= 4


def test_tokens_sampled_after_the_limit_of_a_row_are_ignored(engine: HFRolloutEngine) -> None:
    # At this temperature an end token is as likely as any of the 20 tokens. A single finished row of 64 stays in the
    # batch.
    prompts, sampling = same_prompt([2, 9, 4], 256), SamplingConfig(max_new_tokens=8, temperature=30)
    new = [len(row) for row in completions(engine.generate(prompts, sampling))]
    longer = [i for i in range(256) if new[i] > 2]
    chosen = prompts.select([new.index(2), *longer[:63]]).with_sequences(max_new_tokens=torch.tensor([1] + [8] * 63))
    result = engine.generate(chosen, sampling)
    assert [len(row) for row in completions(result)] == [1, *(new[i] for i in longer[:63])]
    assert bool(result["truncated"][0])


def test_rows_with_equal_limits_are_sampled_as_with_one_global_limit(engine: HFRolloutEngine) -> None:
    prompts = some_prompts()
    limited = engine.generate(
        prompts.with_sequences(max_new_tokens=torch.full((24,), 5)), SamplingConfig(max_new_tokens=9)
    )
    plain = engine.generate(prompts, SamplingConfig(max_new_tokens=5))
    for name in ("tokens", "rollout_logprob", "truncated"):
        assert torch.equal(limited[name], plain[name])


def test_a_long_prompt_with_a_small_limit_shares_a_batch_with_a_short_prompt(engine: HFRolloutEngine) -> None:
    prompts = Batch.from_rows(
        {"tokens": [[2] * 60, [2, 9]]}, {"prompt_id": [0, 1], "sample_id": [0, 0], "max_new_tokens": [4, 40]}
    )
    result = engine.generate(prompts, SamplingConfig(max_new_tokens=40, temperature=0))
    for i in range(2):
        one = engine.generate(
            prompts.select([i]), SamplingConfig(max_new_tokens=int(prompts["max_new_tokens"][i]), temperature=0)
        )
        assert completions(one)[0] == completions(result)[i]


@pytest.mark.parametrize("limit", [0, 6])
def test_a_row_limit_above_the_sampling_limit_raises_an_error(engine: HFRolloutEngine, limit: int) -> None:
    prompts = some_prompts().with_sequences(max_new_tokens=torch.tensor([3] * 23 + [limit]))
    with pytest.raises(ValueError, match=says("`max_new_tokens`", min(3, limit), max(3, limit), "max_new_tokens=5")):
        engine.generate(prompts, SamplingConfig(max_new_tokens=5))


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_greedy_equals_generate_of_transformers(model: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    prompts = some_prompts()
    result = HFRolloutEngine(folder).generate(prompts, SamplingConfig(temperature=0, max_new_tokens=12))
    assert completions(result) == greedy_by_transformers(folder, prompts, 12)


def greedy_by_transformers(folder: Path, prompts: Batch, max_new_tokens: int) -> list[list[int]]:
    reference: Any = load_policy(folder)
    expected = []
    for i in range(len(prompts)):
        row_1T = prompts.row(i, "tokens")[None]
        found_1T = reference.generate(
            row_1T, attention_mask=torch.ones_like(row_1T), do_sample=False, max_new_tokens=max_new_tokens
        )
        expected.append(found_1T[0, row_1T.shape[1] :].tolist())
    return expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_the_trainer(tied_model: Path, engine: HFRolloutEngine, temperature: float) -> None:
    result = engine.generate(some_prompts(), SamplingConfig(temperature=temperature, max_new_tokens=12))
    with torch.no_grad():
        trainer_N = token_logprobs(load_policy(tied_model), result, temperature=temperature).logprob_N
    trainer_N = torch.where(result["action_mask"], trainer_N, 0.0)
    assert result["rollout_logprob"].dtype == torch.float32
    torch.testing.assert_close(result["rollout_logprob"], trainer_N, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_sampled_with_the_probabilities_of_the_model(
    tied_model: Path, engine: HFRolloutEngine, temperature: float
) -> None:
    count = 20_000
    result = engine.generate(
        same_prompt([2, 9, 4], count), SamplingConfig(temperature=temperature, max_new_tokens=1, seed=3)
    )
    share_V = torch.bincount(result["tokens"][result["action_mask"]], minlength=20) / count
    with torch.no_grad():
        logits_V = load_policy(tied_model)(input_ids=torch.tensor([[2, 9, 4]])).logits[0, -1]
    probability_V = (logits_V / temperature).softmax(-1)
    # Tolerance of four standard errors of a relative frequency, which are at most 0.0142.
    error_V = 4 * (probability_V * (1 - probability_V) / count).sqrt() + 1e-4
    assert bool(((share_V - probability_V).abs() < error_V).all())


def test_a_token_of_probability_0_is_never_sampled(engine: HFRolloutEngine) -> None:
    logprob_AV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log().expand(4, 5)
    uniform_A = torch.tensor([0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert _invert(logprob_AV, uniform_A).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_raise_an_error_that_names_diverged_weights(tied_model: Path, temperature: float) -> None:
    engine = HFRolloutEngine(tied_model)
    for weight in engine.model.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=says("not finite", "diverged", "checkpoint", "train.learning_rate")):
        engine.generate(some_prompts(), SamplingConfig(temperature=temperature, max_new_tokens=2))


def test_top_k_is_applied_before_top_p() -> None:
    # Probabilities .5 .25 .125 .125. After top-k 3 the first two have .857 > .8. Without it they would have .75.
    logits_1V = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    assert torch.isfinite(likeliest(logits_1V, 0.8, 3)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(likeliest(logits_1V, 0.8, 0)).tolist() == [[True, True, False, True]]
    assert torch.isfinite(likeliest(logits_1V, 0.01, 0)).tolist() == [[False, True, False, False]]


def test_seed_step_prompt_and_sample_each_change_the_tokens(engine: HFRolloutEngine) -> None:
    prompts = same_prompt([2, 9, 4], 8)

    def drawn(batch: Batch, seed: int = 1, step: int = 0) -> list[list[int]]:
        return completions(engine.generate(batch, SamplingConfig(max_new_tokens=8, seed=seed, step=step)))

    base = drawn(prompts)
    assert drawn(prompts) == base
    others = [
        drawn(prompts, seed=2),
        drawn(prompts, step=1),
        drawn(prompts.with_sequences(prompt_id=torch.ones(8, dtype=torch.int64))),
        drawn(prompts.with_sequences(sample_id=torch.arange(8) + 8)),
    ]
    assert all(other != base for other in others)


def test_a_continued_sequence_samples_the_tokens_of_an_uninterrupted_one(engine: HFRolloutEngine) -> None:
    prompts = same_prompt([2, 9, 4], 16)
    whole = engine.generate(prompts, SamplingConfig(max_new_tokens=8))
    half = engine.generate(prompts, SamplingConfig(max_new_tokens=4))
    going_on = half["truncated"].nonzero().squeeze(1)
    assert len(going_on) > 4
    resumed = engine.generate(half.select(going_on), SamplingConfig(max_new_tokens=4))
    assert resumed["tokens"].tolist() == whole.select(going_on)["tokens"].tolist()


def test_finished_rows_leave_the_batch_and_equal_prompts_share_a_prefill(engine: HFRolloutEngine) -> None:
    rows_per_call: list[int] = []
    hook = engine.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows_per_call.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        # At this temperature every token, including the end token, has a probability of about 1/20.
        result = engine.generate(same_prompt([2, 9, 4], 256), SamplingConfig(max_new_tokens=20, temperature=30))
    finally:
        hook.remove()
    new_B = result.lengths - 3
    assert rows_per_call[0] == 1
    # Call k computes the logits of new token k. Its rows are the unfinished ones, and at most one fifteenth of finished
    # ones.
    for k, rows in enumerate(rows_per_call[1:], start=1):
        unfinished = int((new_B > k).sum())
        assert unfinished <= rows <= unfinished * 16 / 15
    assert rows_per_call[-1] < 150


def test_completions_can_be_trained_on(tied_model: Path, engine: HFRolloutEngine) -> None:
    # Tensors created in inference mode could not be saved for a backward pass.
    result = engine.generate(some_prompts(), SamplingConfig(max_new_tokens=4))
    logprob_N = token_logprobs(load_policy(tied_model), result).logprob_N
    (logprob_N * result["rollout_logprob"]).sum().backward()


def test_a_batch_without_prompts_gives_a_batch_without_completions(engine: HFRolloutEngine) -> None:
    result = engine.generate(some_prompts().select([]), SamplingConfig(max_new_tokens=4))
    assert len(result) == 0
    assert {"tokens", "action_mask", "rollout_logprob", "truncated", "weight_version"} <= set(result.names)


def named_weights(folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in load_policy(folder).named_parameters()}


@pytest.mark.parametrize(("old", "new"), [("tied_model", "other_tied_model"), ("untied_model", "other_untied_model")])
def test_an_engine_loads_published_weights(old: str, new: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    engine = HFRolloutEngine(request.getfixturevalue(old))
    new_folder = request.getfixturevalue(new)
    prompts, greedy = some_prompts(), SamplingConfig(temperature=0, max_new_tokens=12)
    before = engine.generate(prompts, greedy)
    assert before["weight_version"].tolist() == [0] * 24

    engine.receive(WeightPublisher(tmp_path / "w").publish(3, named_weights(new_folder).items()))
    after = engine.generate(prompts, greedy)
    assert engine.weight_version == 3
    assert after["weight_version"].tolist() == [3] * 24
    assert completions(after) == greedy_by_transformers(new_folder, prompts, 12)
    assert completions(after) != completions(before)


def test_a_tied_matrix_may_be_sent_under_both_names(tied_model: Path, other_tied_model: Path, tmp_path: Path) -> None:
    weights = named_weights(other_tied_model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    engine = HFRolloutEngine(tied_model)
    engine.receive(WeightPublisher(tmp_path / "w").publish(1, weights.items()))
    greedy = SamplingConfig(temperature=0, max_new_tokens=12)
    expected = greedy_by_transformers(other_tied_model, some_prompts(), 12)
    assert completions(engine.generate(some_prompts(), greedy)) == expected


def refused(engine: HFRolloutEngine, weights: dict[str, Tensor], directory: Path) -> str:
    """Return the message with which the engine rejects weights, after a check that its own weights are unchanged."""
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    with pytest.raises(ValueError, match="version 1") as error:
        engine.receive(WeightPublisher(directory).publish(1, weights.items()))
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.model.named_parameters())
    assert engine.weight_version == 0
    return str(error.value)


def test_a_missing_weight_is_an_error_that_names_it(
    untied_model: Path, other_untied_model: Path, tmp_path: Path
) -> None:
    weights = named_weights(other_untied_model)
    del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]
    message = refused(HFRolloutEngine(untied_model), weights, tmp_path / "w")
    assert "['lm_head.weight', 'model.layers.1.mlp.up_proj.weight']" in message


def test_an_unknown_weight_is_an_error_that_names_it(tied_model: Path, tmp_path: Path) -> None:
    weights = named_weights(tied_model) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}
    message = refused(HFRolloutEngine(tied_model), weights, tmp_path / "w")
    assert "['model.layers.9.mlp.up_proj.weight']" in message


def test_a_weight_of_another_shape_is_an_error_and_nothing_is_copied(
    tied_model: Path, other_tied_model: Path, tmp_path: Path
) -> None:
    weights = named_weights(other_tied_model)
    weights["model.norm.weight"] = torch.zeros(63)
    message = refused(HFRolloutEngine(tied_model), weights, tmp_path / "w")
    assert re.search(says("model.norm.weight", [63], [64]), message)


def test_an_older_weight_version_is_refused_and_an_equal_one_is_loaded_again(tied_model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "w")
    old, new = (publisher.publish(version, named_weights(tied_model).items()) for version in (1, 2))
    engine = HFRolloutEngine(tied_model)
    engine.receive(new)
    engine.receive(new)
    with pytest.raises(ValueError, match=says("version 1", "version 2")):
        engine.receive(old)


def test_bfloat16_weights_reach_a_float32_engine(tied_model: Path, other_tied_model: Path, tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in named_weights(other_tied_model).items()}
    engine = HFRolloutEngine(tied_model)
    engine.receive(WeightPublisher(tmp_path / "w").publish(1, weights.items()))
    for name, parameter in engine.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, weights[name].float())


def test_a_bfloat16_engine_reports_float32_logprobs(tied_model: Path) -> None:
    engine = HFRolloutEngine(tied_model, HFRolloutConfig(precision="bf16"))
    result = engine.generate(some_prompts(), SamplingConfig(max_new_tokens=4))
    assert result["rollout_logprob"].dtype == torch.float32


def test_a_sleeping_engine_raises_an_error_until_it_is_woken(tied_model: Path) -> None:
    engine = HFRolloutEngine(tied_model)
    engine.sleep()
    with pytest.raises(ValueError, match=r"wake\(\)"):
        engine.generate(some_prompts(), SamplingConfig())
    engine.wake()
    assert len(engine.generate(some_prompts(), SamplingConfig(max_new_tokens=2))) == 24


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_holds_no_memory_and_needs_dropped_weights_again(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setattr(HFRolloutEngine, "_can_free", staticmethod(lambda: True))  # on a CPU this is host memory
    engine = HFRolloutEngine(tied_model)
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone()  # not the memory-mapped file, which cannot be freed
    weights = [(name, parameter.detach().clone()) for name, parameter in engine.model.named_parameters()]
    published = WeightPublisher(tmp_path / "w").publish(1, weights)
    expected = engine.generate(some_prompts(), SamplingConfig(max_new_tokens=4))
    held = [*engine.model.parameters(), *engine.model.buffers()]
    nbytes = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    assert engine.sleep(level) == nbytes > 0
    assert engine.sleep(level) == 0
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert engine.has_weights == (level == 1)
    if level == 2:
        engine.wake(for_weights=True)
        with pytest.raises(ValueError, match=r"wake\(\)"):
            engine.generate(some_prompts(), SamplingConfig())
        engine.wake()
        with pytest.raises(ValueError, match=says("weights", "receive")):
            engine.generate(some_prompts(), SamplingConfig())
        engine.receive(published)
    engine.wake()
    generated = engine.generate(some_prompts(), SamplingConfig(max_new_tokens=4))
    assert torch.equal(generated["tokens"], expected["tokens"])
    assert torch.equal(generated["rollout_logprob"], expected["rollout_logprob"])


@pytest.mark.parametrize(
    ("prompts", "facts"),
    [
        (Batch.from_rows({"tokens": [[2]]}, {"prompt_id": [0]}), [["sample_id"]]),
        (
            Batch([1, 0], {"tokens": torch.tensor([2])}, {"prompt_id": torch.arange(2), "sample_id": torch.arange(2)}),
            ["prompt 1"],
        ),
        (same_prompt([2] * 60, 1), ["prompt 0", "60 tokens", "max_new_tokens=5", 64]),
    ],
)
def test_prompts_that_cannot_be_continued_are_named(
    engine: HFRolloutEngine, prompts: Batch, facts: list[object]
) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        engine.generate(prompts, SamplingConfig(max_new_tokens=5))
