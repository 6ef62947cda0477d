"""Life of a job's processes, seen from the driver."""
