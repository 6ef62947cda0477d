"""verl's PPO: its roles, configuration keys, data format and order of steps."""
