"""Low-rank adapters (peft): train small matrices beside frozen weights.

`train.lora_rank` above 0 or `train.lora_path` loads them.
"""

PROVIDES = {
    "adapters": {"lora": "adapters:LoraAdapters"},
    "adapter settings": {"lora": "files:set_options"},
}
