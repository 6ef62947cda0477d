"""Release of device memory while a model sleeps."""

PROVIDES = {"sleep": {"host copies": "host_memory:HostCopies"}}
