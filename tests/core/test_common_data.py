"""Checksums of samples: other samples have another one, and workers whose samples cannot be compared have none."""

import numpy as np
import pytest

from evenstep.core.common_data import bytes_of, checksum, unlike


def test_the_first_worker_that_differs_is_found_and_one_without_a_checksum_is_like_all():
    assert unlike([5, 5, 5]) is None
    assert unlike([5, 5, 6, 6]) == (2, 0)
    assert unlike([0, 5, 6]) == (2, 1)
    assert unlike([0, 5, 0]) is None


@pytest.mark.parametrize("kind", ["float32", "complex64", "uint8", "int64", "bool"])
def test_the_bytes_of_an_array_say_its_kind_its_shape_and_its_values(kind):
    values = (np.random.default_rng(0).normal(size=(30, 20)) * 50).clip(0).astype(kind)
    others = [values.T, values.T.copy(), values.reshape(20, 30), values.astype("complex128"), values[:, ::-1]]
    assert bytes_of(values) == bytes_of(np.asfortranarray(values)) != b""
    assert all(checksum([bytes_of(values)]) != checksum([bytes_of(other)]) for other in others)


def test_what_holds_no_numbers_has_no_checksum():
    assert checksum([]) == checksum([bytes_of(np.asarray("a text")), bytes_of(np.asarray(object()))]) == 0
