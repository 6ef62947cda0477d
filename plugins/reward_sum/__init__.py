"""Weighted sum of rewards."""

PROVIDES = {"reward sum": {"weighted": "weighted:RewardSum"}}
