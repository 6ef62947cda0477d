"""Readers of verl's data formats and configuration files, for the recipe verl_ppo."""

PROVIDES = {
    "row format": {"verl": "rows:load_verl_rows", "verl class": "dataset_class:load_class_rows"},
    "verl command line": {"arguments": "hydra:plain_arguments", "preset": "hydra:preset"},
    "verl keys": {"releases": "releases:read_releases"},
}
