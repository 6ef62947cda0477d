"""Times of the parts of generation with the engine hf, as `timing_s/generate_*`. It is used if it is present."""

PROVIDES = {"timed engine": {"hf": "engine:TimedHFEngine"}}
