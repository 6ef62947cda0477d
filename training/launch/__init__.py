"""Reading the command line, checking and planning a run, and starting the job."""
