"""Training engine on torch's FSDP2 (`fully_shard`). `train.engine=fsdp` loads it: the default without DeepSpeed.

`placement.frozen_models=sharded` and `offloaded` load its sharding for models that are not trained.
"""

PROVIDES = {
    "train engine": {"fsdp": "engine:FSDPEngine"},
    "sharding": {"fsdp": "groups:partition"},
}
