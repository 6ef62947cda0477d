"""Generation of batches ahead of training, with slightly older weights."""

PROVIDES = {
    "rollout queue": {
        "ahead": "queue:AheadQueue",
        "faults": "options:faults",
        "savable": "savable:check_savable",
    }
}
