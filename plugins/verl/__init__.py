"""Readers of verl's data formats, for the recipe verl_ppo."""

PROVIDES = {"row format": {"verl": "rows:load_verl_rows", "verl class": "dataset_class:load_class_rows"}}
