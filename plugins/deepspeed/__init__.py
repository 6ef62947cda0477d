"""Training engine on DeepSpeed, the default: `train.engine=deepspeed` loads it."""

PROVIDES = {"train engine": {"deepspeed": "engine:DeepSpeedEngine"}}
