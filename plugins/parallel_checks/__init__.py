"""Checks of context, tensor and expert parallelism before a model is loaded."""

PROVIDES = {
    "parallelism check": {
        "options": "checks:check_options",
        "model": "checks:check_model",
        "ranks": "checks:data_ranks",
    }
}
