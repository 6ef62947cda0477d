"""From the command line to a running job."""
