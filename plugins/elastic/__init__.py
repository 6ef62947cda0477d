"""Rollout engines that are added and removed during a run. `placement.elastic=true` loads it."""

PROVIDES = {
    "job environment": {"elastic": "job:prepare"},
    "options": {"placement.elastic=true": "options:ElasticOptions"},
    "engine fleet": {"resize": "requests:resize"},
}
