"""Rewards from HTTP servers: `reward.source=http://HOST:PORT/PATH` loads it, several URLs with commas between them."""

PROVIDES = {"reward source": {"http": "scorer:RemoteReward", "https": "scorer:RemoteReward"}}
