"""Engines: the only modules that import training and generation libraries.

Importing this package, `config` or `sampling` imports neither torch nor DeepSpeed, so that a recipe's
`config.py` can embed the engines' configurations.
"""
