"""The part of a run that executes in the process of the trainer."""
