"""Rollout engines that are added and removed while a run goes on. `placement.elastic=true` loads it."""

PROVIDES = {
    "job environment": {"elastic": "job:prepare"},
    "options": {"placement.elastic=true": "options:ElasticOptions"},
    "engine fleet": {"resize": "requests:resize"},
}
