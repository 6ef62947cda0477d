"""verl's keys of training engines, generation engines and devices, and of the axes of parallelism."""

PROVIDES = {"verl keys": {"engines": "engines:read_engines", "axes": "axes:read_axes"}}
