"""Rewards from HTTP servers. `reward.source=http://HOST:PORT/PATH` loads it. Several URLs are separated by commas."""

PROVIDES = {"reward source": {"http": "scorer:RemoteReward", "https": "scorer:RemoteReward"}}
