"""Worker classes of the recipe, one per role."""
