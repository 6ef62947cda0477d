"""Tables of published models in the docs: sizes, a row computed by hand, and the presence of the tables in the page."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from components.models.size import size_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/plan_table.py"))


def test_sizes_equal_those_of_the_published_models(script: dict[str, Any]) -> None:
    layout = {name: getattr(size_of(config), "parameters", None) for name, config in script["MODELS"].items()}
    assert layout == {
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-1.5B": 1_543_714_304,
        "Qwen2.5-7B": 7_615_616_512,
        "Qwen2.5-32B": 32_763_876_352,
        "Qwen2.5-72B": 72_706_203_648,
        "Qwen3-30B-A3B": 30_532_122_624,
    }


def test_every_term_of_a_7b_model_on_eight_gpus_equals_the_sum_by_hand(script: dict[str, Any]) -> None:
    size = size_of(script["MODELS"]["Qwen2.5-7B"])
    layout = script["layout"](size, 8, 80 * 10**9)
    parameters = 7_615_616_512
    rest = 2 * 152_064 * 3584
    layer = (parameters - rest) // 28
    actor = layout.actor
    assert (actor.weights, actor.gradients, actor.optimizer) == (parameters // 2, parameters // 2, parameters)
    # The input of each layer, all activations of one layer, gathered weights, a layer's gradient twice, and the head's
    # gradient.
    kept = 28 * 16_384 * 3584 * 2 + 16_384 * 2 * (9 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18_944)
    passes = kept * 5 // 4 + 2 * (rest + 2 * layer) + 6 * layer + 2 * 152_064 * 3584
    assert actor.passes == passes
    # CUDA contexts of three processes, NCCL of actor and reference, CUDA graphs.
    contexts = 3 * 600_000_000 + 2 * 10**9 + 10**9
    reference = parameters // 4
    assert layout.peaks()["training"] == contexts + 2 * parameters + reference + passes
    # Gradients are freed, and the engine has its weights again.
    sync = contexts + parameters // 2 + parameters + reference + 2 * parameters + 2 * 256 * 2**20
    assert layout.peaks()["weight sync"] == sync


def test_axes_of_a_large_mixture_equal_those_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = runpy.run_path(str(ROOT / "scripts/parallel_table.py"))
    size = size_of(script["MODELS"]["Qwen3-235B-A22B"])
    # According to its publication: 94 layers of 128 experts of 3 x 4096 x 1536, 8 per token.
    assert size is not None
    assert size.parameters == 235_093_634_560
    experts = 94 * 128 * 3 * 4096 * 1536
    rest = 2 * 151_936 * 4096
    config, need = script["choose"](size, 32, 4096)
    assert (config.context, config.expert, config.adam_offload) == (1, 8, True)
    # A rank's 4 sequences are one pass. A state, 2 bytes per number, is sent to 8 experts and back, 7 of 8 of them on
    # other ranks, in the forward pass, its recomputation, and the backward pass.
    assert need.sends["expert"] == 4 * 4096 * 2 * 3 * 94 * (2 * 8 * 4096 * 7 // 8)
    # 4 of 32 ranks have the same experts. Their weights are gathered twice in bfloat16, the others once, and gradients
    # are in float32.
    layers = (size.parameters - rest - experts) * 31 // 32
    own_experts = experts // 8 * 3 // 4
    assert need.sends["data"] == pytest.approx(
        2 * (2 * (layers + own_experts) + rest * 31 // 32) + 4 * (layers + own_experts + rest * 31 // 32), rel=1e-9
    )
    text = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_tables"](text) == text


def test_the_page_has_these_tables(script: dict[str, Any]) -> None:
    text = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_tables"](text) == text
