"""Low-rank adapters (peft), trained in front of weights that stay as they are.

`train.lora_rank` above 0 or `train.lora_path` loads them.
"""

PROVIDES = {
    "adapters": {"lora": "adapters:LoraAdapters"},
    "adapter settings": {"lora": "files:adapter_settings"},
}
