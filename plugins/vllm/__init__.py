"""Rollout engine on vLLM, for GPUs and large models. `rollout.engine=vllm` loads it; `auto` does if it is faster."""

PROVIDES = {
    "rollout config": {"vllm": "config:VLLMRolloutConfig"},
    "rollout engine": {"vllm": "engine:VLLMRolloutEngine"},
    "async rollout engine": {"vllm": "async_engine:AsyncVLLMEngine"},
}
