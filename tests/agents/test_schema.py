"""Return values of environments."""

import pytest

from agents.schema import read_reset, read_step
from tests.messages import says


def test_lone_surrogates_in_return_values_are_replaced() -> None:
    half = {"rewards": 1, "environment_feedback": "a\ud83d", "done": False}
    assert read_step(half, "step 0").feedback == "a?"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a\ud83d"}, {"type": "text", "text": "b"}]}]
    assert read_step({**half, "environment_feedback": parts}, "step 0").feedback == [{"role": "user", "content": "a?b"}]
    tools = [{"function": {"name": "f", "description": "\ud83d"}}]
    read = read_reset({"observation": "\ud83dx", "tools": tools})
    assert read == ("?x", [{"function": {"name": "f", "description": "?"}}])
    with pytest.raises(ValueError, match=says("reset", "'observation'", "message 0", "null")):
        read_reset({"observation": [{"role": "user", "content": None}]})
