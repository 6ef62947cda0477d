"""Report: a run as one HTML file that needs no network. No option loads it. A run uses it if the folder exists."""

PROVIDES = {"report program": {"html": "program:PROGRAM"}}
