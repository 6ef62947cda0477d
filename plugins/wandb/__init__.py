"""W&B: sends the metrics and samples of a run to Weights & Biases. `log.wandb=true` or `log.wandb_key` loads it."""

PROVIDES = {"metric sink": {"wandb": "sink:Wandb"}}
