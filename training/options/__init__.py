"""Options of recipes."""
