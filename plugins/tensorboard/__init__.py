"""TensorBoard: writes the metrics and samples of a run to event files. `log.tensorboard=true` loads it."""

PROVIDES = {"metric sink": {"tensorboard": "sink:TensorBoard"}}
