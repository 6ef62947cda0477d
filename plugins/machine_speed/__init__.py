"""Speed of this machine: products, memory, disk, network and small models. Measured once, or from a table."""

PROVIDES = {
    "machine speed": {
        "cached": "speed:cached_speed",
        "measure": "measure:measure_speed",
        "write": "speed:write_speed",
    }
}
