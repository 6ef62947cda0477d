"""Engine arguments of vLLM that a run may set, and the reasons against the others. `rollout.vllm.<name>` loads it."""

PROVIDES = {"engine arguments": {"vllm": "check:ArgumentCheck"}}
