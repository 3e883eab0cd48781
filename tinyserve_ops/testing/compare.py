"""Comparison of tensors: first where they are infinite or NaN, then their values; names the worst place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Rounding to the output type, plus room for fp32 arithmetic in another order.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1.2e-2,
}


def tolerance(dtype: torch.dtype) -> float:
    """Tolerance, absolute and relative, of results in `dtype` whose arithmetic is fp32; 0 for integers."""
    return _TOLERANCES.get(dtype, 0.0)


def assert_close(
    actual: Tensor, expected: Tensor, *, atol: float | None = None, rtol: float | None = None
) -> None:
    """Raises AssertionError unless shapes, NaN and infinity positions agree and values are close."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return
    atol = tolerance(actual.dtype) if atol is None else atol
    rtol = tolerance(actual.dtype) if rtol is None else rtol
    got, want = actual.double(), expected.double()
    for what, got_there, want_there in (
        ("nan", got.isnan(), want.isnan()),
        ("+inf", got == torch.inf, want == torch.inf),
        ("-inf", got == -torch.inf, want == -torch.inf),
    ):
        wrong = got_there != want_there
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{int(wrong.sum())} of {got.numel()} places differ in being {what}; first at {place}: "
                f"got {got[place].item()}, expected {want[place].item()}"
            )
    finite = want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    allowed = torch.where(finite, atol + rtol * want.abs(), 1.0)
    if (error > allowed).any():
        place = tuple(int(i) for i in torch.unravel_index((error / allowed).argmax(), error.shape))
        raise AssertionError(
            f"{int((error > allowed).sum())} of {got.numel()} values differ; worst at {place}: got "
            f"{got[place].item():.9g}, expected {want[place].item():.9g} (atol {atol:g}, rtol {rtol:g})"
        )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError unless dtype, shape and every bit agree (-0.0 is not 0.0)."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if torch.equal(_bits(actual), _bits(expected)):
        return
    wrong = (_bits(actual) != _bits(expected)).reshape(actual.numel(), -1).any(1)
    index = int(wrong.nonzero()[0])
    raise AssertionError(
        f"{int(wrong.sum())} of {actual.numel()} elements differ; first at flat index {index}: "
        f"got {actual.flatten()[index].item()}, expected {expected.flatten()[index].item()}"
    )


def assert_refused(op: Callable[..., Any], arguments: Mapping[str, Any], argument: str) -> None:
    """Raises AssertionError unless `op` raises ValueError or TypeError about `argument`, changing nothing."""
    before = {name: _bits(value).clone() for name, value in arguments.items() if _is_cpu(value)}
    try:
        op(**arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        raise AssertionError(f"accepted a bad {argument}")
    for word in (argument, "expected", "got"):
        assert word in message, f"the message lacks {word!r}: {message}"
    for name, bits in before.items():
        assert torch.equal(_bits(arguments[name]), bits), f"{name} was changed by a call that raised"


def _bits(tensor: Tensor) -> Tensor:
    # A clone, because a tensor of one element counts as contiguous whatever its strides.
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _is_cpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
