"""Spans of a text that are read together."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamh2o.ask.passages import merged


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=10))
def test_merged_spans_cover_the_same_bytes_apart_and_in_order(pairs):
    spans = [(start, start + length) for start, length in pairs]
    result = merged(spans)
    assert {byte for a, b in result for byte in range(a, b)} == {byte for a, b in spans for byte in range(a, b)}
    assert all(end < start for (_, end), (start, _) in pairwise(result))
