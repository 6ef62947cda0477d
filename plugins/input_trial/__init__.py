"""Trial of tokenizer, template, labels, reward and export of a run. The plug-in `rehearsal` loads it."""

PROVIDES = {
    "input trial": {
        "tokenizer": "checks:check_tokenizer",
        "template": "checks:check_template",
        "labels": "checks:check_labels",
        "reward": "checks:check_reward",
        "W&B key": "checks:check_trackers",
        "export": "checks:exported",
    }
}
