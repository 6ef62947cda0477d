"""Optional capabilities, loaded by the values of options (components/registry.py)."""
