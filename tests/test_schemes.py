"""The recipes and the one parser of scheme strings."""

import pytest

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.core.load import PREDICTORS
from evenstep.schemes import RECIPES, parse_scheme
from evenstep.testing.conformance import check_load_policy

STRINGS = [
    "bsp",
    "bsp:micro_batch=4",
    "lb-bsp",
    *(f"lb-bsp:predictor={name}" for name in sorted(PREDICTORS) if name != "change"),
    "lb-bsp:times=proportional",
    "lb-bsp:tuner=pairwise",
    "lb-bsp:exchange=blocking",
    "lb-bsp:micro_batch=4",
    "lb-bsp:micro_batch=4,multiple=8",
    "dbs",
    "dbs:weighting=mean",
    "dbs:micro_batch=2,maximum=90",
    "local-sgd",
    "local-sgd:period=3,load=lb-bsp",
    "local-sgd:load=dbs",
]


@pytest.mark.parametrize("text", STRINGS)
def test_a_scheme_is_named_by_the_string_that_makes_it(text):
    scheme = parse_scheme(text)
    assert scheme.name == str(scheme) == text
    assert parse_scheme(scheme.name) == scheme


@pytest.mark.parametrize("text", STRINGS)
def test_every_scheme_shares_out_the_batch(text):
    load = parse_scheme(text).load
    check_load_policy(load.policy)


def test_every_recipe_is_public():
    for name, recipe in RECIPES.items():
        assert getattr(evenstep, name.replace("-", "_")) is recipe
        assert recipe().name == name


def test_parts_of_a_recipe_in_python():
    scheme = evenstep.local_sgd(period=2, load=evenstep.lb_bsp())
    assert scheme == parse_scheme("local-sgd:period=2,load=lb-bsp")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lb-bsp:tuner=pairwise,predictor=ema", "the pairwise tuner predicts nothing"),
        ("lb-bsp:tuner=pairs", "tuner cannot be 'pairs': use solver or pairwise"),
        ("lb-bsp:exchange=none", "exchange cannot be 'none': use overlapped or blocking"),
        ("dbs:weighting=median", "weighting cannot be 'median': use samples or mean"),
        ("dbs:predictor=ema", "has no parameter 'predictor'"),
        ("lb-bsp:micro_batch=4,multiple=6", "cannot be cut into micro-batches of 4"),
        ("bsp:micro_batch=0", "a micro-batch of 0 samples is not possible"),
        ("local-sgd:period=0", "a period of 0 iterations is not possible"),
        ("local-sgd:load=local-sgd", "takes only the sizes of 'local-sgd'"),
        ("local-sgd:load=ssp", "there is no scheme 'ssp'"),
    ],
)
def test_what_does_not_go_together_says_so(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_scheme(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: evenstep.local_sgd(load=evenstep.dbs(weighting="mean")),
            "takes only the sizes of 'dbs:weighting=mean'",
        ),
        (lambda: evenstep.local_sgd(load=evenstep.bsp(micro_batch=2)), "takes only the sizes of"),
        (
            lambda: evenstep.Scheme(name="x", load=evenstep.bsp(micro_batch=2).load, period=2, micro_batch=2),
            "leave out micro_batch",
        ),
        (
            lambda: evenstep.Scheme(name="x", load=evenstep.bsp().load, period=2, exchange="blocking"),
            "leave out exchange",
        ),
    ],
)
def test_nor_do_parts_in_python(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
