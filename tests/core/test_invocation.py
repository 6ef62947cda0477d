"""The decorators: option checks at class definition, and exported names."""

from typing import Any

import pytest
import workers

from core import Role, rpc, trainer_invocation
from core.exports import export_of, exports_of
from core.sharding import chunk_sizes, join, split
from tests.messages import says


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"target": "rank0"}, ["target='rank0'", "RANK0"]),
        ({"timeout": 0}, ["timeout=0"]),
        ({"timeout": True}, ["timeout=True"]),
        ({"is_async": True, "blocking": False}, ["is_async=True", "blocking=False"]),
        ({"pre_func": 3}, ["pre_func=3"]),
        ({"before": len}, ["before", "'pre_func'"]),
        ({"end_on_timeout": True}, ["end_on_timeout", "is_async"]),
    ],
)
def test_an_invalid_option_raises_an_error_when_the_class_is_defined(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        trainer_invocation(**options)


def test_pre_func_accepts_any_callable() -> None:
    class Callable:
        def __call__(self, x: int) -> int:
            return x

    trainer_invocation(pre_func=Callable())


class _Named:
    @rpc
    def bare(self) -> int:
        return 1

    @rpc()
    def empty(self) -> int:
        return 2

    @rpc("other")
    def named(self) -> int:
        return 3

    @rpc(workers.first_only)
    def bound(self) -> int:
        return 4

    @property
    def expensive(self) -> int:
        raise RuntimeError("exports must not evaluate properties")


def test_a_method_is_exported_under_the_name_of_its_stub_a_string_or_its_own_name() -> None:
    exports = exports_of(_Named())
    del exports["from_outside"]  # exported by workers.py in every workload
    assert {name: function() for name, (_, function) in exports.items()} == {
        "bare": 1,
        "empty": 2,
        "other": 3,
        "first_only": 4,
    }


def test_a_stub_with_other_parameters_than_its_method_raises_an_error_with_both_signatures() -> None:
    class Wrong:
        @rpc(workers.stub_with_two)
        def method(self, a: int) -> None: ...

    with pytest.raises(ValueError, match=says("workers.stub_with_two(a: int, b: int)", "Wrong.method(a: int)")):
        exports_of(Wrong())


def test_a_bare_rpc_function_of_the_entry_points_module_is_exported() -> None:
    assert "doubled_in_the_workloads_module" in exports_of(_Named(), "workers")
    assert "doubled_in_the_workloads_module" not in exports_of(_Named())


def test_an_undecorated_override_of_a_decorated_method_is_not_exported() -> None:
    class Louder(workers.Echo):
        def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
            return (*super().echo(*args, **kwargs), "!")

    assert "echo" not in exports_of(Louder.__new__(Louder))


def test_pre_function_and_post_function_are_aliases_of_pre_func_and_post_func() -> None:
    @trainer_invocation(pre_function=abs, post_function=sum)
    def method(self: Any, value: int) -> int:
        return value

    export = export_of(method)
    assert export is not None
    assert export.spec is not None
    assert (export.spec.pre_func, export.spec.post_func) == (abs, sum)


def test_two_methods_with_one_exported_name_raise_an_error() -> None:
    class Twice:
        @rpc("same")
        def one(self) -> None: ...

        @rpc("same")
        def two(self) -> None: ...

    with pytest.raises(ValueError, match=says("same", "one", "two")):
        exports_of(Twice())


def test_a_method_with_the_name_of_a_role_group_attribute_raises_an_error() -> None:
    class Shadowed:
        @trainer_invocation
        def call(self) -> None: ...

    with pytest.raises(ValueError, match=r"Shadowed\.call"):
        exports_of(Shadowed())


def test_chunks_are_contiguous_and_joining_them_restores_the_list() -> None:
    assert chunk_sizes(5, 3) == [2, 2, 1]
    assert split([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert join(split([1, 2, 3, 4, 5], 3), "x") == [1, 2, 3, 4, 5]


def test_role_names_are_identifiers_in_upper_case() -> None:
    assert Role("actor") == Role.ACTOR == "ACTOR"
    assert Role("tool_server").group_name == "RG_TOOL_SERVER"
    with pytest.raises(ValueError, match="tool server"):
        Role("tool server")
