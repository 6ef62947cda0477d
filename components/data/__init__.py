"""From rows of data to token batches."""
