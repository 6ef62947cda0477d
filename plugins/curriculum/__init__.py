"""Curriculum: prompts are selected by their difficulty, the mean score of their responses so far."""

PROVIDES = {
    "rollout strategy": {"curriculum": "strategy:Curriculum"},
    "rollout strategy check": {"curriculum": "options:faults"},
    "options": {
        "data.curriculum=variance": "options:CurriculumOptions",
        "data.curriculum=pools": "options:CurriculumOptions",
    },
}
