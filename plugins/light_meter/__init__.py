"""Light meter: beside the time of each phase of a step, the time that the machine would allow."""

PROVIDES = {
    "progress": {"bounds": "progress:BoundProgress"},
    "run observer": {"limits": "observer:LimitsObserver"},
    "speed prediction": {"plan": "predict:predicted"},
}
