"""W&B: sends the metrics and samples of a run to Weights & Biases. Loaded by `log.wandb=true` or `log.wandb_key`."""

PROVIDES = {"metric sink": {"wandb": "sink:Wandb"}}
