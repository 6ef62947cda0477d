"""verl's formats. The recipe verl_ppo, which takes verl's commands, reads its data with it."""

PROVIDES = {"row format": {"verl": "rows:load_verl_rows", "verl class": "dataset_class:load_class_rows"}}
