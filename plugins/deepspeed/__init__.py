"""Training engine on DeepSpeed, the default where it is installed. `train.engine=deepspeed` loads it."""

PROVIDES = {"train engine": {"deepspeed": "engine:DeepSpeedEngine"}}
