"""What is MXNet's own: what is refused, in a process that trains alone."""

import re

import numpy as np
import pytest
from support.frameworks.table import require

import evenstep

require("mxnet")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MXNet's, of NumPy.


def made(kvstore="dist_sync", dtype="float32", in_units=3, step=False, loader=None, **given):
    from mxnet import gluon

    import evenstep.mxnet

    net = gluon.nn.Dense(2, in_units=in_units, dtype=dtype)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **given)
    if step:
        trainer._init_kvstore()
    dataset = gluon.data.ArrayDataset(np.zeros((8, 3), "float32"))
    return evenstep.mxnet.prepare(trainer, gluon.data.DataLoader(dataset, **{"batch_size": 4} | (loader or {})), "bsp")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kvstore": "device"}, "the kvstore of the trainer is 'device', which does not sum the gradients of all"),
        ({"kvstore": "dist_async"}, "the kvstore of the trainer is 'dist_async', which does not sum"),
        ({"kvstore": None}, "the kvstore of the trainer is None, which does not sum"),
        ({}, "the kvstore 'dist_sync' needs a scheduler, a server and DMLC_ROLE=worker: start the script with evens"),
        ({"kvstore": None, "step": True}, "the trainer has stepped or was prepared already"),
        ({"update_on_kvstore": True}, "with update_on_kvstore=True the store divides every gradient by the first"),
        ({"compression_params": {"type": "2bit"}}, "compressed gradients cannot be weighted exactly"),
        ({"in_units": 0}, "the parameter dense"),
        ({"dtype": "float16"}, "the parameter dense"),
        ({"loader": {"last_batch": "rollover"}}, 'the loader has last_batch="rollover": leave it out'),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(given, sentence, monkeypatch):
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
        made(**given)
