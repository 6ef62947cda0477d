"""Alarms: warnings about the metrics of a run, with advice on what to try. Active in every run if the folder exists."""

PROVIDES = {"run observer": {"alarms": "observer:AlarmObserver"}}
