"""Write HH-RLHF, dialogues with a preferred and a rejected response, as parquet files in verl's format.

python scripts/data_preprocess/full_hh_rlhf.py                 prompts for RL, ~/data/full_hh_rlhf/rl/*.parquet
python scripts/data_preprocess/full_hh_rlhf.py --split sft     prompts with the preferred response
python scripts/data_preprocess/full_hh_rlhf.py --split rm      prompts with both responses
python scripts/data_preprocess/full_hh_rlhf.py --input D       read a folder, or the hub name Anthropic/hh-rlhf

The prompts of `rl` are lists of messages. Their responses are scored by a reward model.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Python puts the folder of the script first on the path, where math.py would hide the module of the standard library.
sys.path[0] = str(ROOT)
__package__ = "data_preprocess"
sys.path.append(str(ROOT / "scripts"))

from .verl_files import arguments_of, preprocess, verl_row  # noqa: E402 (the project may not be installed)

HUB_NAME = "Dahoas/full-hh-rlhf"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def rl_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """Return a row for RL. The ground truth is the preferred response; a reward model does not need it."""
    prompt, chosen, _ = parted(record)
    extra = {"split": split, "index": index}
    return verl_row(source, messages(prompt), chosen, ability="alignment", style="model", **extra)


def sft_row(record: dict[str, Any], _split: str, _index: int, _source: str) -> dict[str, Any]:
    """Return a row for supervised fine-tuning: the prompt as text, and the preferred response."""
    prompt, chosen, _ = parted(record)
    return {"prompt": prompt, "response": chosen}


def rm_row(record: dict[str, Any], _split: str, _index: int, _source: str) -> dict[str, Any]:
    """Return a row for reward models and DPO: the prompt as text, and both responses."""
    return dict(zip(("prompt", "chosen", "rejected"), parted(record)))


def parted(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return (prompt, preferred, rejected response). Anthropic's files have prompt and response in one text."""
    if "prompt" in record:
        return record["prompt"], record["chosen"], record["rejected"]
    ends = [record[key].rpartition("\n\nAssistant:") for key in ("chosen", "rejected")]
    (prompt, mark, chosen), (_, _, rejected) = ends
    return prompt + mark, chosen, rejected


def messages(prompt: str) -> list[dict[str, str]]:
    """Return the messages of a dialogue whose last turn, that of the assistant, is empty.

    Raises:
        ValueError: the prompt is not such a dialogue.
    """
    before, *turns = _TURN.split(prompt)
    dialogue = [{"role": _ROLES[who], "content": text.strip()} for who, text in zip(turns[::2], turns[1::2])]
    if before.strip() or len(dialogue) < 2 or dialogue[-1] != {"role": "assistant", "content": ""}:
        raise ValueError(
            f"the prompt {prompt[-80:]!r} is not a dialogue of Human: and Assistant: that ends in Assistant:"
        )
    return dialogue[:-1]


if __name__ == "__main__":
    parser = arguments_of(__doc__, "full_hh_rlhf", HUB_NAME, HUB_NAME)
    kinds = {"rl": rl_row, "sft": sft_row, "rm": rm_row}
    parser.add_argument("--split", choices=list(kinds), default="rl", help="training method of the rows (default: rl)")
    options = parser.parse_args()
    options.local_dir = f"{options.local_dir}/{options.split}"
    sys.exit(preprocess(options, kinds[options.split]))
