"""The decorators: what they refuse when a class is defined, and what they export."""

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
def test_a_wrong_option_is_refused_when_the_class_is_defined(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        trainer_invocation(**options)


def test_any_callable_will_do_as_pre_func() -> None:
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


def test_a_method_is_exported_under_its_stub_its_string_or_its_own_name() -> None:
    found = exports_of(_Named())
    del found["from_outside"]  # what workers.py exports for everybody
    assert {name: function() for name, (_, function) in found.items()} == {
        "bare": 1,
        "empty": 2,
        "other": 3,
        "first_only": 4,
    }


def test_a_stub_that_its_method_does_not_fit_is_refused_naming_both() -> None:
    class Wrong:
        @rpc(workers.stub_with_two)
        def method(self, a: int) -> None: ...

    with pytest.raises(ValueError, match=says("workers.stub_with_two(a: int, b: int)", "Wrong.method(a: int)")):
        exports_of(Wrong())


def test_a_bare_rpc_of_a_module_that_the_entry_point_imports_is_exported_too() -> None:
    assert "doubled_in_the_workloads_module" in exports_of(_Named(), "workers")
    assert "doubled_in_the_workloads_module" not in exports_of(_Named())


def test_a_method_that_overrides_a_decorated_one_without_a_decorator_is_not_exported() -> None:
    class Louder(workers.Echo):
        def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
            return (*super().echo(*args, **kwargs), "!")

    assert "echo" not in exports_of(Louder.__new__(Louder))


def test_options_of_the_guides_are_other_names_of_ours() -> None:
    @trainer_invocation(pre_function=abs, post_function=sum)
    def method(self: Any, value: int) -> int:
        return value

    export = export_of(method)
    assert export is not None
    assert export.spec is not None
    assert (export.spec.pre_func, export.spec.post_func) == (abs, sum)


def test_two_methods_of_one_name_are_refused() -> None:
    class Twice:
        @rpc("same")
        def one(self) -> None: ...

        @rpc("same")
        def two(self) -> None: ...

    with pytest.raises(ValueError, match=says("same", "one", "two")):
        exports_of(Twice())


def test_a_name_that_a_role_group_has_for_itself_is_refused() -> None:
    class Shadowed:
        @trainer_invocation
        def call(self) -> None: ...

    with pytest.raises(ValueError, match=r"Shadowed\.call"):
        exports_of(Shadowed())


def test_chunks_are_contiguous_and_join_to_what_was_split() -> None:
    assert chunk_sizes(5, 3) == [2, 2, 1]
    assert split([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert join(split([1, 2, 3, 4, 5], 3), "x") == [1, 2, 3, 4, 5]


def test_role_names_are_words_in_upper_case() -> None:
    assert Role("actor") == Role.ACTOR == "ACTOR"
    assert Role("tool_server").group_name == "RG_TOOL_SERVER"
    with pytest.raises(ValueError, match="tool server"):
        Role("tool server")
