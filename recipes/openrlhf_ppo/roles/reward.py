"""What an answer is worth."""

from components.batch import Batch
from components.data.scorers import load_reward_function
from core import BaseWorkload, rpc

from .. import remote_call
from ..config import PPOConfig


class Reward(BaseWorkload):
    """One instance of the reward function. It is here that token ids become text."""

    config: PPOConfig

    @rpc(remote_call.reward_init)
    def init_model(self, tokenizer_path: str) -> None:
        """Load function and tokenizer."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.reward = load_reward_function(self.config.reward)

    @rpc(remote_call.reward_forward)
    def forward(self, samples: Batch) -> Batch:
        """`reward` and `score` per answer, and whatever else the function logs."""
        rows = [samples.row(i, "tokens").tolist() for i in range(len(samples))]
        starts = samples["prompt_length"].tolist()
        answers = [row[start:] for row, start in zip(rows, starts, strict=True)]
        output = self.reward(
            self.tokenizer.batch_decode(rows, skip_special_tokens=False),
            samples["prompt"],
            samples["label"],
            responses=self.tokenizer.batch_decode(answers, skip_special_tokens=True),
        )
        logs = {f"log_{name}": value_B for name, value_B in output.logs.items()}
        return Batch(samples.lengths, {}, {"reward": output.reward_B, "score": output.score_B, **logs})

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""
