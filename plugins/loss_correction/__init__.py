"""Importance-sampling correction of the mismatch between trainer and rollout engine."""

PROVIDES = {
    "loss correction": {
        "tis": "weights:TRUNCATED",
        "icepop": "weights:ZEROED",
        "seq-mask": "weights:sequence_masked",
        "seq-mask-tis": "weights:sequence_masked_truncated",
    }
}
