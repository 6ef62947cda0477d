"""Live view: draws the state of a run on a terminal. No option loads it; it is used wherever it is there."""

PROVIDES = {"terminal view": {"live": "live_view:LiveView"}}
