import numpy as np
import pytest

from sdo import InputError
from sdo.checks import as_array, integer_array, number, number_array, shown, whole_number

MASKED = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_whole_numbers_come_in_many_types(value):
    found = whole_number("n", value, 1, 7)
    assert found == 7
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.True_, np.array(True), 7.0, np.float32(7), np.array(7.0), "7", None, [7], np.array([7])),
        *(np.nan, np.inf, 7j, np.ma.masked, np.ma.masked_array(7, mask=True), 0, 8),
    ],
)
def test_what_is_no_whole_number_in_range_is_refused_in_one_line(value):
    with pytest.raises(InputError, match=r"^n is .*; expected a whole number from 1 to 7$") as caught:
        whole_number("n", value, 1, 7)
    assert "\n" not in str(caught.value)


def test_a_whole_number_may_have_no_bounds():
    assert whole_number("n", -3, None) == -3
    with pytest.raises(InputError, match=r"^n is 1\.5; expected a whole number$"):
        whole_number("n", 1.5, None)


@pytest.mark.parametrize(("value", "kind"), [(2, int), (np.int64(2), int), (2.0, float), (np.float32(2), float)])
def test_numbers_keep_their_kind(value, kind):
    found = number("x", value, 0, 2)
    assert (found, type(found)) == (2, kind)


@pytest.mark.parametrize("value", [True, "1", None, [1], np.nan, np.inf, 0, 2.1, 1j])
def test_what_is_no_number_in_range_is_refused(value):
    with pytest.raises(InputError, match=r"^x is .*; expected a number above 0 to 2$"):
        number("x", value, 0, 2, open_low=True)


def test_an_array_is_not_copied_and_a_mask_without_entries_is_none():
    plain = np.arange(3.0)
    assert as_array(plain, "rows") is plain
    assert as_array(np.ma.masked_array(plain, mask=False), "rows").tolist() == [0, 1, 2]


@pytest.mark.parametrize("values", [MASKED, [MASKED, MASKED]])
def test_masked_entries_are_refused(values):
    with pytest.raises(InputError, match="rows hold masked entries; expected a plain array"):
        as_array(values, "rows")


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(InputError, match=r"rows make no array .*; expected rows of one length"):
        as_array([[1, 2], [3]], "rows")


@pytest.mark.parametrize("values", [[2, 0], (2, 0), np.array([2, 0], "u1"), range(2, -1, -2)])
def test_integers_come_in_many_types(values):
    found = integer_array(values, "ids", low=0, high=2)
    assert (found.tolist(), found.dtype) == ([2, 0], np.int64)


def test_an_empty_list_holds_no_ids():
    assert integer_array([], "ids", low=0).dtype == np.int64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([True, False], "hold True and False; expected whole numbers; fix: numpy.flatnonzero"),
        ([0.0, 1.0], "hold float64, such as 0.0; expected whole numbers"),
        ([0.5, 1.7], "hold float64, such as 0.5; expected whole numbers"),
        (["1"], "hold <U1, such as '1'"),
        ([None, 1], "hold object, such as None"),
        ([2**70], "hold object"),
        (np.array([2**63], "u8"), "hold uint64, such as 9223372036854775808"),
        ([[0, 1]], r"have shape \(1, 2\); expected \(n,\)"),
        (3, r"have shape \(\)"),
        (np.ma.masked_array([1, 2], mask=[0, 1]), "hold masked entries"),
        ([0, -1, 9], r"hold -1 \(entry 1\); expected whole numbers 0 to 8"),
        ([0, 9], r"hold 9 \(entry 1\); expected whole numbers 0 to 8"),
    ],
)
def test_what_would_be_other_ids_is_refused(values, message):
    with pytest.raises(InputError, match=f"^ids {message}"):
        integer_array(values, "ids", low=0, high=8)


@pytest.mark.parametrize(
    ("values", "right"),
    [([1, 0.5], [1, 0.5]), ([True, False], [1, 0]), ([None, 1], [np.nan, 1]), ([], [])],
)
def test_numbers_are_float64(values, right):
    found = number_array(values, "scores")
    assert found.dtype == np.float64
    assert np.array_equal(found, right, equal_nan=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["0.5"], "hold <U3; expected numbers"),
        ([1j], "hold complex128"),
        ([None, "x"], "hold object"),
        ([[1.0]], r"have shape \(1, 1\); expected 1 dimension$"),
        (MASKED, "hold masked entries"),
    ],
)
def test_what_is_no_number_is_refused(values, message):
    with pytest.raises(InputError, match=f"^scores {message}"):
        number_array(values, "scores")


def test_tensors_are_read_as_arrays_are():
    torch = pytest.importorskip("torch")
    assert as_array(torch.ones(2, dtype=torch.bfloat16, requires_grad=True), "rows").dtype == np.float32
    assert integer_array(torch.tensor([2, 0]), "ids").tolist() == [2, 0]
    assert number_array(torch.ones(1).bfloat16(), "scores").tolist() == [1.0]
    assert whole_number("n", torch.tensor(7), 1) == 7
    for odd in (torch.tensor(True), torch.tensor(7.0)):
        with pytest.raises(InputError, match="n is tensor"):
            whole_number("n", odd, 1)


def test_values_are_shown_on_one_line_and_cut():
    assert shown(np.float64(0.5)) == "0.5"
    assert "\n" not in shown(np.eye(9))
    assert len(shown("x" * 100)) == 60
