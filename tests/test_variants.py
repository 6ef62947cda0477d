"""Each diff of docs/variants.md, applied to a copy of its recipe, equals its formula, evaluated per response.

Two prompts with two responses each, of one to three tokens. The policy is a tiny untrained model.
"""

import importlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import Totals
from plugins.demo.tiny_model import character_tokenizer, tiny_model
from tests.recipe_copies import copied
from tests.variants_page import DIFFS, PAGE, PAIR_LOSSES, SLIC
from training.options.data_options import DataOptions
from training.options.judged_options import JudgedDataOptions
from training.options.model_options import ModelOptions

Copy = Callable[..., ModuleType]


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    """Copies a recipe with a diff, and returns its algorithm.py."""
    folder = tmp_path / "recipes" / "my_algo"

    def changed(recipe: str, diff: str, old: str = "", new: str = "") -> ModuleType:
        copied(recipe, folder)
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        done = subprocess.run(["git", "apply"], cwd=tmp_path, env=env, input=diff, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{done.stderr}\ndocs/variants.md is behind recipes/{recipe}; show it anew:\n{diff}"
        )
        path = folder / "algorithm.py"
        assert not old or old in path.read_text()
        path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        importlib.invalidate_caches()
        return importlib.import_module("my_algo.algorithm")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        yield changed
        for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
            del sys.modules[name]


REWARDS = [1.0, 0.0, 0.25, 0.75]


def samples() -> Batch:
    """Return four responses of 1, 2, 3 and 2 tokens after a prompt of two tokens. The last one is truncated."""
    actions = [1, 2, 3, 2]
    drawn = [[-0.5], [-1.0, -2.0], [-0.1, -0.2, -0.3], [-1.5, -0.5]]
    now = [[-0.4], [-1.5, -1.0], [-0.1, -2.2, -0.3], [-1.0, -0.7]]
    rows = {
        "tokens": [[4, 5, *range(6, 6 + count)] for count in actions],
        "action_mask": [[False, False, *[True] * count] for count in actions],
        "rollout_logprob": [[0.0, 0.0, *row] for row in drawn],
        "logprob": [[0.0, 0.0, *row] for row in now],
        "reference_logprob": [[0.0, 0.0, *[x - 0.2 for x in row]] for row in now],
    }
    numbers = {
        "prompt_id": torch.tensor([7, 7, 9, 9]),
        "reward": torch.tensor(REWARDS),
        "truncated": torch.tensor([False, False, False, True]),
    }
    batch = Batch.from_rows({"tokens": rows.pop("tokens")}, numbers)
    columns = {name: torch.tensor([x for row in values for x in row]) for name, values in rows.items()}
    return batch.with_tokens(**columns)


def advantages(batch: Batch) -> list[list[float]]:
    """Return the advantages of the generated tokens of each response."""
    rows = range(len(batch))
    return [batch.row(i, "advantage")[batch.row(i, "action_mask")].tolist() for i in rows]


def grpo(**algorithm: Any) -> Any:
    from recipes.grpo.config import AlgorithmOptions, GRPOConfig

    return GRPOConfig(
        model=ModelOptions(path="policy"), data=DataOptions(path="task:sort"), algorithm=AlgorithmOptions(**algorithm)
    )


def test_the_page_shows_the_tested_code() -> None:
    assert len(DIFFS) == PAGE.count("```diff") == 12
    assert set(PAIR_LOSSES) == {*PAIR_VALUES, "aot_unpaired"}
    assert PAIR_LOSSES["hinge"] == SLIC


def test_the_variant_scales_rewards_by_the_batch(copy: Copy) -> None:
    computed = advantages(copy("grpo", DIFFS["scale_rewards: batch"]).add_advantages(samples(), grpo()))
    # The means of the groups are 0.5 and 0.5.
    deviation = statistics.stdev(REWARDS) + 1e-4
    expected = [(reward - 0.5) / deviation for reward in REWARDS]
    assert computed == [pytest.approx([x] * len(row), abs=1e-6) for x, row in zip(expected, computed, strict=True)]


def test_truncated_responses_have_advantage_0_and_stay_in_the_mean(copy: Copy) -> None:
    config = grpo(std_norm=False)
    computed = advantages(copy("grpo", DIFFS["mask_truncated_completions"]).add_advantages(samples(), config))
    assert computed == [[0.5], [-0.5] * 2, [-0.25] * 3, [0.0] * 2]


def test_the_variant_samples_importance_per_sequence(copy: Copy) -> None:
    config = grpo(correction="tis", correction_range=(0.0, 1.3))
    batch = copy("grpo", DIFFS["importance sampling by sequence"]).add_advantages(samples(), config)
    # Sums of the differences of current and sampled log-probs: 0.1; -0.5 + 1.0; 0 - 2 + 0; 0.5 - 0.2. Two ratios exceed
    # 1.3.
    weights = [exp(0.1), 0.0, exp(-2.0), 0.0]
    for row, weight in enumerate(weights):
        mask = batch.row(row, "action_mask")
        assert batch.row(row, "correction")[mask].tolist() == pytest.approx([weight] * int(mask.sum()), rel=1e-6)


def loss_of(algorithm: ModuleType, config: Any) -> tuple[float, Batch, Any]:
    """Return the policy loss of the batch under a tiny model, the batch, and the model's log-probs of its tokens."""
    torch.manual_seed(0)
    model = tiny_model(character_tokenizer("abcdefghij"), seed=3, hidden=32, layers=1, heads=2, key_value_heads=1)
    batch = samples()
    said = token_logprobs(model, batch, with_entropy=True)
    mask_N = batch["action_mask"]
    batch = batch.with_tokens(
        advantage=torch.tensor([1.0, -1.0, -0.5, 2.0])[batch.sequence_ids] * mask_N,
        logprob=torch.where(mask_N, said.logprob_N.detach() - 0.1, 0.0),
        reference_logprob=torch.where(mask_N, said.logprob_N.detach() - 0.2, 0.0),
        rollout_logprob=torch.where(
            mask_N, said.logprob_N.detach() + torch.tensor([0, 1.0, 0.4, 0])[batch.sequence_ids], 0
        ),
    )
    loss = algorithm.policy_loss(model, batch, Totals(tokens=8, sequences=4), config).loss
    return float(loss), batch, said


def test_only_tokens_with_high_entropy_are_trained_on(copy: Copy) -> None:
    loss, batch, said = loss_of(copy("grpo", DIFFS["top_entropy_quantile"]), grpo(clip_high=9.0))
    entropies = said.entropy_N[batch["action_mask"]].tolist()
    worth = batch["advantage"][batch["action_mask"]].tolist()
    # Eight tokens: the quantile .8 is between the second largest (at .857) and the third (at .714).
    kept = sorted(entropies)[-2:]
    assert loss == pytest.approx(
        -sum(exp(0.1) * a for a, e in zip(worth, entropies, strict=True) if e in kept) / 8, abs=1e-5
    )


def test_the_kl_is_multiplied_by_the_importance_ratio(copy: Copy) -> None:
    config = grpo(kl_coef=2.0, kl_estimator="k3", clip_low=0.99, clip_high=9.0)
    loss, batch, _ = loss_of(copy("grpo", DIFFS["unbiased KL with old responses"]), config)
    surrogate = -exp(0.1) * float(batch["advantage"].sum()) / 8
    assert loss == pytest.approx(surrogate + 2.0 * exp(0.1) * (exp(-0.2) - 1 + 0.2), abs=1e-5)


def test_off_policy_responses_with_negative_advantage_are_excluded(copy: Copy) -> None:
    loss, _, _ = loss_of(copy("grpo", DIFFS["off_policy_mask_threshold"]), grpo(clip_low=0.99, clip_high=9.0))
    # The second response has a distance of 1 nat and a negative advantage. The third has a negative advantage and is
    # close.
    assert loss == pytest.approx(-exp(0.1) * (1.0 - 0.5 * 3 + 2.0 * 2) / 8, abs=1e-5)


def test_cispo_weighs_log_probs_by_the_clipped_ratio(copy: Copy) -> None:
    loss, batch, said = loss_of(copy("grpo", DIFFS["CISPO"]), grpo(clip_low=1.0, clip_high=0.05))
    expected = -1.05 * float((batch["advantage"] * said.logprob_N).sum()) / 8  # exp(0.1) is above 1.05
    assert loss == pytest.approx(expected, abs=1e-5)


def test_sapo_gates_by_the_sign_of_the_advantage(copy: Copy) -> None:
    loss, _, _ = loss_of(copy("grpo", DIFFS["SAPO"]), grpo())
    gates = {tau: 4 / tau / (1 + exp(-tau * (exp(0.1) - 1))) for tau in (1.0, 1.05)}
    expected = -(gates[1.0] * (1.0 + 2 * 2.0) - gates[1.05] * (2 * 1.0 + 3 * 0.5)) / 8
    assert loss == pytest.approx(expected, abs=1e-5)


def test_vespo_weighs_a_response_by_its_whole_ratio(copy: Copy) -> None:
    loss, batch, said = loss_of(copy("grpo", DIFFS["VESPO"]), grpo())
    said_BT = (said.logprob_N * batch["action_mask"]).split(batch.lengths.tolist())
    sums = [float(row.sum()) for row in said_BT]
    # Each token's log-ratio is 0.1. The responses have 1, 2, 3 and 2 tokens.
    good = [exp(3 + 2 * x - 3 * exp(x)) for x in (0.1, 0.2)]
    bad = [exp(2 + 3 * x - 2 * exp(x)) for x in (0.2, 0.3)]
    expected = -(good[0] * sums[0] - bad[0] * sums[1] - 0.5 * bad[1] * sums[2] + 2.0 * good[1] * sums[3]) / 8
    assert loss == pytest.approx(expected, abs=1e-5)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


PAIRS = ((1.0, -0.5), (0.0, 1.0))
"""Log-ratios of the chosen and the rejected response."""
BETA = 0.5
E = 0.1
PAIR_VALUES: dict[str, Callable[[float, float], float]] = {
    "hinge": lambda c, r: max(0.0, 1 - BETA * (c - r)),
    "robust": lambda c, r: (-(1 - E) * log(sigmoid(BETA * (c - r))) + E * log(sigmoid(BETA * (r - c)))) / (1 - 2 * E),
    "exo_pair": lambda c, r: sum(
        p * log(p / q) for p, q in ((sigmoid(BETA * (c - r)), 1 - E), (sigmoid(BETA * (r - c)), E))
    ),
    "nca_pair": lambda c, r: log(1 + exp(-BETA * c)) + 0.5 * log(1 + exp(BETA * c)) + 0.5 * log(1 + exp(BETA * r)),
    "sppo_hard": lambda c, r: (c - 1.0) ** 2 + (r + 1.0) ** 2,  # 0.5 / beta is 1
    "apo_zero": lambda c, r: sigmoid(-BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r: sigmoid(BETA * c) + sigmoid(-BETA * (c - r)),
    "bco_pair": lambda c, r: -log(sigmoid(BETA * c)) - log(sigmoid(-BETA * r)),
    "aot": lambda c, r: -log(sigmoid(BETA * (c - r))),  # the reference has equal log-probabilities for all
    "forward_kl": lambda c, r: -log(sigmoid(BETA * (exp(-r) - exp(-c)))),
    "js_divergence": lambda c, r: -log(sigmoid(BETA * (log(sigmoid(c)) - log(sigmoid(r))))),
    "alpha_divergence": lambda c, r: -log(sigmoid(BETA * 2 * (exp(-r / 2) - exp(-c / 2)))),
    "discopop": lambda c, r: (
        log(1 + exp(-BETA * (c - r))) * (1 - sigmoid(BETA * (c - r) / 0.05))
        + exp(-BETA * (c - r)) * sigmoid(BETA * (c - r) / 0.05)
    ),
}


def test_optimal_transport_compares_sorted_log_ratios(copy: Copy) -> None:
    from recipes.dpo.config import DPOConfig, DPOOptions

    dpo_options = DPOOptions(beta=BETA)
    config = DPOConfig(
        model=ModelOptions(path="policy"), data=JudgedDataOptions(path="pairs.jsonl"), algorithm=dpo_options
    )
    logprob_B = torch.tensor([x for pair in PAIRS for x in pair])
    batch = Batch.from_rows({"tokens": [[4]] * 4}, {"reference_logprob": torch.tensor([0.0, 0.0, 2.0, 0.0])})
    diff = DIFFS["Losses of the log-ratios"]
    # Margins 1.5 and -1, and 0 and 2 under the reference. Sorted, -1 is paired with 0 and 1.5 with 2.
    loss = copy("dpo", diff, SLIC, PAIR_LOSSES["aot"]).preference_loss(logprob_B, batch, 2, config).loss
    assert float(loss) == pytest.approx(-(log(sigmoid(-0.5)) + log(sigmoid(-0.25))) / 2, abs=1e-6)


def test_optimal_transport_without_pairs_sorts_both(copy: Copy) -> None:
    from recipes.dpo.config import DPOConfig, DPOOptions

    dpo_options = DPOOptions(beta=BETA)
    config = DPOConfig(
        model=ModelOptions(path="policy"), data=JudgedDataOptions(path="pairs.jsonl"), algorithm=dpo_options
    )
    logprob_B = torch.tensor([x for pair in PAIRS for x in pair])
    batch = Batch.from_rows({"tokens": [[4]] * 4}, {"reference_logprob": torch.zeros(4)})
    algorithm = copy("dpo", DIFFS["Losses of the log-ratios"], SLIC, PAIR_LOSSES["aot_unpaired"])
    # Chosen 0 and 1, rejected -0.5 and 1.
    loss = algorithm.preference_loss(logprob_B, batch, 2, config).loss
    assert float(loss) == pytest.approx(-(log(sigmoid(0.25)) + log(sigmoid(0.0))) / 2, abs=1e-6)


@pytest.mark.parametrize("name", PAIR_VALUES)
def test_each_variant_of_the_pair_loss_equals_a_calculation_by_hand(copy: Copy, name: str) -> None:
    from recipes.dpo.config import DPOConfig, DPOOptions

    algorithm = copy("dpo", DIFFS["Losses of the log-ratios"], SLIC, PAIR_LOSSES[name])
    dpo_options = DPOOptions(beta=BETA, label_smoothing=E)
    config = DPOConfig(
        model=ModelOptions(path="policy"), data=JudgedDataOptions(path="pairs.jsonl"), algorithm=dpo_options
    )
    logprob_B = torch.tensor([x for pair in PAIRS for x in pair], requires_grad=True)
    batch = Batch.from_rows({"tokens": [[4]] * 4}, {"reference_logprob": torch.zeros(4)})
    output = algorithm.preference_loss(logprob_B, batch, 2, config)
    value = PAIR_VALUES[name]
    assert float(output.loss) == pytest.approx(statistics.fmean(value(*pair) for pair in PAIRS), abs=1e-6)
    output.loss.backward()
    assert logprob_B.grad is not None
    step = 1e-4
    (c, r), _ = PAIRS
    slope = (value(c + step, r) - value(c - step, r)) / (2 * step) / 2
    assert float(logprob_B.grad[0]) == pytest.approx(slope, abs=1e-4)


def test_ipo_of_means_takes_means(copy: Copy) -> None:
    algorithm = copy("dpo", DIFFS["IPO of means"])
    batch = Batch.from_rows({"tokens": [[4, 5, 6], [4, 5]]}, {})
    batch = batch.with_tokens(loss_mask=torch.tensor([False, True, True, False, True]))
    logprob_N = torch.tensor([-9.0, -1.0, -2.0, -9.0, -0.5])
    assert algorithm.response_logprobs(logprob_N, batch).tolist() == [-1.5, -0.5]


def test_the_centring_penalty_is_the_squared_sum_of_rewards(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = copy("reward_model", DIFFS["center_rewards_coefficient"])
    scores = [0.5, 1.5, 2.0, -1.0]
    monkeypatch.setattr(algorithm, "state_values", lambda model, micro: torch.tensor(scores))
    micro = Batch.from_rows({"tokens": [[4]] * 4}, {})
    output = algorithm.loss(torch.nn.Linear(1, 1), micro, Totals(tokens=4, sequences=4))
    pairs = -(log(sigmoid(-1.0)) + log(sigmoid(3.0))) / 2
    assert float(output.loss) == pytest.approx(pairs + 0.01 * (2.0**2 + 1.0**2) / 2, abs=1e-6)
    assert math.isfinite(float(output.metrics["accuracy"]))
