"""Transport of weights over TCP to engines on other machines. A run with placement.nodes > 1 loads it."""

PROVIDES = {"weight transport": {"tcp": "transport:TCPTransport"}, "nearby copy": {"tcp": "nearby:nearby"}}
