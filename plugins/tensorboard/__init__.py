"""TensorBoard: writes the metrics and samples of a run to event files. Loaded by `log.tensorboard=true`."""

PROVIDES = {"metric sink": {"tensorboard": "sink:TensorBoard"}}
