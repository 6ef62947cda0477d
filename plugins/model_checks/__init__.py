"""Checks of the model of a run before any process starts: its files, its vocabulary, and its positions."""

PROVIDES = {
    "model check": {
        "files": "checks:check_files",
        "vocabulary": "checks:check_vocabulary",
        "positions": "checks:check_positions",
    }
}
