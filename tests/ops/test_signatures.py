"""The reference and the compiled ops have the same names, arguments, order and defaults."""

from __future__ import annotations

import inspect

import pytest

from tinyserve_ops import ops, reference


def test_both_define_the_same_ops() -> None:
    assert sorted(ops.__all__) == sorted(reference.__all__)


@pytest.mark.parametrize("name", reference.__all__)
def test_arguments_order_and_defaults_agree(name: str) -> None:
    assert inspect.signature(getattr(ops, name)) == inspect.signature(getattr(reference, name))


@pytest.mark.parametrize("name", reference.__all__)
def test_every_op_has_a_docstring(name: str) -> None:
    for module in (ops, reference):
        assert inspect.getdoc(getattr(module, name))
