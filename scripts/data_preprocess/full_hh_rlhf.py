"""Dialogues with a preferred and a rejected answer (HH-RLHF) as parquet files in verl's format.

python scripts/data_preprocess/full_hh_rlhf.py                 prompts to train on, ~/data/full_hh_rlhf/rl/*.parquet
python scripts/data_preprocess/full_hh_rlhf.py --split sft     prompts with the preferred answer
python scripts/data_preprocess/full_hh_rlhf.py --split rm      prompts with both answers
python scripts/data_preprocess/full_hh_rlhf.py --input D       from a folder, or from Anthropic/hh-rlhf

Prompts of rl are lists of messages, and are scored by a reward model.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Not the folder of this script, whose math.py would stand for Python's.
sys.path[0], __package__ = str(ROOT), "data_preprocess"
sys.path.append(str(ROOT / "scripts"))

from .verl_files import arguments_of, preprocess, verl_row  # noqa: E402 (the project may not be installed)

HUB_NAME = "Dahoas/full-hh-rlhf"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def rl_row(record: dict[str, Any], split: str, index: int, source: str) -> dict[str, Any]:
    """The ground truth, for whoever wants to compare, is the preferred answer."""
    prompt, chosen, _ = parted(record)
    extra = {"split": split, "index": index}
    return verl_row(source, messages(prompt), chosen, ability="alignment", style="model", **extra)


def sft_row(record: dict[str, Any], _split: str, _index: int, _source: str) -> dict[str, Any]:
    """The prompt as text, and the answer that is to be learnt."""
    prompt, chosen, _ = parted(record)
    return {"prompt": prompt, "response": chosen}


def rm_row(record: dict[str, Any], _split: str, _index: int, _source: str) -> dict[str, Any]:
    """The prompt as text, and both answers."""
    return dict(zip(("prompt", "chosen", "rejected"), parted(record)))


def parted(record: dict[str, Any]) -> tuple[str, str, str]:
    """Prompt, preferred and rejected answer; Anthropic's own files have them in one text."""
    if "prompt" in record:
        return record["prompt"], record["chosen"], record["rejected"]
    ends = [record[key].rpartition("\n\nAssistant:") for key in ("chosen", "rejected")]
    (prompt, mark, chosen), (_, _, rejected) = ends
    return prompt + mark, chosen, rejected


def messages(prompt: str) -> list[dict[str, str]]:
    """The turns of a dialogue that ends where the assistant is to speak."""
    before, *turns = _TURN.split(prompt)
    said = [{"role": _ROLES[who], "content": text.strip()} for who, text in zip(turns[::2], turns[1::2])]
    if before.strip() or len(said) < 2 or said[-1] != {"role": "assistant", "content": ""}:
        raise ValueError(f"the prompt {prompt[-80:]!r} is no dialogue of Human: and Assistant: that ends in Assistant:")
    return said[:-1]


if __name__ == "__main__":
    parser = arguments_of(__doc__, "full_hh_rlhf", HUB_NAME, HUB_NAME)
    kinds = {"rl": rl_row, "sft": sft_row, "rm": rm_row}
    parser.add_argument("--split", choices=list(kinds), default="rl", help="what the rows are for")
    options = parser.parse_args()
    options.local_dir = f"{options.local_dir}/{options.split}"
    sys.exit(preprocess(options, kinds[options.split]))
