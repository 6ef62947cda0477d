"""Prompts and demonstrations from the rows of files, folders and data sets of the Hugging Face hub."""

PROVIDES = {
    "data reader": {
        "check": "prompts:check_reader",
        "prompts": "prompts:read_prompts",
        "columns": "prompts:describe_columns",
        "demonstrations": "demonstrations:read_demonstrations",
    },
}
