"""Writing of the rollouts of a step while the next step runs. A run uses it if the folder is present."""

PROVIDES = {"tracker": {"background": "tracker:BackgroundTracker"}}
