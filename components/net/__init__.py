"""HTTP and the Hugging Face hub."""
