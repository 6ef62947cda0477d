"""The parts a recipe is made of: batches, RL maths, engines, data. Nothing here knows roles, jobs or recipes."""
