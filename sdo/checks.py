"""Checks of arguments that Python and numpy would read as something else without a word.

``True`` is an index, a float is cut to an integer, a 2-D array is flattened, the mask of a masked array is dropped:
each of these is refused here, so that every public function refuses it in the same words.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.errors import InputError

_SHOWN = 60  # characters of a value that a message shows


def whole_number(name: str, value: Any, low: int | None, high: int | None = None) -> int:
    """Return a whole number as an int.

    Parameters
    ----------
    name
        What it is, named in the error.
    value
        An int, a numpy integer, or an array or tensor of one without dimensions. No bool, and no float such as 2.0.
    low, high
        Least and largest value; None for none.

    Raises
    ------
    InputError
        In one line.

    Examples
    --------
    >>> import numpy as np
    >>> whole_number("k", np.int32(4), 1)
    4
    """
    span = "a whole number" + (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
    try:
        flag = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or np.ma.is_masked(value)
        number = None if flag else operator.index(value)
    except TypeError:
        number = None
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise InputError(f"{name} is {shown(value)}; expected {span}")
    return number


def number(name: str, value: Any, low: float, high: float | None = None, *, open_low: bool = False) -> float:
    """Return a finite number as an int or a float.

    Parameters
    ----------
    name
        What it is, named in the error.
    value
        An int, a float or a numpy number; no bool.
    low, high
        Least and largest value; None for no largest.
    open_low
        Whether the least value itself is out of range.

    Raises
    ------
    InputError
        In one line.
    """
    span = f"a number {'above' if open_low else 'from'} {low}" + (f" to {high}" if high is not None else "")
    usable = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not usable or not np.isfinite(value):
        raise InputError(f"{name} is {shown(value)}; expected {span}")
    if value < low or (open_low and value == low) or (high is not None and value > high):
        raise InputError(f"{name} is {shown(value)}; expected {span}")
    return int(value) if isinstance(value, int | np.integer) else float(value)


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Return an array of what may be a list, an array or a torch tensor on any device, without copying an array.

    A tensor is known by its methods: the core does not import torch.

    Raises
    ------
    InputError
        If entries are masked, or rows differ in length.
    """
    parts = values if isinstance(values, list | tuple) else [values]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise InputError(
            f"{what} hold masked entries; expected a plain array, since a mask says that there is no value; fix: "
            "leave those rows out, or fill them with array.filled(...)"
        )
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu()
        # numpy has no bfloat16 of its own; float32 holds each of its numbers exactly.
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    try:
        return np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{what} make no array ({error!s:.80}); expected rows of one length") from error


def integer_array(values: Any, what: str, *, low: int | None = None, high: int | None = None) -> NDArray[np.int64]:
    """Return ids, labels or row numbers as int64.

    Parameters
    ----------
    values
        Shape ``(n,)``, integers; an empty list is one too. Booleans, fractions and more dimensions are refused: as
        integers they would be other rows.
    what
        In the plural, named in errors.
    low, high
        Least and largest value; None for none.

    Raises
    ------
    InputError
        In one line.
    """
    array = as_array(values, what)
    if array.shape == (0,):
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1:
        raise InputError(f"{what} have shape {array.shape}; expected (n,), one dimension of whole numbers")
    if array.dtype.kind == "b":
        raise InputError(
            f"{what} hold True and False; expected whole numbers; fix: numpy.flatnonzero(mask) gives a mask's rows"
        )
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max):
        raise InputError(
            f"{what} hold {array.dtype}, such as {shown(array[0])}; expected whole numbers of 64 bits; "
            "fix: array.astype('int64') if none is cut by it"
        )
    whole = array.astype(np.int64)
    least, most = np.iinfo(np.int64).min if low is None else low, np.iinfo(np.int64).max if high is None else high
    odd = np.flatnonzero((whole < least) | (whole > most))
    if len(odd):
        span = f"from {low}" if high is None else f"{low} to {high}"
        raise InputError(f"{what} hold {whole[odd[0]]} (entry {odd[0]}); expected whole numbers {span}")
    return whole


def real_array(values: Any, what: str) -> NDArray[Any]:
    """Return an array of real numbers of any type and shape, without copying one; None makes it one of objects.

    Raises
    ------
    InputError
        For masked entries, text and complex numbers.
    """
    array = as_array(values, what)
    if array.dtype.kind == "O":
        real = all(one is None or isinstance(one, bool | int | float | np.number | np.bool_) for one in array.flat)
    else:
        real = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    if not real:
        raise InputError(f"{what} hold {array.dtype}; expected numbers; fix: array.astype('float64')")
    return array


def number_array(values: Any, what: str, *, ndim: int = 1) -> NDArray[np.float64]:
    """Return scores or other real numbers as float64; None counts as NaN, True as 1.

    Parameters
    ----------
    values
        An array of `ndim` dimensions.
    what
        In the plural, named in errors.
    ndim
        Dimensions.

    Raises
    ------
    InputError
        For masked entries, text, complex numbers, and another number of dimensions.
    """
    array = real_array(values, what)
    if array.ndim != ndim:
        raise InputError(f"{what} have shape {array.shape}; expected {ndim} dimension{'s' if ndim > 1 else ''}")
    return array.astype(np.float64)


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, and cut."""
    text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
