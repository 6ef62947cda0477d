"""Report: a run as one HTML file that needs no network. No option loads it; it is written wherever it is there."""

PROVIDES = {"report program": {"html": "program:PROGRAM"}}
