"""Sets of values in columns are those of NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from broker.model import distinct_values, is_among

COLUMNS = st.sampled_from([np.uint8, np.uint32, np.int64, np.uint64]).flatmap(
    lambda dtype: npst.arrays(
        dtype,
        st.integers(0, 20),
        elements=st.one_of(npst.from_dtype(np.dtype(dtype)), st.integers(0, 5)),
    )
)


@given(COLUMNS)
def test_each_value_once_and_rising(values: npt.NDArray[np.int64]):
    found = distinct_values(values)
    assert found.dtype == values.dtype
    assert found.tolist() == np.unique(values).tolist()


@given(COLUMNS, st.data())
def test_values_that_another_column_has(values: npt.NDArray[np.int64], data: st.DataObject):
    others = data.draw(npst.arrays(values.dtype, st.integers(0, 40), elements=npst.from_dtype(values.dtype)))
    if len(values) and len(others):
        others[0] = values[-1]
    assert is_among(values, others).tolist() == [value in set(others.tolist()) for value in values.tolist()]
