"""Options of sampling that make no sense."""

import pytest

from streamh2o.errors import UsageError
from streamh2o.runs.generate.sampling import Sampling


def test_sampling_that_makes_no_sense_is_refused():
    for wrong in ({"top_k": -1}, {"min_p": 2}, {"repetition_penalty": 0}, {"repeat_last": -1}, {"seed": 2**64}):
        with pytest.raises(UsageError):
            Sampling(**wrong)
