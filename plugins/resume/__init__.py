"""Resuming of a run from a checkpoint."""

PROVIDES = {
    "checkpoint reader": {
        "command": "continuation:continued_run",
        "prompts": "commands:check_prompts",
        "examples": "commands:check_examples",
        "run": "run_state:load_run",
        "engine": "engine_state:load_state",
        "find": "checkpoints:find_checkpoint",
        "changes": "checkpoints:changed_options",
    },
}
