"""Worker groups: arguments and results of each dispatch mode, and deliberate differences from verl.

The differences come from measurements of verl's single controller: it scatters depending on the data, its padding
changes the caller's batch, and every worker fetches every chunk.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import workers
from groups import ON_RAY

from components.batch import Batch
from core import Dispatch, JobBuilder, RoleGroup, WorkerGroup, nd_compute, register
from core.backends import BackendName
from tests.messages import says


@pytest.fixture(scope="module")
def grids(backend: BackendName) -> Iterator[None]:
    """Start GRID and PAIR (3 and 2 workers), and MESH (4 workers: two data-parallel ranks with two peers each)."""
    builder = JobBuilder().device_type("CPU")
    for role, count in (("grid", 3), ("pair", 2), ("mesh", 4)):
        builder.role(role).run("workers.Grid").total(count).resource(cpu=0.5)
    with builder.build().running("grids", backend=backend):
        yield


@pytest.fixture
def grid(grids: None) -> WorkerGroup[Any]:
    """Group of three workers."""
    return WorkerGroup("grid", workers.Grid)


@pytest.fixture
def pair(grids: None) -> WorkerGroup[Any]:
    """Group of two workers."""
    return WorkerGroup("pair")


@pytest.fixture
def mesh(grids: None) -> WorkerGroup[Any]:
    """Group of four workers in a mesh."""
    return WorkerGroup("mesh")


def test_one_to_all_sends_all_arguments_whole_and_returns_a_list(grid: WorkerGroup[Any]) -> None:
    assert grid.everybody([1, 2, 3], x=(4, 5)) == [(rank, [1, 2, 3], (4, 5)) for rank in range(3)]


def test_rank_zero_calls_the_first_worker_and_returns_its_result(grid: WorkerGroup[Any]) -> None:
    assert grid.first([1, 2, 3]) == (0, [1, 2, 3])


def test_all_to_all_sends_each_worker_its_item_of_every_list_or_tuple(grid: WorkerGroup[Any]) -> None:
    assert grid.each([1, 2, 3], x=(4, 5, 6)) == [(0, 1, 4), (1, 2, 5), (2, 3, 6)]
    assert grid.each() == [(0,), (1,), (2,)]
    assert grid.each_too((7, 8, 9)) == [7, 8, 9]


@pytest.mark.parametrize("value", [[1, 2], [1, 2, 3, 4], 5, "abc", {"a": 1}, np.arange(3)])
def test_all_to_all_rejects_arguments_without_one_item_per_worker(grid: WorkerGroup[Any], value: object) -> None:
    for method in (grid.each, grid.each_too):
        with pytest.raises(ValueError, match=says("GRID", "argument 0", type(value).__name__, 3)):
            method(value)
    with pytest.raises(ValueError, match=says("GRID", "x", "int", 3)):
        grid.each([1, 2, 3], x=5)


def test_dp_compute_proto_splits_and_joins(grid: WorkerGroup[Any]) -> None:
    assert grid.add([1, 2, 3, 4], 10) == [11, 12, 13, 14]
    assert grid.add(np.arange(4.0), np.arange(4.0)).tolist() == [0, 2, 4, 6]
    assert grid.add(torch.arange(4), other=1).tolist() == [1, 2, 3, 4]
    assert grid.where(np.arange(4))[-1] == (2, [3])


def test_uneven_batches_are_split_without_padding_and_without_changing_the_batch(grid: WorkerGroup[Any]) -> None:
    values = [1, 2, 3, 4, 5]
    assert grid.add(values, 0) == [1, 2, 3, 4, 5]
    assert grid.later(values).result() == [2, 3, 4, 5, 6]
    assert values == [1, 2, 3, 4, 5]
    assert grid.add([7]) == [7]


def test_an_empty_batch_calls_no_worker(grid: WorkerGroup[Any], pair: WorkerGroup[Any]) -> None:
    assert grid.add([]) == []
    assert pair.where([]) == []


def test_a_batch_is_returned_as_a_batch(grid: WorkerGroup[Any]) -> None:
    batch = Batch.from_rows({"tokens": [torch.arange(n) for n in (1, 2, 3, 4)]})
    back = grid.same(batch)
    assert isinstance(back, Batch)
    assert [back.row(i, "tokens").tolist() for i in range(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert grid.whole_length(batch) == [4, 4, 4]


def test_dp_compute_proto_rejects_arguments_that_cannot_be_split(grid: WorkerGroup[Any]) -> None:
    with pytest.raises(ValueError, match=r"GRID\.add"):
        grid.add(5)
    with pytest.raises(ValueError, match=says("GRID.add", "argument 0 has 3", "other has 2")):
        grid.add([1, 2, 3], other=[1, 2])


def test_peers_of_a_mesh_get_the_same_chunk_and_one_of_their_results_is_joined(mesh: WorkerGroup[Any]) -> None:
    assert mesh.on_mesh([1, 2, 3, 4, 5]) == [(1, 1), (1, 2), (1, 3), (3, 4), (3, 5)]
    assert mesh.on_mesh_later([1, 2, 3]).result() == [10, 20, 30]
    with pytest.raises(ValueError, match=says("MESH.on_mesh", "1 item", "2 ranks")):
        mesh.on_mesh([1])


@ON_RAY
def test_a_chunk_of_a_mesh_is_stored_once_for_all_peers(
    mesh: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = mesh._context.transport
    stored: list[Any] = []
    put = transport.put
    monkeypatch.setattr(transport, "put", lambda value: stored.append(value) or put(value))
    results = mesh.on_mesh(np.zeros(100_000))
    assert [len(chunk) for chunk in stored] == [50_000, 50_000]
    assert [rank for rank, _ in results[:: len(results) // 2]] == [1, 3]


def test_registering_twice_in_a_mesh_raises_an_error(mesh: WorkerGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("MESH-0", "'dp'", (0, False))):
        mesh.register_again()


@pytest.mark.parametrize("length", range(4, 20))
def test_batches_of_any_length_are_joined_for_positional_and_keyword_arguments(
    mesh: WorkerGroup[Any], length: int
) -> None:
    values = list(range(length))
    assert mesh.add(values, values) == mesh.add(values=values, other=values) == [2 * value for value in values]


def test_an_async_method_can_be_registered(grid: WorkerGroup[Any]) -> None:
    assert grid.later_async([1, 2, 3, 4]).result() == [2, 3, 4, 5]


def test_an_unregistered_mesh_raises_an_error_that_names_it(mesh: WorkerGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("MESH-0", "'unknown'", "register_mesh")):
        mesh.on_no_mesh([1, 2])


def test_unknown_names_and_properties_are_not_methods_of_the_group(grid: WorkerGroup[Any]) -> None:
    for name in ("ad", "not_a_method"):
        with pytest.raises(AttributeError, match=says("GRID", "workers.Grid", f"'{name}'", "add, ")):
            getattr(grid, name)()
    assert grid.first_again(5) == [5, 5, 5]
    with pytest.raises(AttributeError, match="'echo'"):
        RoleGroup("grid").echo(1)
    assert grid.call("first", 5).result() == [(0, 5), (1, 5), (2, 5)]
    assert (len(grid), grid.world_size, [member.rank for member in grid]) == (3, 3, [0, 1, 2])


def test_a_class_with_methods_that_the_workers_lack_raises_an_error(grids: None) -> None:
    class Other:
        @register()
        def fly(self) -> None: ...

    with pytest.raises(ValueError, match=says("GRID", "workers.Grid", "fly")):
        WorkerGroup("grid", Other)
    assert len(WorkerGroup("nobody", Other, optional=True)) == 0


# --- futures


def test_a_future_as_an_argument_raises_an_error_with_the_correct_argument(grid: WorkerGroup[Any]) -> None:
    with pytest.raises(TypeError, match=r"result\(\)"):
        grid.everybody(grid.call("everybody", 1))


# --- declarations


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"dispatch_mode": "ONE_TO_ALL"}, ["'ONE_TO_ALL'", "Dispatch.ONE_TO_ALL"]),
        ({"replay": "first"}, ["replay='first'", "'last'"]),
    ],
)
def test_an_invalid_option_raises_an_error_when_the_class_is_defined(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        register(**options)


def test_every_dispatch_mode_has_a_description() -> None:
    assert all(mode.value for mode in Dispatch)
    assert nd_compute("a") == nd_compute("a") != nd_compute("b")
