"""The best step of a run: export of its checkpoint, and a warning if the run ends with a lower score."""

PROVIDES = {
    "export": {"best": "export:export_best"},
    "export check": {"best": "export:faults"},
    "best step": {"heldout": "export:is_best"},
    "evaluation": {"verdict": "verdict:report"},
}
