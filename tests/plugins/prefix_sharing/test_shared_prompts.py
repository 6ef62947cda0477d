"""Shared prompts. Legend: B sequences, N tokens of all of them end to end, U tokens of the row with each prefix
once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from components.batch import Batch
from components.models import causal
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.packing.layout import END_TO_END, layout_of, set_layout
from components.models.packing.packed_model import packed_inputs
from components.models.packing.packed_row import PackedRow
from components.models.state_values import state_values, token_values
from components.models.value_model import load_value_model
from plugins.prefix_sharing import shared_prompts
from plugins.prefix_sharing.shared_prompts import (
    Run,
    SharedPrompts,
    row_plan,
    runs_of,
    shared_micro_batches,
    shared_places,
    shares_of_runs,
)
from tests.components.helpers import shared_cases
from tests.components.helpers.ranks import run_ranks
from tests.components.models.packing.test_packed_model import CONFIGS

P = [2, 3, 4, 5]
Q = [9, 8, 7, 6]


def batch_of(*rows: list[int]) -> Batch:
    return Batch.from_rows({"tokens": list(rows)})


def test_sequences_with_a_common_prefix_are_one_run() -> None:
    batch = batch_of([*P, 1, 1], [*Q, 1], [*P, 6], [0, 0], [*Q, 2], [*P, 7, 7, 7])
    assert runs_of(batch, 2) == [Run([3], 0), Run([0, 2, 5], 4), Run([1, 4], 4)]
    assert [run.saved for run in runs_of(batch, 2)] == [0, 8, 4]
    assert runs_of(batch, 5) == [Run([i], 0) for i in (3, 0, 2, 5, 1, 4)]


def test_with_one_follower_the_last_common_token_is_not_shared() -> None:
    # After [2, 3, 4] all sequences have a 5, and then they differ. The sequences of Q share [9, 8, 7] and a 6.
    batch = batch_of([*P, 1, 1], [*Q, 1], [*P, 6], [0, 0], [*Q, 2], [*P, 7, 7, 7])
    assert runs_of(batch, 2, one_follower=True) == [Run([3], 0), Run([0, 2, 5], 3), Run([1, 4], 3)]
    assert runs_of(batch, 4, one_follower=True) == [Run([i], 0) for i in (3, 0, 2, 5, 1, 4)]
    # Sequences that differ in their first token share nothing.
    assert runs_of(batch_of([1, 2], [3, 4]), 0, one_follower=True) == [Run([0, 1], 0)]


def test_a_sequence_that_is_a_prefix_of_another_keeps_one_token() -> None:
    # The same sequence twice, and a third one that continues it: 4 tokens are equal, but each sequence keeps the last
    # one.
    assert runs_of(batch_of(P, [*P, 1], P), 2) == [Run([0, 2, 1], 3)]
    assert runs_of(batch_of([5], [5]), 1) == [Run([0], 0), Run([1], 0)]


def test_prompts_of_groups_are_preferred_to_a_shorter_system_prompt() -> None:
    # All begin with [1, 1, 1]: one run saves 3 x 5 tokens. Separate runs save 7 x 2 and 7 x 1: 21.
    first = [[1, 1, 1, *P[:3], 10, i] for i in range(3)]
    second = [[1, 1, 1, *Q[:3], 10, i] for i in range(2)]
    alone = [1, 1, 1, 15, 2]
    assert runs_of(batch_of(*first, *second, alone), 2) == [Run([0, 1, 2], 7), Run([3, 4], 7), Run([5], 0)]
    # If all have different prompts, only the common beginning is shared: 3 x 3 tokens of four sequences.
    others = [[1, 1, 1, i, 7, 7] for i in (4, 8, 2, 6)]
    assert runs_of(batch_of(*others), 2) == [Run([2, 0, 3, 1], 3)]


def test_a_row_has_the_prefix_once_and_all_other_tokens() -> None:
    batch = batch_of([*P, 1], [7, 7], [*P, 6, 6])
    place_N, first_U = shared_places(batch, [Run([0, 2], 3), Run([1], 0)])
    # The row: 2 3 4 | 5 1 | 5 6 6 | 7 7
    assert place_N.tolist() == [0, 1, 2, 3, 4, 8, 9, 0, 1, 2, 5, 6, 7]
    assert first_U.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 5, 6]
    assert batch["tokens"][first_U].tolist() == [*P, 1, 5, 6, 6, 7, 7]
    inputs, found_N = packed_inputs(batch, SharedPrompts(shortest=3), one_follower=True)
    assert found_N is not None
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1]]
    assert inputs["input_ids"][0, found_N].tolist() == batch["tokens"].tolist()


def test_every_token_is_a_query_once_and_attends_to_its_full_sequence() -> None:
    batch = batch_of([*P, 1], list(range(30)), [*P, 6, 6])
    # The row: 2 3 4 | 5 1 | 5 6 6 | 0 ... 29
    row = PackedRow(batch, row_plan(batch, [Run([0, 2], 3), Run([1], 0)]))
    # From position 3 on, the last 3 of 6 tokens are queries, and the last 2 of 5, padded; then 30 complete ones; then
    # the shared ones.
    assert row.rectangles.shapes == [(2, 3, 6), (1, 30, 30), (1, 3, 3)]
    x_1HUD = torch.arange(38.0).view(1, 1, 38, 1).requires_grad_()
    rest, longest, shared = row.queries(x_1HUD)
    assert rest[0].flatten().tolist() == [5, 6, 7]
    assert rest[1].flatten().tolist()[:2] == [3, 4]
    assert longest.flatten().tolist() == list(range(8, 38))
    assert shared.flatten().tolist() == [0, 1, 2]
    assert row.from_rectangles([rest, longest, shared]).flatten().tolist() == list(range(38))
    seen, _, _ = row.keys(x_1HUD)
    assert seen[0].flatten().tolist() == [0, 1, 2, 5, 6, 7]
    assert seen[1].flatten().tolist()[:5] == [0, 1, 2, 3, 4]
    weight = torch.tensor([[1.0] * 6, [10.0] * 5 + [0.0]]).view(2, 1, 6, 1)
    (seen * weight).sum().backward()
    assert x_1HUD.grad is not None
    assert x_1HUD.grad.flatten().tolist() == [11, 11, 11, 10, 10, 1, 1, 1, *[0] * 30]


def test_all_tokens_of_a_sequence_too_long_for_a_mask_are_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([*P, 1], [*P, 6, 6])
    runs = [Run([0, 1], 3)]
    # Two tokens that attend to five are 10 entries of a mask, three that attend to six are 18.
    monkeypatch.setattr(shared_prompts, "MOST_SEEN", 17)
    row = PackedRow(batch, row_plan(batch, runs))
    assert row.rectangles.shapes == [(1, 2, 5), (2, 6, 6)]
    x_1HUD = torch.arange(8.0).view(1, 1, 8, 1)
    assert row.from_rectangles(row.queries(x_1HUD)).flatten().tolist() == list(range(8))


def test_sequences_of_equal_length_form_a_rectangle_without_a_copy() -> None:
    row = PackedRow(batch_of([1, 2, 3], [4, 5, 6]))
    assert row.rectangles.query_place_F is None
    x_1HUD = torch.arange(12.0).view(1, 2, 6, 1)
    (x_RHTD,) = row.queries(x_1HUD)
    assert x_RHTD.squeeze(-1).tolist() == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    assert torch.equal(row.keys(x_1HUD)[0], x_RHTD)
    assert torch.equal(row.from_rectangles([x_RHTD]).transpose(1, 2), x_1HUD)


def test_each_micro_batch_counts_a_prefix_once() -> None:
    # A run of four: 5 tokens, and 2, 3 and 4 more. Then a single sequence of 6.
    lengths_B = torch.tensor([5, 5, 6, 7, 6])
    runs = [Run([0, 1, 2, 3], 3), Run([4], 0)]
    cuts = {20: [[0, 1, 2, 3, 4]], 19: [[0, 1, 2, 3], [4]], 14: [[0, 1, 2, 3], [4]], 13: [[0, 1, 2], [3, 4]]}
    for budget, expected in cuts.items():
        assert [part.tolist() for part in shared_micro_batches(lengths_B, runs, budget)] == expected
    # In a separate micro-batch the prompt is computed again: 7 tokens, and 5 and 2 more for the others.
    assert [part.tolist() for part in shared_micro_batches(lengths_B, runs, 7)] == [[0, 1], [2], [3], [4]]
    assert [part.tolist() for part in shared_micro_batches(lengths_B, runs, 3)] == [[0], [1], [2], [3], [4]]
    assert [part.tolist() for part in shared_micro_batches(lengths_B, runs, 20, 3)] == [[0, 1, 2], [3, 4]]


def test_a_shared_prompt_counts_once_as_computed_in_each_micro_batch() -> None:
    # A prompt of 4 tokens with responses of 1, 2 and 3 tokens, and a single sequence of 5 tokens.
    minibatch = batch_of([*P, 20], [*P, 21, 22], [*P, 23, 24, 25], [*Q, 26])
    layout = SharedPrompts()
    (together,) = layout.micro_batches_by_rank(minibatch, 1, max_tokens=100)
    assert layout.computed_tokens(minibatch, [together]) == (5 + 6 + 7 + 5 - 2 * 4, 25 + 36 + 49 + 25 - 2 * 16)
    # Two of the three are in one micro-batch, so the prompt is computed twice.
    apart = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert layout.computed_tokens(minibatch, [apart]) == (23 - 4, 135 - 16)
    with pytest.raises(ValueError, match="planned last"):
        layout.computed_tokens(batch_of([1], [2]), [apart])


def test_computed_places_equal_the_sizes_of_the_rows() -> None:
    minibatch = batch_of([*P, 20], [*P, 21, 22], [*Q, 23, 24, 25], [*Q, 26], [*P, 5], [1, 2])
    layout = SharedPrompts()
    plans = layout.micro_batches_by_rank(minibatch, 2, max_tokens=12)
    rows = [PackedRow(part, layout.plan_row(part)) for plan in plans for part in map(minibatch.select, plan)]
    pairs = sum(part.end**2 - part.first**2 for row in rows for part in row.parts())
    assert layout.computed_tokens(minibatch, plans) == (sum(row.places for row in rows), pairs)


def test_ranks_get_whole_runs_if_there_are_many_and_parts_otherwise() -> None:
    lengths_B = torch.tensor([4, 4, 6, 6])
    few = shares_of_runs(lengths_B, [Run([0, 1, 2], 3), Run([3], 0)], 2)
    # Divided over two ranks: {0, 1} with 5 tokens, {2} with 6 and {3} with 6. One rank gets two of these.
    assert sorted(sorted(run.members) for share in few for run in share) == [[0, 1], [2], [3]]
    assert all(share for share in few)
    # Eight runs: four with 12 tokens and four with 8, which gives 40 tokens on each of two ranks.
    many = [Run([2 * i, 2 * i + 1], 2) for i in range(8)]
    lengths_B = torch.tensor([7, 7] * 4 + [5, 5] * 4)
    shares = shares_of_runs(lengths_B, many, 2)
    assert sorted(run.members[0] for share in shares for run in share) == list(range(0, 16, 2))
    costs = [sum(int(lengths_B[run.members].sum()) - run.saved for run in share) for share in shares]
    assert costs == [40, 40]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"shared-{name}"
        if not folder.exists():
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(folder)
        return folder

    return get


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def both(model: nn.Module, batch: Batch) -> Tensor:
    output = token_logprobs(model, batch, 0.8, with_entropy=True)
    assert output.entropy_N is not None
    return torch.stack([output.logprob_N, output.entropy_N])


# gpt_oss has experts.
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_log_probs_entropies_and_gradients_equal_those_of_separate_sequences(
    folder_of: Callable[[str], Path], name: str
) -> None:
    batch = shared_cases.groups(0, prompts=3, samples=3)
    model = load_policy(folder_of(name), packing=True).eval()
    reference = load_policy(folder_of(name), attn_implementation="eager").eval()
    assert isinstance(layout_of(model), SharedPrompts)
    sizes: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: sizes.append(call[1][0].numel()))
    shared_2N = both(model, batch)
    # The last token of each of 9 sequences is omitted, and 19 of 20 prompt tokens are computed once for three
    # sequences. In one group the 20th token is shared too. In the two others a response has one token, so the last
    # prompt token is needed per sequence. gemma2 caps its logits.
    assert sizes == [batch.num_tokens - 9 - 3 * 2 * 19 - (0 if name == "gemma2" else 2)]
    alone_2N = torch.cat([both(reference, batch.select([i])) for i in range(len(batch))], 1)
    torch.testing.assert_close(shared_2N, alone_2N, rtol=0, atol=1e-5)
    weight_2N = torch.randn(shared_2N.shape, generator=torch.Generator().manual_seed(0))
    actual, expected = (gradients(m, (x * weight_2N).sum()) for m, x in ((model, shared_2N), (reference, alone_2N)))
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-5 * float(expected[key].abs().max()))


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_log_probs_of_groups_are_those_of_whole_sequences(tied_model: Path, dtype: str, apart: float) -> None:
    # If a group is split, a response may be alone in one pass and with others in the next one.
    batch = shared_cases.groups(0, prompts=4, samples=4)
    model = load_policy(tied_model, dtype, packing=True).eval()
    shared_2N = both(model, batch)
    set_layout(model, END_TO_END)
    torch.testing.assert_close(shared_2N, both(model, batch), rtol=0, atol=apart)


def test_values_equal_those_of_separate_sequences(tied_model: Path) -> None:
    batch = shared_cases.groups(0, prompts=3, samples=3)
    shared = load_value_model(tied_model, packing=True).eval()
    plain = load_value_model(tied_model).eval()
    assert isinstance(layout_of(shared), SharedPrompts)
    for compute in (token_values, state_values):
        alone_N = torch.cat([compute(plain, batch.select([i])) for i in range(len(batch))])
        torch.testing.assert_close(compute(shared, batch), alone_N, rtol=0, atol=1e-5)


def test_logits_changed_by_the_model_are_read_once_at_every_place(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # gemma2 caps its logits, so they are read completely. A row that is used twice has no gradient here.
    rows: list[Tensor] = []
    real: Any = causal.label_logprobs

    def noted(logits_RV: Tensor, row_M: Tensor, *rest: Any, **named: Any) -> Any:
        rows.append(row_M)
        return real(logits_RV, row_M, *rest, **named)

    monkeypatch.setattr(causal, "label_logprobs", noted)
    model = load_policy(folder_of("gemma2"), packing=True)
    both(model, shared_cases.groups(0, prompts=2, samples=3)).sum().backward()
    assert len(rows[0].unique()) == len(rows[0])


def test_a_mixture_of_experts_computes_every_token(folder_of: Callable[[str], Path]) -> None:
    # Its balancing loss counts the routed tokens.
    assert layout_of(load_policy(folder_of("gpt_oss"), packing=True)) is END_TO_END


def test_micro_batches_follow_from_the_layout_of_the_model(tied_model: Path) -> None:
    batch = shared_cases.groups(0, prompts=2, samples=6)
    max_tokens = batch.num_tokens // 2 + 14
    shared = layout_of(load_policy(tied_model, packing=True))
    assert [len(layout.micro_batches(batch, max_tokens)) for layout in (shared, END_TO_END)] == [1, 2]
    planned = torch.cat(shared.micro_batches(batch, max_tokens))
    assert planned.sort().values.tolist() == list(range(12))


@pytest.fixture(scope="module")
def record(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the records of two ranks."""
    return run_ranks(shared_cases.shared_and_whole, 2, tmp_path_factory.mktemp("shared"), str(tied_model))


@pytest.mark.full
@pytest.mark.parametrize("case", shared_cases.CASES)
def test_every_engine_trains_equally_with_shared_prompts_on_two_ranks(record: list[dict[str, Any]], case: str) -> None:
    for rank in record:
        actual = rank[f"{case}-shared"]
        expected = rank[f"{case}-whole"]
        atol = 0.05 if case.startswith("bf16") else 1e-5
        torch.testing.assert_close(actual["before"], expected["before"], rtol=0, atol=atol)
        torch.testing.assert_close(actual["after"], expected["after"], rtol=0, atol=5 * atol)
        for step, other in zip(actual["metrics"], expected["metrics"], strict=True):
            assert step["loss"] == pytest.approx(other["loss"], abs=atol)
            assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=5 * atol)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(actual["weights"][name], tensor, rtol=0, atol=atol)
    for kind in ("forward_tokens", "train_tokens"):
        computed = {way: sum(rank[f"{case}-{way}"][kind] for rank in record) for way in ("shared", "whole")}
        assert computed["shared"] < 0.6 * computed["whole"]
