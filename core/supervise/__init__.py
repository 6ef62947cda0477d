"""Supervision of a job's processes by the driver."""
