"""Transport of weights to engines on other machines, by TCP: a run with placement.nodes > 1 loads it."""

PROVIDES = {"weight transport": {"tcp": "transport:TCPTransport"}}
