"""Demonstrations without a download: tasks that generate their data, tiny models, and warm starts of these models.

These option values load it: `data.path=task:sort`, `model.path=warm_start:sort`, `model.path=new:sort`,
`reward.source=sort` and `agent.func_path=env:guess`.
"""

PROVIDES = {
    "data source": {"task": "sources:TaskSource"},
    "scorer": {"sort": "scorers:sort", "word": "scorers:word", "guess": "scorers:guess"},
    "model source": {"warm_start": "models:WarmStartModel", "expert": "models:ExpertModel"},
    "new model": {"new": "models:NewTinyModel"},
    "environment": {"guess": "guess:__file__"},
}
