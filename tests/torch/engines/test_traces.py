"""A batch is recognised in what a model is given, whatever it is made of."""

from collections import UserDict

import torch

from evenstep.torch.engines.traces import Traces, tensors_of


def test_tensors_in_mappings_that_are_no_dicts_are_found():
    tokens, mask = torch.zeros(3, 2), torch.ones(3)
    batch = UserDict(tokens=tokens, more=[mask])
    assert [id(each) for each in tensors_of(({"batch": batch},))] == [id(tokens), id(mask)]
    traces = Traces(batch, 3)
    assert traces.length == 3
    assert traces.of(tokens)
    assert not traces.of(torch.zeros(3, 2))
