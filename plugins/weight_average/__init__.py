"""Exponential moving average of the trained weights. `train.ema_beta` loads it."""

PROVIDES = {"weight average": {"ema": "average:EngineAverage"}}
