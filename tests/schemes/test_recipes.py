"""Every recipe with every parameter: its name makes the same scheme again, and its parts work."""

import inspect
from itertools import product

import pytest

import evenstep
from evenstep.core.load import PREDICTORS, Experts
from evenstep.core.load.equal import Equal
from evenstep.core.sync import Barrier, Bounded, Dynamic, Unbounded
from evenstep.schemes import RECIPES as ALL_RECIPES
from evenstep.schemes import Scheme, parse_scheme
from evenstep.testing.conformance import check_load_policy

# Without those that other tests have registered, under the names of their modules.
RECIPES = {name: recipe for name, recipe in ALL_RECIPES.items() if ":" not in name}
SIZES = [
    *({}, {"minimum": 2}, {"maximum": 90}, {"multiple": 8}, {"micro_batch": 4}, {"micro_batch": 4, "multiple": 8}),
    {"minimum": 2, "maximum": 64, "multiple": 2},
]
LOADS = [
    "bsp",
    "lb-bsp",
    "dbs",
    "dbs:minimum=2;maximum=90",
    "lb-bsp:change_cost=2.5",
    "lb-bsp:predictor=ema;minimum=4",
    "lb-bsp:tuner=pairwise;minimum=4;multiple=2",
    "static:100/12/8/8",
]
SERVED = [
    {"rate": "raw"},
    *({"clip": 1.5}, {"clip": 1e-5}, {"clip": 2}, {"nonfinite": "refuse"}, {"exchange": "overlapped"}),
    *({"servers": 3}, {"rate": "raw", "clip": 0.5, "nonfinite": "refuse", "exchange": "overlapped", "servers": 2}),
    *({"load": load} for load in LOADS),
    *({"load": "lb-bsp:predictor=ema;minimum=4", "servers": 2, "clip": 1.0}, {"optimizer": "a.b:C"}),
    {"period": 4, "steps": "speed", "outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.8},
    {"wire": "int8"},
]
PARAMETERS = {
    "bsp": [
        *({}, {"micro_batch": 4}, {"engine": "server"}, {"engine": "server", "clip": 1.0, "optimizer": "a:B"}),
        *({"engine": "server", "servers": 2}, {"engine": "server", "servers": 2, "load": "dbs:minimum=2;maximum=90"}),
        *({"engine": "server", "load": load} for load in LOADS),
    ],
    "lb-bsp": [
        *SIZES,
        *({"predictor": predictor} for predictor in sorted(PREDICTORS)),
        *({"tuner": tuner, **sizes} for tuner in ("solver", "pairwise") for sizes in SIZES),
        *({"exchange": "blocking", "predictor": "ema"}, {"change_cost": 0.25}, {"nonfinite": "spread"}),
    ],
    "dbs": [{**weighting, **sizes} for weighting, sizes in product(({}, {"weighting": "mean"}), SIZES)],
    "local-sgd": [
        {"nonfinite": "refuse"},
        *({**period, "load": load} for period, load in product(({}, {"period": 3}), LOADS)),
    ],
    "diloco": [
        {"outer": "momentum", "outer_lr": 0.5, "outer_momentum": 0.8, "wire": "bf16", "nonfinite": "refuse"},
        *({"steps": "speed"}, {"fragments": 4, "alpha": 0.5, "delay": 2}),
        *({**period, "load": load} for period, load in product(({}, {"period": 3}), LOADS)),
    ],
    "asp": [{}, *SERVED],
    "ssp": [{}, {"bound": 0}, *({"bound": 5, **served} for served in SERVED)],
    "grouped": [
        *({}, {"groups": 4}, {"groups": "4", "by": "speed"}, {"groups": "hosts"}, {"groups": "0-3/4+6/5+7"}),
        *({"inside": load} for load in LOADS),
        *({"across": across} for across in ("bsp", "ssp", "ssp:bound=0", "dssp:lower=2;upper=8", "dssp:bounded=false")),
        *({"behind": 4}, {"behind": 2.5}, {"rate": "raw", "clip": 0.5, "nonfinite": "refuse", "push_to": "root"}),
        {"groups": 2, "inside": "lb-bsp:predictor=ema;minimum=4", "across": "ssp:bound=2", "servers": 3},
        {"groups": "hosts", "across": "ssp:bound=0", "optimizer": "a:B"},
        *(
            {"groups": 2, "period": 4},
            {"period": 4, "steps": "speed", "outer": "delayed", "outer_lr": 0.5, "outer_momentum": 0.8},
        ),
    ],
    "dssp": [{}, {"lower": 0, "upper": 0}, *({"lower": 1, "bounded": False, **served} for served in SERVED)],
    "static": [{"sizes": [100, 12, 8, 8]}],
}
CASES = [pytest.param(name, given, id=f"{name}-{given}") for name, table in PARAMETERS.items() for given in table]
LOADS_OF_SCHEMES = {
    repr(load): load for name, table in PARAMETERS.items() for load in (RECIPES[name](**given).load for given in table)
}

STRINGS = [
    "bsp",
    "bsp:micro_batch=4",
    "bsp:engine=server",
    "bsp:engine=server,load=lb-bsp",
    "bsp:engine=server,servers=2,load=dbs",
    "bsp:engine=server,clip=1",
    "lb-bsp",
    *(f"lb-bsp:predictor={name}" for name in sorted(PREDICTORS) if name != "experts"),
    "lb-bsp:tuner=solver",
    "lb-bsp:tuner=pairwise",
    "lb-bsp:exchange=blocking",
    "lb-bsp:change_cost=2.5",
    "lb-bsp:micro_batch=4",
    "lb-bsp:micro_batch=4,multiple=8",
    "dbs",
    "dbs:weighting=mean",
    "dbs:micro_batch=2,maximum=90",
    "local-sgd",
    "local-sgd:period=3,load=lb-bsp",
    "local-sgd:load=dbs",
    "local-sgd:load=lb-bsp:change_cost=0.5",
    "local-sgd:load=lb-bsp:predictor=ema;minimum=4",
    "diloco",
    "diloco:period=8,outer=sgd,outer_lr=1,steps=speed,wire=int8",
    "diloco:load=lb-bsp:predictor=ema;minimum=4",
    "diloco:fragments=4,alpha=0.5",
    "diloco:period=8,delay=5",
    "asp",
    "asp:rate=raw,clip=0.5,nonfinite=refuse,exchange=overlapped,servers=2",
    "ssp",
    "ssp:bound=5,load=lb-bsp:predictor=ema;minimum=4",
    "ssp:bound=5,load=lb-bsp:predictor=ema;minimum=4,servers=2",
    "ssp:bound=2,optimizer=my_module:MyClass",
    "dssp:lower=1,upper=4",
    "dssp:bounded=false,load=dbs:minimum=2;maximum=90",
    "grouped",
    "grouped:groups=4,by=speed,inside=lb-bsp:predictor=ema;minimum=4,across=dssp:lower=2;upper=8,servers=2",
    "static:12/9/3",
    "static:rank:0=12/host:node7=4/gpu:NVIDIA RTX 3090=24",
    "ssp:bound=5,load=static:12/9/3,servers=2",
    "local-sgd:load=static:rank:0=12/host:b=4",
]


@pytest.mark.parametrize(("name", "given"), CASES)
def test_the_name_of_a_scheme_makes_an_equal_scheme(name, given):
    scheme = RECIPES[name](**given)
    assert scheme.name.partition(":")[0] == name
    assert parse_scheme(scheme.name) == scheme


@pytest.mark.parametrize("load", LOADS_OF_SCHEMES.values(), ids=LOADS_OF_SCHEMES)
def test_every_scheme_shares_out_the_batch(load):
    check_load_policy(load.policy)


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_has_every_parameter_of_a_recipe(name):
    used = {parameter for given in PARAMETERS[name] for parameter in given}
    assert used == set(inspect.signature(RECIPES[name]).parameters)


@pytest.mark.parametrize("text", STRINGS)
def test_a_string_in_its_own_order_is_the_name(text):
    assert parse_scheme(text).name == str(parse_scheme(text)) == text


def test_every_recipe_is_public_and_named_by_itself():
    for name, recipe in RECIPES.items():
        assert getattr(evenstep.schemes, name.replace("-", "_")) is recipe
        assert recipe(**PARAMETERS[name][0]).name.partition(":")[0] == name


def test_every_recipe_says_paper_parts_and_when():
    for recipe in RECIPES.values():
        for said in ("Source:", "Parts:", "When to use it:", "When not:", "Args:"):
            assert said in " ".join(recipe.__doc__.split())


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("LB_BSP", "lb-bsp"),
        (" ssp : bound = 5 , servers=2 ", "ssp:bound=5,servers=2"),
        ("ssp:bound=3", "ssp"),
        ("ssp:load=bsp", "ssp"),
        ("ssp:load=lb-bsp:minimum=4;predictor=ema,bound=5", "ssp:bound=5,load=lb-bsp:predictor=ema;minimum=4"),
        ("local-sgd:load=LB_BSP", "local-sgd:load=lb-bsp"),
        ("dssp:bounded=False,clip=1", "dssp:bounded=false,clip=1"),
        ("static:12, 9,03", "static:12/9/3"),
        ("Static:rank:0 = 12, host:b=4", "static:rank:0=12/host:b=4"),
        ("ssp:load=static:12;9", "ssp:load=static:12/9"),
    ],
)
def test_what_means_the_same_has_one_name(text, means):
    assert parse_scheme(text) == parse_scheme(means)
    assert parse_scheme(text).name == means


@pytest.mark.parametrize(
    ("scheme", "sync"),
    [
        (evenstep.schemes.bsp(engine="server"), Barrier()),
        (evenstep.schemes.asp(), Unbounded()),
        (evenstep.schemes.ssp(bound=5), Bounded(bound=5)),
        (evenstep.schemes.dssp(lower=2, upper=7, bounded=False), Dynamic(lower=2, upper=7, bounded=False)),
    ],
    ids=str,
)
def test_how_far_ahead_workers_of_a_served_scheme_may_run(scheme, sync):
    assert scheme.sync == sync
    assert scheme.served == evenstep.schemes.Served()
    assert scheme.load == Equal()


def test_a_barrier_on_servers_takes_the_sizes_of_another_scheme():
    scheme = parse_scheme("bsp:engine=server,load=lb-bsp")
    assert scheme.sync == Barrier()
    assert scheme.served is not None
    assert scheme.load == evenstep.schemes.lb_bsp().load == Experts()


def test_a_scheme_in_another_is_a_string_or_what_a_recipe_made():
    made = evenstep.schemes.ssp(bound=5, load=evenstep.schemes.lb_bsp(predictor="ema", minimum=4))
    assert made == evenstep.schemes.ssp(bound=5, load="lb-bsp:predictor=ema,minimum=4")
    assert made == parse_scheme("ssp:bound=5,load=lb-bsp:predictor=ema;minimum=4")
    assert made.load == evenstep.schemes.lb_bsp(predictor="ema", minimum=4).load
    assert evenstep.schemes.local_sgd(period=2, load=evenstep.schemes.lb_bsp()) == parse_scheme(
        "local-sgd:period=2,load=lb-bsp"
    )


def test_a_scheme_without_servers_is_behind_a_barrier_by_default():
    assert Scheme(name="mine", load=Equal()).sync == Barrier()
