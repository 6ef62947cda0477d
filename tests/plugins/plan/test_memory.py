"""Memory of models, compared with calculations by hand: sizes, training, frozen models, engines, and phases of a
device.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from components.generate.config import HFRolloutConfig
from components.models.size import ModelSize, model_size, size_of
from components.train.config import TrainConfig
from components.weights.bucket_sizes import BUCKET_BYTES
from plugins.plan.memory import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    NCCL_BYTES,
    PROCESS_BYTES,
    MemoryEstimate,
    frozen,
    micro_batch_tokens,
    phases,
    sampling,
    steps_in_parts,
    together,
    training,
)
from plugins.vllm.config import VLLMRolloutConfig
from tests.model_folders import LARGE, folder_of

GB = 1_000_000_000


# --- sizes


def test_parameters_of_published_models_follow_from_their_config(tmp_path: Path) -> None:
    size = model_size(folder_of(tmp_path / "large", LARGE))
    assert size is not None
    # According to its model card. The output layer is 128256 x 8192.
    assert (size.parameters, size.head) == (70_553_706_496, 1_050_673_152)
    small = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    small |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    size_of_config = model_size(folder_of(tmp_path / "small", small))
    assert size_of_config is not None
    assert (size_of_config.parameters, size_of_config.head, size_of_config.queries, size_of_config.keys) == (
        494_032_768,
        0,
        896,
        128,
    )


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 4,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 10,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "mlp_only_layers": [1],
}


def test_a_mixture_stores_all_experts_and_computes_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(MIXTURE)
    assert size is not None
    # Attention 2 x 8 x (8 + 4), norms 2 x 8 and 2 x 4; two layers of 6 experts 3 x 8 x 5 and a router 6 x 8, one layer
    # of 3 x 8 x 10; the embedding and a final norm.
    assert size.parameters == 3 * (192 + 16 + 8) + 2 * (720 + 48) + 240 + 800 + 8
    assert (size.intermediate, size.experts, size.experts_per_token) == (10, 6, 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    # Adapters at q, k, v and o: 2 x (8 + 8) + 2 x (8 + 4). Experts have none, because their weights are not linear
    # layers.
    assert training(size, TrainConfig(lora_rank=1), 1, tokens=1).gradients == 4 * 3 * 56
    assert size_of(MIXTURE | {"num_experts": None}) is None
    newer = {name: value for name, value in MIXTURE.items() if name != "num_experts"} | {"num_local_experts": 6}
    assert size_of(newer) == size


def test_parameters_of_unknown_architectures_are_counted_from_file_headers(tmp_path: Path) -> None:
    shapes = {"embed.weight": [10, 4], "norm.weight": [4], "lm_head.weight": [10, 4]}
    counted = model_size(folder_of(tmp_path / "own", {"model_type": "own"}, model=shapes))
    assert counted == ModelSize(parameters=84, head=40)
    # The index lists several files. If files are missing, only the config is left, which does not determine the size
    # here.
    path = folder_of(tmp_path / "parts", {"model_type": "own"}, a={"x": [3, 5]}, b={"y": [2]})
    index = Path(path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert model_size(path) == ModelSize(parameters=17)
    (Path(path) / "b.safetensors").unlink()
    assert model_size(path) is None


def test_a_new_model_has_the_shape_of_the_tiny_model() -> None:
    size = model_size("warm_start:sort")
    # Embedding 20 x 128; two layers of 2 x 128 x (128 + 64) + 3 x 128 x 384 + norms 256 + biases 256; a final norm.
    assert size is not None
    assert size.parameters == 2_560 + 2 * 197_120 + 128 == 396_928
    assert model_size("new:sort") == size
    assert (model_size("new:text"), model_size("warm_start:nothing"), model_size("/no/such/folder")) == (None,) * 3


# --- training


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 1000 parameters on 4 ranks: weights, gradients, Adam states with master weights.
        ({}, (4000, 4000, 8000)),
        ({"zero_stage": 1}, (4000, 4000, 3000)),
        ({"zero_stage": 2}, (4000, 1000, 3000)),
        ({"zero_stage": 3}, (1000, 1000, 3000)),
        # bfloat16 needs master weights, which ZeRO always has.
        ({"precision": "bf16"}, (2000, 4000, 3000)),
        ({"precision": "bf16", "zero_stage": 3}, (500, 1000, 3000)),
        ({"precision": "bf16_autocast"}, (4000, 4000, 8000)),
        ({"engine": "fsdp", "zero_stage": 3}, (1000, 1000, 2000)),
        ({"engine": "fsdp", "zero_stage": 2, "precision": "bf16"}, (1000, 1000, 2000)),
    ],
)
def test_sharded_parts_are_divided_by_the_ranks(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    need = training(ModelSize(parameters=1000), TrainConfig(**options), 4, tokens=10)
    assert (need.weights, need.gradients, need.optimizer) == expected
    assert (need.passes, need.is_known) == (None, False)  # of an unknown architecture


SMALL = ModelSize(
    parameters=100_000, layers=2, hidden=10, queries=10, keys=5, intermediate=30, vocabulary=100, positions=64
)


def test_only_adapters_have_gradients_and_optimizer_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    need = training(SMALL, TrainConfig(lora_rank=2), 1, tokens=10)
    # Inputs and outputs: q, o 10 + 10, k, v 10 + 5, gate, up, down 10 + 30: 190 numbers x rank 2 x 2 layers = 760.
    assert (need.weights, need.gradients, need.optimizer) == (4 * 100_760, 4 * 760, 8 * 760)
    some = training(SMALL, TrainConfig(lora_rank=2, lora_target_modules="q_proj,v_proj"), 1, tokens=10)
    assert some.gradients == 4 * 2 * 2 * (20 + 15)


def test_activations_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    # Per layer and token: 7 x 10 states, 2 x 10 + 2 x 5 queries and keys, and 4 x 30 = 220 numbers, plus a quarter; the
    # logits twice, and the head's gradient. At the end of a step the gradients are copied for the reduction, 4 x
    # 100000.
    head = 2 * 4 * 100 * 1024 + 4 * 100 * 10
    need = training(SMALL, TrainConfig(), 1, tokens=1024)
    assert need.passes == 1024 * (2 * 220 * 4) * 5 // 4 + head
    assert training(SMALL, TrainConfig(), 1, tokens=16).passes == 400_000
    less = training(SMALL, TrainConfig(gradient_checkpointing=True), 1, tokens=1024)
    assert less.passes == 1024 * (220 * 4 + 2 * 10 * 4) * 5 // 4 + head
    # Under autocast 14 states of 2 bytes. Matrix products keep the 99000 layer weights in rounded form.
    rounded = training(SMALL, TrainConfig(precision="bf16_autocast"), 1, tokens=1024)
    kept = 1024 * (2 * 290 * 2) + 2 * 99_000
    assert rounded.passes == kept * 5 // 4 + 2 * 2 * 100 * 1024 + 4_000
    # ZeRO collects gradients in a buffer: twice 4 x 100000, which exceeds the head's gradient.
    assert training(SMALL, TrainConfig(zero_stage=2), 1, tokens=512).passes == 512 * (2 * 220 * 4) * 5 // 4 + 800_000


@pytest.mark.parametrize(
    ("kernels", "tokens", "logits"),
    # Chunks of 2^27 logits and their copies; one chunk of fused kernels and its copy; several ones without copies.
    [("plain", 20_000, 2 * 883), ("fused", 5_000, 2 * 5_000), ("fused", 20_000, 7_067), ("auto", 20_000, 7_067)],
)
def test_fused_kernels_need_no_copies_of_the_logits(kernels: str, tokens: int, logits: int) -> None:
    size = ModelSize(
        parameters=400_000, layers=1, hidden=1, queries=1, keys=1, intermediate=1, vocabulary=151_936, positions=64
    )
    passes = []
    for choice in (kernels, "plain"):
        config = TrainConfig(engine="fsdp", zero_stage=3, precision="bf16", kernels=choice)
        passes.append(training(size, config, 1, tokens=tokens, gpu=True).passes)
    assert None not in passes
    assert passes[0] - passes[1] == 2 * 151_936 * (logits - 2 * 883)


def test_fsdp_gathers_by_layers_or_the_whole_and_adds_up_gradients_of_several_micro_batches() -> None:
    activations = 16 * (2 * 220 * 4) * 5 // 4
    # The embedding, 100 x 10, stays gathered; two layers of (100000 - 1000) / 2; of one layer the gradient and its
    # copy; and the embedding's gradient as output layer.
    whole = training(SMALL, TrainConfig(engine="fsdp", zero_stage=3), 2, tokens=16)
    assert whole.passes == activations + 4 * (1_000 + 99_000) + 8 * 49_500 + 4 * 1_000
    config = TrainConfig(engine="fsdp", zero_stage=2, precision="bf16")
    activations = 16 * (2 * 240 * 2) * 5 // 4  # norms compute in float32, which adds two states
    one = training(SMALL, config, 2, tokens=16)
    assert one.passes == activations + 2 * 100_000 + 6 * 49_500 + 2 * 1_000
    # From the second micro-batch on, complete gradients of 4 bytes are kept, of which half is already counted.
    several = training(SMALL, config, 2, tokens=16, several=True)
    assert (several.gradients, several.passes) == (200_000, (one.passes or 0) + 200_000)


def test_offloaded_and_sleeping_parts_are_in_host_memory() -> None:
    config = TrainConfig(zero_stage=2, precision="bf16", adam_offload=True, ema_beta=0.9)
    need = training(ModelSize(parameters=1000), config, 2, tokens=1, gpu=True, publishes=True)
    assert (need.weights, need.gradients, need.optimizer, need.host) == (2000, 0, 0, 2000 + 6000)
    assert (need.first, need.published) == (4000, 2 * 2000)
    # Gradients without partitioning are on the GPU until the step ends. Then half of them, this rank's part, is on the
    # host.
    config = TrainConfig(zero_stage=1, adam_offload=True)
    need = training(ModelSize(parameters=1000), config, 2, tokens=1, gpu=True)
    assert (need.weights, need.gradients, need.optimizer, need.host) == (4000, 4000, 0, 2000 + 6000)
    # Gradients are freed at the end of a step, except for the buffer of ZeRO 3.
    asleep = training(ModelSize(parameters=1000), TrainConfig(), 1, tokens=1, gpu=True, sleeps=True)
    assert (asleep.fixed_bytes, asleep.host) == (16_000, 12_000)
    config = TrainConfig(zero_stage=3, precision="bf16")
    asleep = training(ModelSize(parameters=1000), config, 2, tokens=1, gpu=True, sleeps=True)
    assert (asleep.fixed_bytes, asleep.host) == (9_000, 9_000)
    shared = VLLMRolloutConfig(enable_sleep=True, tensor_parallel_size=2)
    engine = sampling(ModelSize(parameters=1000), shared, 1, 1, GB, gpu=True)
    assert (engine.weights, engine.host) == (2000, 4000)  # memory of both devices


def test_a_critic_has_no_output_layer_over_the_vocabulary() -> None:
    size = ModelSize(parameters=1000, head=300)
    assert frozen(size, "bf16", tokens=1, has_head=False).weights == 1400
    assert training(size, TrainConfig(), 1, tokens=1, has_head=False).weights == 2800


def test_a_micro_batch_is_limited_by_the_token_budget_and_the_step() -> None:
    assert micro_batch_tokens(TrainConfig(max_tokens=1000), 100, 64) == 1000
    assert micro_batch_tokens(TrainConfig(max_tokens=1000), 100, 4) == 400
    assert micro_batch_tokens(TrainConfig(max_tokens=10**9, max_sequences=2), 100, 64) == 200
    # a longer sequence is alone in its micro-batch
    assert micro_batch_tokens(TrainConfig(max_tokens=50), 100, 64) == 100
    assert [steps_in_parts(TrainConfig(max_tokens=1000), 100, sequences) for sequences in (10, 11)] == [False, True]


# --- sampling


def test_an_hf_engines_cache_grows_with_rows_and_tokens() -> None:
    need = sampling(SMALL, HFRolloutConfig(max_num_seqs=8), 100, 64, None, gpu=False)
    # 8 rows x 64 tokens x keys and values x 2 layers x 5 numbers x 4 bytes. It is an upper bound.
    assert (need.weights, need.cache, need.fixed_bytes) == (400_000, 8 * 64 * 2 * 2 * 5 * 4, 400_000)
    assert sampling(SMALL, HFRolloutConfig(precision="bf16"), 4, 64, None, gpu=False).cache == 4 * 64 * 2 * 2 * 5 * 2


def test_vllm_uses_its_share_of_a_gpu_or_the_configured_memory_on_a_cpu() -> None:
    shared = VLLMRolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.5, tensor_parallel_size=2)
    size = ModelSize(parameters=10 * GB)
    need = sampling(size, shared, 1, 1, 80 * GB, gpu=True)
    # Half of 80 GB contains weights, the CUDA context, CUDA graphs and NCCL buffers. For this architecture nothing else
    # is known.
    assert (need.weights, need.cache) == (10 * GB, 40 * GB - 10 * GB - CONTEXT_BYTES - GRAPH_BYTES - NCCL_BYTES)
    assert sampling(size, shared, 1, 1, None, gpu=True).cache is None
    estimate = sampling(size, VLLMRolloutConfig(cpu_cache_gb=2.0), 1, 1, None, gpu=False)
    assert (estimate.weights, estimate.cache, estimate.base) == (40 * GB, 2 * 2**30, PROCESS_BYTES["vllm"])


def test_the_vllm_cache_is_what_a_pass_leaves_and_must_hold_one_sequence() -> None:
    config = VLLMRolloutConfig(dtype="bfloat16", gpu_memory_utilization=0.5, tensor_parallel_size=5, enforce_eager=True)
    wide = ModelSize(parameters=GB, layers=2, hidden=100, queries=100, keys=50, intermediate=300, vocabulary=1000)
    need = sampling(wide, config, 64, 64, 6 * GB, gpu=True)
    # 16384 tokens x (4 x 100, plus a fifth of 100 + 2 x 50 + 3 x 300) x 2 bytes, which exceeds three copies of 64 x
    # 1000 logits in float32.
    assert need.passes == 16384 * (400 + 220) * 2
    assert need.total == need.share == 3 * GB
    # Of 2.2 GB the context and NCCL take 1.6, the weights 0.4 and a pass 0.02. A sequence of 10 million tokens needs
    # 0.8 GB, which does not fit.
    need = sampling(wide, config, 64, 10_000_000, 4_400_000_000, gpu=True)
    left = 2_200_000_000 - 1_600_000_000 - 400_000_000 - 20_316_160
    assert (need.cache, need.short) == (left, 2 * 2 * 50 * 2 * 10_000_000 // 5 - left)


# --- frozen models


def test_a_sharded_frozen_model_is_divided_and_an_offloaded_one_is_in_host_memory() -> None:
    whole = frozen(SMALL, "bf16", tokens=16, gpu=True, ranks=4)
    # The states of a layer, 16 x (4 x 10 + 3 x 30) x 2, and the logits twice.
    assert (whole.weights, whole.passes) == (200_000, 16 * 130 * 2 + 2 * 2 * 100 * 16)
    sharded = frozen(SMALL, "bf16", tokens=16, gpu=True, layout="sharded", ranks=4)
    # The embedding, 100 x 10, and two layers of 99000 / 2 are also gathered, in a group with buffers.
    assert (sharded.weights, sharded.passes) == (50_000, (whole.passes or 0) + 2 * (1_000 + 99_000))
    assert (whole.base, sharded.base) == (CONTEXT_BYTES, CONTEXT_BYTES + NCCL_BYTES)
    waits = frozen(SMALL, "bf16", tokens=16, gpu=True, layout="offloaded", ranks=4)
    assert (waits.weights, waits.host, waits.passes) == (0, 50_000, sharded.passes)


# --- who shares a device, and when


def test_sleeping_roles_use_no_memory_while_others_work() -> None:
    actor = MemoryEstimate(weights=10, gradients=4, optimizer=20, passes=7, freed_gradients=4, sleeps=True, published=1)
    engine = MemoryEstimate(weights=5, cache=50, passes=3, sleeps=True, generates=True)
    reference = MemoryEstimate(weights=2, passes=9)
    phase_bytes = {
        phase.name: (phase.fixed_bytes, phase.transient_bytes) for phase in phases([actor, engine, reference])
    }
    # The reference stays in memory. Gradients are freed before the engine has its weights again, and a bucket is in
    # transfer.
    assert phase_bytes == {"generation": (57, 3), "training": (36, 9), "weight sync": (37, 2 * BUCKET_BYTES["cuda"])}
    awake = MemoryEstimate(weights=5, cache=50, passes=3, generates=True)
    phase_bytes = {phase.name: phase.fixed_bytes for phase in phases([actor, awake, reference])}
    assert phase_bytes == {"generation": 57, "training": 91, "weight sync": 87}
    assert [phase.name for phase in phases([actor])] == ["work"]


def test_a_process_with_several_uses_frees_the_memory_of_sleeping_ones() -> None:
    actor, engine = (
        MemoryEstimate(weights=10, passes=1, sleeps=True),
        MemoryEstimate(weights=5, cache=6, sleeps=True, generates=True),
    )
    both = together(MemoryEstimate(), together(actor, engine), MemoryEstimate(weights=1))
    assert [phase.fixed_bytes for phase in phases([both])] == [12, 11]


def test_a_process_with_two_uses_holds_the_memory_of_both() -> None:
    both = together(MemoryEstimate(weights=1, optimizer=2, passes=5), MemoryEstimate(weights=10, cache=20, passes=3))
    assert (both.weights, both.optimizer, both.cache, both.passes) == (11, 2, 20, 5)
    assert together(MemoryEstimate(weights=None), MemoryEstimate(weights=1)).weights is None


@pytest.mark.parametrize(
    ("axes", "ranks", "groups"),
    [({}, 1, 0), ({}, 4, 1), ({"tensor": 2}, 4, 3), ({"context": 2, "tensor": 2}, 8, 4), ({"expert": 2}, 4, 3)],
)
def test_each_process_group_of_nccl_has_buffers_of_its_own(axes: dict[str, Any], ranks: int, groups: int) -> None:
    config = TrainConfig(engine="fsdp", zero_stage=3, **axes)
    need = training(None, config, ranks, tokens=16, gpu=True)
    assert need.base == CONTEXT_BYTES + groups * NCCL_BYTES
