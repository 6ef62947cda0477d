"""Where workloads live. One module per backend; the master knows them through the same few methods."""
