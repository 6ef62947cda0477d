"""A run in the trainer's process."""
