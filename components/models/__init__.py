"""Models of transformers over ragged batches."""
