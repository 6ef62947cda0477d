"""The workers, one class in each file."""
