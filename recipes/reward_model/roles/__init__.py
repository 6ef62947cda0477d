"""One class per role."""
