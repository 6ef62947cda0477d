"""Rewards of complete responses while vLLM still generates others. `reward.while_generating=true` loads it."""

PROVIDES = {"streamed rewards": {"vllm": "opening:open_streamed_rewards"}}
