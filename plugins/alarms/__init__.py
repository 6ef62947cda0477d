"""Alarms: warnings about the metrics of a run, with what to try. No option loads it; it is on wherever it is there."""

PROVIDES = {"run observer": {"alarms": "observer:AlarmObserver"}}
