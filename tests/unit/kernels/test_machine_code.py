"""Kernels as Python calls them: what they take, what they return, and that the list of them is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import headwater
from headwater.kernels import machine_code
from headwater.kernels.compiling import compiled_object
from headwater.kernels.machine_code import KERNEL_MODULES, KERNELS, Kernel, compile_kernels
from headwater.kernels.memory import AnyBytes, Bools, Column, Int64Rows, Int64s, UInt32, UInt64, kernel, read_only


def test_the_list_of_modules_has_every_one_with_a_kernel() -> None:
    source, mark = Path(headwater.__file__).parent, re.compile(r"^@(kernel|\w+_part)$", re.MULTILINE)
    marked = [path.relative_to(source.parent) for path in source.rglob("*.py") if mark.search(path.read_text())]
    names = [".".join(path.with_suffix("").parts) for path in sorted(marked)]
    assert list(KERNEL_MODULES) == names


def test_every_kernel_declares_exact_types() -> None:
    for name in KERNEL_MODULES:
        import_module(name)
    assert all(kernel.parameters() for kernel in KERNELS)


@pytest.fixture(autouse=True)
def _no_more_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these tests are no others' concern."""
    monkeypatch.setattr(machine_code, "KERNELS", [])


def test_a_parameter_without_an_exact_type_is_refused() -> None:
    def loose(column: Column) -> int:
        return len(column)

    with pytest.raises(TypeError, match="loose is a kernel, and 'column' has no exact type"):
        Kernel(loose).parameters()


def test_kernels_are_compiled_without_being_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(numbers: Int64s) -> None:
        raise AssertionError("it was called")

    filling = Kernel(fill)
    code = compiled_object(filling)
    monkeypatch.setattr(machine_code, "_kept_code", lambda kernel: code)
    monkeypatch.setattr(machine_code, "KERNEL_MODULES", (__name__,))
    compile_kernels("another.package")
    assert not filling.is_loaded
    compile_kernels(__name__)
    assert filling.is_loaded


@kernel
def _all_kinds(
    data: AnyBytes, marks: Bools, rows: Int64Rows, number: int, small: UInt32, large: UInt64, is_so: bool
) -> tuple[int, int, int, int, bool, int]:
    rows[0, 1] = len(data) + len(marks)
    marks[0] = is_so
    return number, small, large, rows[0, 1], not is_so, 7 // number


def arguments(**other: object) -> list[object]:
    given = {
        "data": np.frombuffer(b"abc", dtype=np.uint8), "marks": np.zeros(2, dtype=np.bool_),
        "rows": np.zeros((1, 2), dtype=np.int64), "number": -2, "small": np.uint32(2**32 - 1), "large": 2**64 - 1,
        "is_so": True,
    }  # fmt: skip
    return list((given | other).values())


def test_arguments_and_results_of_every_kind() -> None:
    assert _all_kinds(*arguments()) == (-2, 2**32 - 1, 2**64 - 1, 5, False, -4)
    assert _all_kinds(*arguments(data=np.zeros(1, dtype=np.uint8), number=np.int64(7)))[3] == 3


WRONG = {
    "another type": ({"data": np.zeros(3, dtype=np.int8)}, "takes a contiguous array of uint8 as data"),
    "no array": ({"data": b"abc"}, "takes a contiguous array of uint8 as data"),
    "every second": ({"data": np.zeros(6, dtype=np.uint8)[::2]}, "takes a contiguous array of uint8 as data"),
    "one dimension": ({"rows": np.zeros(2, dtype=np.int64)}, "as rows, with 2 dimensions"),
    "byte order": ({"rows": np.zeros((1, 2), dtype=">i8")}, "in the machine's byte order"),
    "read-only": (
        {"marks": read_only(np.zeros(2, dtype=np.bool_))},
        "of bool as marks, with 1 dimensions, to write to",
    ),
    "no number": ({"number": "2"}, "'str' object cannot be interpreted as an integer"),
}


@pytest.mark.parametrize(("other", "message"), WRONG.values(), ids=WRONG)
def test_other_arguments_are_refused(other: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _all_kinds(*arguments(**other))


def test_what_fails_in_a_kernel_is_an_error() -> None:
    with pytest.raises(TypeError, match="_all_kinds takes 7 arguments"):
        _all_kinds()
    with pytest.raises(OverflowError):
        _all_kinds(*arguments(number=2**63))
    with pytest.raises(RuntimeError, match="_all_kinds failed"):
        _all_kinds(*arguments(number=0))


def test_a_kernel_that_makes_an_array_is_refused() -> None:
    def part(data: AnyBytes) -> Column:
        return data

    with pytest.raises(TypeError, match="part is a kernel, and returns no number"):
        Kernel(part)(np.zeros(2, dtype=np.uint8))


# --- processes that share a folder ------------------------------------------------------------------------------------

COMPILES = """
import sys
from headwater.kernels import compiling, machine_code
compiled, real = [], compiling.compiled_object
def count(kernel):
    compiled.append(kernel.name)
    return real(kernel)
compiling.compiled_object = count
machine_code.compile_kernels("headwater.kernels.siphash")
print(len(compiled), machine_code.code_folder(), machine_code.are_compiled("headwater.kernels.siphash"))
"""


def compile_in_processes(count: int, **environment: str) -> list[list[str]]:
    """What each of them says: how many kernels it has compiled, where they are, and whether they are there."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", COMPILES],
                    env={"PYTHONPATH": str(Path(headwater.__file__).parents[1]), **environment},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]
        return [process.communicate()[0].split() for process in processes]


def test_processes_that_start_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    """As tasks do on a machine without kernels. This one has a home that can't be written to."""
    said = compile_in_processes(2, HOME="/proc", TMPDIR=str(tmp_path))
    kernels = len(list(tmp_path.glob("headwater-kernels-*/*/*.o")))
    assert kernels > 0
    assert sum(int(compiled) for compiled, _, _ in said) == kernels
    assert {(folder.startswith(str(tmp_path)), are_there) for _, folder, are_there in said} == {(True, "True")}


def test_a_process_that_hangs_with_the_folder_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "_WAIT_S_MAX", 0.1)
    with machine_code.only_writer(tmp_path), machine_code.only_writer(tmp_path):
        pass  # A descriptor of its own is like another process.


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert machine_code._candidates()[-1].name.startswith("headwater-kernels-")
