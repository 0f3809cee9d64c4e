"""A user's own recipe is named by its module and works wherever a scheme does; a mistake in it is one sentence."""

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support import own_policies

import evenstep
from evenstep.cli.main import main
from evenstep.core.load.checked import load_policy
from evenstep.core.sync import Push
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import UNLIMITED, Problem
from evenstep.schemes import RECIPES, import_recipes, parse_scheme, recipe_modules
from evenstep.testing.conformance import check_expert, check_load_policy, check_sync_policy

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = "support.own_policies"


@pytest.fixture(autouse=True)
def in_the_folder_of_examples(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("custom_policy:by_last_time", "custom_policy:by-last-time"),
        ("custom_policy:by-last-time:keep=0.5", "custom_policy:by-last-time"),
        ("custom_policy:periodic:period=20", "custom_policy:periodic"),
        ("custom_policy:by_last_time:keep=0.8,minimum=2", "custom_policy:by-last-time:keep=0.8,minimum=2"),
        ("custom_policy:warm_up:servers=2,bound=5", "custom_policy:warm-up:bound=5,servers=2"),
        (
            "ssp:load=custom_policy:by_last_time:minimum=2;keep=0.8",
            "ssp:load=custom_policy:by-last-time:keep=0.8;minimum=2",
        ),
        ("custom_policy:warm-up:load=lb-bsp:minimum=2", "custom_policy:warm-up:load=lb-bsp:minimum=2"),
    ],
)
def test_the_name_of_a_users_scheme_makes_it_again(text, name):
    scheme = parse_scheme(text)
    assert scheme.name == name
    assert parse_scheme(name, imports=False) == scheme


def test_policies_of_the_example_keep_every_promise():
    check_load_policy(parse_scheme("custom_policy:by_last_time").load.policy)
    load = parse_scheme("custom_policy:periodic:period=7").load
    check_load_policy(load.policy)
    check_expert(load.makers[-1])
    sync = parse_scheme("custom_policy:warm_up:iterations=4,bound=2").sync
    check_sync_policy(lambda: sync.policy(4), workers=4)


def test_a_recipe_shows_types_defaults_and_help():
    import_recipes("custom_policy")
    recipe = RECIPES["custom_policy:warm-up"]
    parameters = inspect.signature(recipe).parameters
    assert list(parameters) == [
        *("iterations", "bound", "load"),
        *("rate", "clip", "nonfinite", "exchange", "wire", "servers", "optimizer"),
    ]
    assert (parameters["bound"].annotation, parameters["bound"].default) == (int, 3)
    assert "    bound: The largest lead after that; 0 or more.\n" in recipe.__doc__
    assert "    servers: Server processes, 1 to 128, each with a part of the parameters." in recipe.__doc__


def test_the_options_of_servers_are_those_of_their_class():
    assert set(evenstep.schemes.ServerOptions.__annotations__) | {"push_to"} == set(
        inspect.signature(evenstep.schemes.Served).parameters
    )


def test_servers_are_told_what_to_import_and_from_where():
    import_recipes("custom_policy")
    assert ("custom_policy", str(EXAMPLES)) in recipe_modules()
    assert (OWN, str(EXAMPLES.parent / "tests")) in recipe_modules()


def test_a_message_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("unseen_policies.py").write_text("raise AssertionError('imported')\n")
    with pytest.raises(evenstep.ConfigError, match="the module 'unseen_policies' has no recipe 'mine'"):
        parse_scheme("unseen_policies:mine", imports=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "no_such_module:mine",
            "the module 'no_such_module' of a scheme cannot be imported (ModuleNotFoundError: ",
        ),
        ("..:mine", "the module '..' of a scheme cannot be imported ("),
        ("json:mine", "the module 'json' has no recipe 'mine': put @evenstep.policies.recipe before a class"),
        ("custom_policy:by_last_tim", "has no recipe 'by_last_tim': did you mean 'by-last-time'?"),
        (
            "custom_policy:by_last_time:kep=1",
            "'custom_policy:by-last-time' has no parameter 'kep': did you mean 'keep'",
        ),
        ("custom_policy:by_last_time:keep=much", "keep of the scheme 'custom_policy:by-last-time' takes a number, not"),
        ("custom_policy:by_last_time:keep=1", "a part of 1.0 of a speed cannot remain: use 0 <= keep < 1"),
        (f"{OWN}:wrong_parts", "the load of a scheme cannot be 'load': derive its class from evenstep.policies.Load"),
        (f"{OWN}:wrong_parts:part=sync", "the sync of a scheme cannot be 'sync': give an object like"),
        (f"{OWN}:wrong_parts:part=scheme", "wrong-parts' gave 'bsp': return an evenstep.Scheme from it"),
    ],
)
def test_a_string_that_makes_no_scheme_says_why(text, says):
    with pytest.raises(evenstep.ConfigError) as caught:
        parse_scheme(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parameter_needs_a_type_and_a_default():
    def unclear(*, bound: int) -> evenstep.Scheme: ...

    with pytest.raises(evenstep.ConfigError, match="unclear' needs a type and a default"):
        evenstep.policies.recipe(unclear)


@dataclass
class Undefined(evenstep.policies.LoadPolicy):
    workers: int
    keep: float

    def allocate(self, problem): ...


@dataclass
class Twice(evenstep.policies.LoadPolicy):
    workers: int
    minimum: int = 2

    def allocate(self, problem): ...


@dataclass
class Other(evenstep.policies.Expert):
    keep: float = 0.5

    def speeds(self): ...


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Undefined, "the parameter 'keep' of the recipe '[^']*test_custom:undefined' needs a type and a default"),
        (Twice, "every recipe of a class like Twice has minimum: name yours otherwise"),
        (Other, "the constructor of Other begins with 'keep': begin with workers"),
        (own_policies.WrongPolicy, "the constructor of WrongPolicy begins with 'wrong': begin with workers"),
        (dict, "the class dict cannot be a recipe: derive it from LoadPolicy, SyncPolicy or Expert"),
    ],
)
def test_a_class_that_is_no_recipe_says_why(kind, says):
    with pytest.raises(evenstep.ConfigError, match=says):
        evenstep.policies.recipe(kind)


def test_a_class_makes_the_scheme_that_its_name_makes():
    import_recipes("custom_policy")
    kind = sys.modules["custom_policy"].ByLastTime
    assert evenstep.policies.scheme_of(kind, keep=0.2) == parse_scheme("custom_policy:ByLastTime:keep=0.2")
    with pytest.raises(evenstep.ConfigError, match="the class Undefined has no recipe: put @evenstep"):
        evenstep.policies.scheme_of(Undefined)


def problem(batch=10):
    ones = np.ones(2, dtype=np.int64)
    return Problem(global_batch_size=batch, minimum=ones, maximum=ones * UNLIMITED)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("sum", "gave the sizes [2, 2], which sum to 4 and not to the global batch of 10: correct its allocate()"),
        ("floats", "gave sizes that are ndarray and not an array of int64"),
        ("list", "gave sizes that are [10, 0] and not an array of int64"),
        ("shape", "gave sizes of shape (1,) for 2 workers"),
        ("limits", "gave worker 1 the size 0, outside its limits of 1 to 2147483647 in multiples of 1"),
        ("type", "allocate() of the load policy WrongPolicy gave ndarray: return an Allocation"),
    ],
)
def test_a_load_policy_that_decides_nonsense_is_named(wrong, says):
    policy = load_policy(own_policies.WrongLoad(wrong=wrong), 2)
    with pytest.raises(evenstep.ConfigError) as caught:
        policy.allocate(problem())
    assert says in str(caught.value)
    assert "load policy WrongPolicy gave" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("holds", "holds all workers ([0]) for ever: release one of them"),
        ("twice", "committed a push that is empty, committed already or unknown: commit each push once"),
        ("releases", "released worker 0, which is not held: release a worker after its push"),
        ("none", "gave None: return a list of commands"),
        ("words", "gave the command 'release': use Commit and Release"),
    ],
)
def test_a_sync_policy_that_decides_nonsense_is_named(wrong, says):
    policy = sync_policy(own_policies.WrongSync(wrong=wrong), 2)
    policy.on_join(0, 0.0)
    with pytest.raises(evenstep.ConfigError) as caught:
        policy.on_push(Push(0, 1, 4, 4, 0.5, 0), 1.0)
    assert str(caught.value) == f"on_push() of the sync policy WrongSyncPolicy {says}"


def test_a_part_that_makes_no_policy_is_named():
    with pytest.raises(
        evenstep.ConfigError, match=r"policy\(\) of the sync WrongSync gave \[\], which has no on_join\(\)"
    ):
        sync_policy(own_policies.WrongSync(wrong="policy"), 2)


def test_the_simulator_runs_a_users_policies(capsys):
    schemes = [
        "custom_policy:by_last_time",
        "custom_policy:warm_up:iterations=4,bound=2",
        "ssp:load=custom_policy:by_last_time",
    ]
    words = ["clusters/four-gpus.toml", "--iterations", "20", "--global-batch-size", "64", "--json"]
    assert main(["simulate", *words, "--schemes", *schemes]) == 0
    out = capsys.readouterr().out
    assert "custom_policy:by-last-time" in out
    assert "custom_policy:warm_up:iterations=4,bound=2" in out


def test_the_simulator_refuses_a_wrong_policy_in_a_sentence(capsys):
    words = ["clusters/four-gpus.toml", "--iterations", "5", "--global-batch-size", "64"]
    assert main(["simulate", *words, "--schemes", f"{OWN}:wrong_sizes:wrong=type"]) == 2
    assert "allocate() of the load policy WrongPolicy gave ndarray: return an Allocation" in capsys.readouterr().err
