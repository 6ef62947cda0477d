"""OpenRLHF's flags as options of recipes. It is loaded when a command line has a name that the recipe does not have."""

PROVIDES = {
    "command adapter": {
        "openrlhf.train_ppo": "adapter:train_ppo",
        "openrlhf.train_sft": "adapter:train_sft",
        "openrlhf.train_dpo": "adapter:train_dpo",
        "openrlhf.train_rm": "adapter:train_rm",
        "openrlhf.serve_rm": "adapter:serve_rm",
    },
}
