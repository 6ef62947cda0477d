"""Work of a rank in the training tests: all cases that need an engine and other ranks. Tests read the records.

In the folder `states`, states/1 and states/2 are for the states saved by one and by two ranks.
"""

import contextlib
import gc
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from components.batch import Batch
from components.models.loading import load_policy
from components.models.value_model import load_value_model
from components.process.heartbeat import listen
from components.rl.aggregation import LossOutput, Totals
from components.train import partitioned_model
from components.train import state as engine_state
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.train.process_group import init_process_group
from components.train.state import save_state
from components.weights.publisher import WeightPublisher
from plugins.deepspeed import engine as deepspeed_engine
from plugins.resume.engine_state import load_state
from tests.components.helpers.train_cases import (
    FSDP,
    SAVED,
    config,
    counted_forwards,
    failure,
    infinite_gradient,
    logprobs,
    minibatches,
    nan_in_the_longest,
    nll,
    own_part,
    ragged,
    squared_error,
    train,
    weights,
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {letter: i for i, letter in enumerate("_$^abcdefghijklmnopq")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="_")), eos_token="$")


STATES: dict[str, dict[str, Any]] = {
    **{f"fp32-{stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    **{f"bf16-{stage}": {"zero_stage": stage, "precision": "bf16"} for stage in (1, 2, 3)},
    "offload-2": {"zero_stage": 2, "adam_offload": True},
    **{f"odd-{stage}": {"zero_stage": stage} for stage in (0, 2, 3)},
    "one_group-1": {"zero_stage": 1, "weight_decay": 0.0},
    "fsdp-2": {"engine": "fsdp", "zero_stage": 2},
    "bf16-fsdp-3": {"engine": "fsdp", "zero_stage": 3, "precision": "bf16"},
    "odd-fsdp-3": {"engine": "fsdp", "zero_stage": 3},
}
"""Cases saved by one process and loaded by another. The odd cases have dropout, buffers and frozen parameters."""
IN_ONE_GO = ("fp32-0", "bf16-2", "odd-3", "fsdp-2")
"""Cases that are also trained by an engine that never saves, for comparison."""
FRESH = ("fp32-0", "bf16-1", "fp32-3", "fsdp-2")
"""Cases whose state is also saved before the first step."""
CROSSED = [
    ("fp32-0", "fp32-0"),
    ("fp32-1", "fp32-3"),
    ("fp32-3", "fp32-0"),
    ("fp32-3", "fp32-3"),
    ("bf16-2", "bf16-2"),
    ("bf16-1", "fp32-3"),
    ("fp32-2", "bf16-3"),
    ("offload-2", "fp32-1"),
    ("odd-2", "odd-3"),
    ("fsdp-2", "fsdp-2"),
    ("fsdp-2", "fp32-3"),
    ("fp32-1", "fsdp-2"),
    ("odd-3", "odd-fsdp-3"),
]
"""Case saved by another number of ranks -> case in which it is loaded."""
HALF = 2
# Small limits give several buckets of gradients and several groups of parameters, as large models have.
deepspeed_engine.ZERO_NUMBERS = {"cpu": 1000}


def meet_nowhere() -> str:
    """Return the error message for two ranks without a rendezvous address."""
    os.environ.update(WORLD_SIZE="2", RANK="0")
    try:
        init_process_group()
    except ValueError as error:
        return str(error)
    return "they have met"


def all_minibatches() -> list[Batch]:
    return [*minibatches(), ragged(5, 6)]


def state_engine(case: str, model_folder: str) -> TrainEngine:
    model = load_policy(model_folder, empty=True)
    if case.startswith("odd"):
        attentions: list[Any] = [module for module in model.modules() if hasattr(module, "attention_dropout")]
        for attention in attentions:
            attention.attention_dropout = 0.4
        # A module that counts the tokens of its rank.
        model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        model.register_buffer("scale", torch.full((2, 3), 0.1))
        model.register_buffer("scratch", torch.zeros(1), persistent=False)
        for name, parameter in model.named_parameters():
            if "layers.0.mlp" in name or "layers.0.input_layernorm" in name:
                parameter.requires_grad_(False)
    # DeepSpeed runs the garbage collector several times per engine, which visits all imported modules.
    gc.freeze()
    return open_engine(model, config(max_tokens=40, **STATES[case]))


def seeing_nll(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "seen":
            buffer.add_(batch.num_tokens)
    return nll(model, batch, totals)


def go_on(engine: TrainEngine, batches: list[Batch]) -> dict[str, Any]:
    record: dict[str, Any] = {"metrics": [engine.train_step(batch, seeing_nll) for batch in batches]}
    return record | look(engine)


def look(engine: TrainEngine) -> dict[str, Any]:
    return {
        "weights": weights(engine),
        "output": engine.forward(own_part(engine), logprobs),
        "buffers": {name: buffer.clone() for name, buffer in engine.model.named_buffers()},
        "step_count": engine.step_count,
    }


def public_moments(engine: TrainEngine) -> dict[str, Tensor | None]:
    """Return the moments of one parameter from DeepSpeed's public functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    moments = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
    return {"weight": safe_get_full_fp32_param(parameter), **moments}


def save_states(model_folder: str, states: Path) -> dict[str, Any]:
    # A matrix of 64 times 64 is read in three parts. None of them ends at the end of a row.
    engine_state.PIECE = 1500
    record: dict[str, Any] = {}
    for case in STATES:
        engine = state_engine(case, model_folder)
        first = go_on(engine, all_minibatches()[:HALF])
        folder = states / str(engine.world_size) / case
        save_state(engine, folder)
        record[case] = {"saved": first, "public": public_moments(engine) if case == "one_group-1" else {}}
        record[case] |= go_on(engine, all_minibatches()[HALF:])
    for case in IN_ONE_GO:
        record[f"in_one_go-{case}"] = go_on(state_engine(case, model_folder), all_minibatches())
    for case in FRESH:
        fresh = state_engine(case, model_folder)
        record[f"fresh-{case}"] = {"saved": look(fresh)}
        save_state(fresh, states / str(fresh.world_size) / f"fresh-{case}")
    return record


def loaded(model_folder: str, case: str, folder: Path, again: Path, batches: list[Batch]) -> dict[str, Any]:
    """Load a state, save it again and continue training. Return the record."""
    engine = state_engine(case, model_folder)
    record = {"inexact": load_state(engine, folder), "loaded": look(engine)}
    save_state(engine, again)
    return record | go_on(engine, batches)


def load_crossed(model_folder: str, states: Path, output: Path) -> dict[str, Any]:
    """Load the states of the other world size and continue. Return the record of each case."""
    engine_state.PIECE = 700
    deepspeed_engine.ZERO_NUMBERS = {"cpu": 400}
    other = states / str(3 - int(os.environ.get("WORLD_SIZE", "1")))
    names = {f"{saved}-{case}": (saved, case) for saved, case in CROSSED}
    return {
        name: loaded(model_folder, case, other / saved, output / name, all_minibatches()[HALF:])
        for name, (saved, case) in names.items()
    }


def load_states(model_folder: str, states: Path, output: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}

    def load(case: str, folder: Path, name: str, batches: list[Batch]) -> None:
        record[name] = loaded(model_folder, case, folder, output / name, batches)

    rank_states = states / os.environ.get("WORLD_SIZE", "1")
    for case in STATES:
        load(case, rank_states / case, case, all_minibatches()[HALF:])
    for case in FRESH:
        load(case, rank_states / f"fresh-{case}", f"fresh-{case}", all_minibatches()[:HALF])
    record["errors"] = state_errors(model_folder, rank_states, output)
    return record


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Limit the size of files of this process, which fails like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state_errors(model_folder: str, states: Path, output: Path) -> dict[str, Any]:
    engine = state_engine("fp32-2", model_folder)
    before = weights(engine)
    last = f"rank_{engine.world_size - 1}.safetensors"

    def damaged(name: str, damage: Callable[[Path], object]) -> Path:
        """Each rank copies the state. The last rank damages its copy."""
        folder = output / f"{name}{engine.rank}"
        shutil.copytree(states / "fp32-2", folder)
        if engine.rank == engine.world_size - 1:
            damage(folder)
        return folder

    def message(work: Callable[[], object]) -> str:
        try:
            work()
        except (ValueError, OSError) as error:
            return f"{type(error).__name__} {getattr(error, 'errno', None)}: {error}"
        return "no error"

    def too_large(work: Callable[[], object]) -> str:
        with small_files(40_000 if engine.rank == engine.world_size - 1 else -1):
            return message(work)

    value = open_engine(load_value_model(model_folder), config(zero_stage=1))
    note = (states / "fp32-2" / "engine.json").read_text()
    folders = {
        "nothing": damaged("nothing", shutil.rmtree),
        "no_file": damaged("no_file", lambda folder: (folder / last).unlink()),
        "half_a_file": damaged("half_a_file", lambda folder: os.truncate(folder / last, 5000)),
        "no_note": damaged("no_note", lambda folder: (folder / "engine.json").unlink()),
        "half_a_note": damaged("half_a_note", lambda folder: (folder / "engine.json").write_text(note[:-9])),
        "newer": damaged("newer", lambda f: (f / "engine.json").write_text(note.replace('"format": 1', '"format": 2'))),
        "other_shape": damaged("other_shape", lambda f: (f / "engine.json").write_text(note.replace("128", "127"))),
    }
    record: dict[str, Any] = {name: message(lambda: load_state(engine, folders[name])) for name in folders}  # noqa: B023
    record["other_model"] = message(lambda: load_state(value, states / "fp32-2"))
    record["full_disk"] = too_large(lambda: save_state(engine, output / "full"))
    record["full_disk_note"] = (output / "full" / "engine.json").exists()
    record["full_disk_hf"] = too_large(lambda: engine.save_hf(output / "full_hf"))
    (output / f"file{engine.rank}").touch()
    record["folder_is_a_file"] = message(lambda: save_state(engine, output / f"file{engine.rank}"))
    after = weights(engine)
    record["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    record["good"] = load_state(engine, states / "fp32-2")
    record["goes_on"] = go_on(engine, all_minibatches()[HALF:])
    return record


AVERAGED: dict[str, dict[str, Any]] = {
    **{f"fp32-{stage}": {"zero_stage": stage} for stage in (0, 2, 3)},
    "bf16-2": {"zero_stage": 2, "precision": "bf16"},
    "bf16-fsdp-3": {"engine": "fsdp", "zero_stage": 3, "precision": "bf16"},
}
EMA_BETA = 0.75


def averaged_minibatches() -> list[Batch]:
    return [*all_minibatches(), ragged(6, 4)]


def averaging_engine(case: str, model_folder: str, **changes: Any) -> TrainEngine:
    gc.freeze()
    # Small steps. Most of them are below the resolution of bfloat16.
    settings = {"learning_rate": 1e-3, "lr_scheduler": "constant", "max_tokens": 40, "ema_beta": EMA_BETA}
    return open_engine(load_policy(model_folder), config(**(settings | AVERAGED[case] | changes)))


def average(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.average.tensors.items()} if engine.average else {}


def masters(engine: TrainEngine) -> dict[str, Tensor]:
    """In float32, as DeepSpeed's functions return the weights, or torch for its DTensors."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.config.precision == "fp32":
        return weights(engine)
    if engine.config.engine == "fsdp":
        parameters: dict[str, Any] = dict(engine.model.named_parameters())
        return {name: parameter.full_tensor().detach().clone() for name, parameter in parameters.items()}
    master_of = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.model.named_parameters()}
    return {name: tensor.clone() for name, tensor in master_of.items() if tensor is not None}


def averaged_steps(engine: TrainEngine, batches: list[Batch]) -> list[dict[str, Any]]:
    steps = []
    for batch in batches:
        metrics = engine.train_step(batch, nll)
        steps.append({"metrics": metrics, "masters": masters(engine), "average": average(engine)})
    return steps


def averaged_case(
    case: str, model_folder: str, states: Path, output: Path
) -> tuple[dict[str, dict[str, Any]], TrainEngine]:
    """Run 5 steps with an average, at once and resumed. Return the record and the resumed engine."""
    engine = averaging_engine(case, model_folder)
    batches = averaged_minibatches()
    record: dict[str, Any] = {"start": {"masters": masters(engine), "average": average(engine)}}
    record["steps"] = averaged_steps(engine, batches[:HALF])
    save_state(engine, states / case)
    record["steps"] += averaged_steps(engine, batches[HALF:])
    record["weights"] = weights(engine)
    engine.save_hf(output / f"hf-{case}")
    resumed = averaging_engine(case, model_folder)
    record |= {"inexact": load_state(resumed, states / case), "loaded": average(resumed)}
    record["resumed"] = averaged_steps(resumed, batches[HALF:])
    return {case: record}, resumed


def average_weights(model_folder: str, states: Path, output: Path) -> dict[str, Any]:
    folder = states / os.environ.get("WORLD_SIZE", "1")
    record: dict[str, Any] = {}
    for case in ("fp32-0", "fp32-2", "bf16-fsdp-3"):
        record |= averaged_case(case, model_folder, folder, output)[0]
    averaged, resumed = averaged_case("fp32-3", model_folder, folder, output)
    record |= averaged
    record["other_stage"] = {"inexact": load_state(resumed, folder / "fp32-2"), "average": average(resumed)}
    averaged, resumed = averaged_case("bf16-2", model_folder, folder, output)
    record |= averaged
    without = averaging_engine("bf16-2", model_folder, ema_beta=None)
    inexact = load_state(without, folder / "bf16-2")
    record["without"] = {"inexact": inexact, "steps": averaged_steps(without, averaged_minibatches()[HALF:])}
    without.save_hf(output / "hf-without")
    save_state(without, folder / "without")
    record["anew"] = {"inexact": load_state(resumed, folder / "without"), "average": average(resumed)}
    record["errors"] = average_errors(resumed, folder / "bf16-2", output)
    record["failed"] = failure(resumed, infinite_gradient) | {"masters": masters(resumed), "average": average(resumed)}
    return record


def average_errors(engine: TrainEngine, state: Path, output: Path) -> dict[str, str]:
    def refused(name: str, damage: Callable[[Path], object]) -> str:
        folder = output / f"{name}{engine.rank}"
        shutil.copytree(state, folder)
        damage(folder / "average.safetensors")
        try:
            return f"no error, but {load_state(engine, folder)}"
        except ValueError as error:
            return str(error)

    return {
        "missing": refused("missing", Path.unlink),
        "cut_short": refused("cut_short", lambda file: os.truncate(file, 5000)),
        "of_another": refused("of_another", lambda file: shutil.copy(state / "own_0.safetensors", file)),
    }


def fsdp(model_folder: str, output: Path) -> dict[str, Any]:
    def engine(checkpointing: bool = False, **changes: Any) -> TrainEngine:
        model = load_policy(model_folder, gradient_checkpointing=checkpointing)
        return open_engine(model, config(engine="fsdp", **changes))

    record: dict[str, Any] = {}
    for case, changes in FSDP.items():
        trained = engine(**changes)
        record[case] = {"start": weights(trained), **train(trained)}
        if case in SAVED:
            trained.save_hf(output / f"hf-{case}")
    record["fsdp-checkpointing"] = train(engine(checkpointing=True, zero_stage=3))
    record["nan-fsdp"] = failure(engine(zero_stage=2), nan_in_the_longest)
    for stage in (2, 3):
        record[f"infinite_gradient-fsdp-{stage}"] = failure(engine(zero_stage=stage), infinite_gradient)
    return record


def beats_of(engine: TrainEngine, output: Path) -> dict[str, int]:
    """Return the number of progress signals of each kind of work."""
    heard: list[str] = []
    doing = ""
    listen(lambda: heard.append(doing))
    doing = "training"
    engine.train_step(minibatches()[0], nll)
    doing = "forward"
    engine.forward(own_part(engine), logprobs)
    doing = "gathering"
    partitioned_model.BUCKET_BYTES = {"cpu": 1}
    assert len(list(engine.gathered_parameters())) in (0, len(list(engine.model.parameters())))
    doing = "state"
    save_state(engine, output / "beats")
    return dict(Counter(heard))


def trained_in_many_ways(model_folder: str, output: Path) -> dict[str, Any]:
    """Check every engine, stage and precision with faults that stop it."""

    def engine(**changes: Any) -> TrainEngine:
        gc.freeze()  # see state_engine
        return open_engine(load_policy(model_folder), config(**changes))

    record: dict[str, Any] = {}
    # bf16 trains with ZeRO 1 if 0 is configured, so one of the two suffices.
    for stage in (0, 2, 3):
        record[f"bf16-{stage}"] = train(engine(zero_stage=stage, precision="bf16"))
    for stage in (0, 1, 2, 3):
        trained = engine(zero_stage=stage)
        record[f"fp32-{stage}"] = train(trained)
    trained.save_hf(output / "hf", tokenizer())
    published = trained.gathered_parameters()
    if trained.rank == 0:
        record["handle"] = WeightPublisher(output / "weights").publish(1, published)
    assert not list(published)  # exhausts the generator on the other ranks, because gathering is collective
    record["large_micro_batches"] = train(engine(max_tokens=10**6))
    # Training has 7, 5 and 1 sequences in micro-batches of two, evaluation has micro-batches of one.
    record["few_sequences"] = train(engine(zero_stage=3, max_sequences=2, forward_max_sequences=1))
    record["beats"] = beats_of(engine(zero_stage=3, max_sequences=2, forward_max_sequences=1), output)
    record["forward_tokens"] = counted_forwards(engine(forward_max_tokens=1, max_sequences=2))
    for stage in (0, 3):
        still = engine(zero_stage=stage, learning_rate=0.0)
        record[f"learning_rate_0-{stage}"] = {"start": weights(still), **train(still)}
    record["offload"] = train(engine(zero_stage=2, adam_offload=True))
    record["nan"] = failure(engine(zero_stage=2), nan_in_the_longest)
    for stage in (0, 1, 2, 3):
        record[f"infinite_gradient-{stage}"] = failure(engine(zero_stage=stage), infinite_gradient)
    record["infinite_gradient-bf16"] = failure(engine(precision="bf16"), infinite_gradient)
    for name in ("deepspeed", "fsdp"):
        value = open_engine(load_value_model(model_folder), config(engine=name, zero_stage=3))
        record[f"{name}-value"] = train(value, squared_error)
        value.save_hf(output / f"{name}-value")
    record |= fsdp(model_folder, output)
    os.environ["WORLD_SIZE"] = "5"
    try:
        init_process_group()
    except ValueError as error:
        record["group"] = str(error)
    return record
