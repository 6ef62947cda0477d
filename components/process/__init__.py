"""Child processes and heartbeats."""
