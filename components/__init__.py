"""Building blocks of recipes: batches, RL maths, engines, data. They do not import roles, jobs or recipes."""
