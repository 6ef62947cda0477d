"""Live view: draws the state of a run on a terminal. No option loads it. A run uses it if the folder exists."""

PROVIDES = {"terminal view": {"live": "live_view:LiveView"}}
