"""Check that a rollout engine computes with the weights that it has received, by log-probabilities of a few sequences.

`rollout.check_engine_every` above 0 loads it, with an engine that provides scores (vllm). Hf runs the trainer's own
modules, so that digests of the weights suffice.
"""

PROVIDES = {
    "engine probe": {"vllm": "probe:EngineProbe"},
    "engine check": {"vllm": "check:EngineCheck"},
}
