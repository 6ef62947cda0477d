"""Updates of the reference model towards the policy, every `algorithm.reference_sync_steps` steps."""

PROVIDES = {"reference update": {"sync": "updates:sync_reference", "follow": "weights:follow"}}
