"""What does not go together is refused in one sentence that says why."""

import numpy as np
import pytest

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.core.load.equal import Equal
from evenstep.core.sync import Bounded
from evenstep.schemes import Scheme, Served, parse_scheme, placed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lb-bsp:tuner=pairwise,predictor=ema", "tuner=pairwise uses no predictor: leave out predictor"),
        ("lb-bsp:tuner=pairs", "tuner cannot be 'pairs': use experts, solver or pairwise"),
        ("lb-bsp:exchange=none", "exchange cannot be 'none': use overlapped or blocking"),
        ("dbs:weighting=median", "weighting cannot be 'median': use samples or mean"),
        ("lb-bsp:micro_batch=4,multiple=6", "cannot be cut into micro-batches of 4"),
        ("bsp:micro_batch=0", "a micro-batch of 0 samples is not possible"),
        ("lb-bsp:micro_batch=0", "a micro-batch of 0 samples is not possible"),
        ("local-sgd:period=0", "a period of 0 iterations is not possible"),
        ("local-sgd:load=local-sgd", "takes only the sizes of 'local-sgd'"),
        ("local-sgd:load=ssp", "local_sgd takes only the sizes of 'ssp'"),
        ("bsp:servers=2", "bsp has no servers to give servers, optimizer, clip or load to"),
        ("bsp:clip=1", "bsp has no servers to give servers, optimizer, clip or load to"),
        ("bsp:load=lb-bsp", "bsp has no servers to give servers, optimizer, clip or load to"),
        ("bsp:engine=servers", "engine cannot be 'servers': use collective or server"),
        ("bsp:engine=server,micro_batch=4", "take a push from every batch and its speed with it: leave out micro"),
        ("asp:period=0", "a period of 0 iterations is not possible: use 1 or more"),
        ("asp:period=4,outer=momentum", "outer cannot be 'momentum': use sgd, delayed or nesterov"),
        ("asp:period=4,outer_lr=0", "an outer learning rate of 0.0 is not possible"),
        ("ssp:steps=speed", "outer and steps are about the steps of a period: give period too"),
        ("ssp:outer_lr=0.5", "outer and steps are about the steps of a period: give period too"),
        (
            "asp:period=4,load=lb-bsp",
            "sizes by speed give a worker more or fewer steps of a period on servers: give st",
        ),
        ("asp:period=4,exchange=overlapped", "leave out exchange=overlapped or period"),
        ("asp:period=4,optimizer=a:B", "with a period the servers run the outer optimizer"),
        ("grouped:across=asp:period=4", "says more than that: leave out its load"),
        ("grouped:period=4,inside=lb-bsp", "give steps=speed too, or leave out load and inside"),
        ("grouped:outer=delayed", "outer and steps are about the steps of a period: give period too"),
        ("bsp:engine=server,clip=1,servers=2", "no server sees the whole of a sum of several workers' gradients"),
        ("asp:rate=fast", "rate cannot be 'fast': use share or raw"),
        ("asp:nonfinite=keep", "nonfinite cannot be 'keep': use skip or refuse"),
        ("asp:exchange=none", "exchange cannot be 'none': use blocking or overlapped"),
        ("asp:servers=0", "0 servers cannot hold the parameters: use 1 to 128"),
        ("asp:servers=1000000", "1000000 servers cannot hold the parameters: use 1 to 128"),
        ("ssp:servers=-1", "-1 servers cannot hold the parameters"),
        ("asp:clip=0", "cannot be clipped to 0.0"),
        ("asp:clip=nan", "cannot be clipped to nan"),
        ("asp:clip=inf", "cannot be clipped to inf"),
        ("ssp:bound=-1", "cannot be bounded to a lead of -1"),
        ("dssp:lower=-1", "cannot be bounded to a lead of -1"),
        ("dssp:lower=4,upper=3", "leads cannot be from 4 to 3"),
        ("ssp:load=ssp", "ssp takes only the sizes of 'ssp'"),
        ("ssp:load=bsp:engine=server", "ssp takes only the sizes of 'bsp:engine=server'"),
        ("ssp:load=dbs:weighting=mean", "ssp takes only the sizes of 'dbs:weighting=mean'"),
        ("ssp:load=lb-bsp:exchange=blocking;minimum=2", "ssp takes only the sizes of 'lb-bsp:exchange=blocking"),
        ("grouped:groups=0", "workers cannot be in 0 groups"),
        ("grouped:groups=some", "groups cannot be 'some': use progressive, hosts, a number, or ranks"),
        ("grouped:groups=0-3/4-", "groups cannot be '0-3/4-'"),
        ("grouped:groups=3-1", "groups cannot name the ranks '3-1': write the first and the last, such as 0-3"),
        ("grouped:groups=0-99999999999", "groups cannot name the ranks '0-99999999999'"),
        ("grouped:groups=" + "9" * 5000, "groups cannot be '9999"),
        ("grouped:by=speed", "by=speed says who is in a number of groups, and there is none"),
        ("grouped:behind=0", "up to 0.0 global batches behind: both are positive"),
        ("grouped:behind=nan", "up to nan global batches behind: both are positive"),
        ("grouped:groups=4,behind=4", "behind limits progressive groups, and others stay as many: leave it out"),
        ("grouped:by=host", "by cannot be 'host': use rank or speed"),
        (
            "grouped:inside=asp",
            "inside a group is a barrier, and 'asp' says more than its sizes: use bsp, lb-bsp or dbs",
        ),
        ("grouped:inside=lbbsp", "there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ("grouped:inside=local-sgd", "inside a group is a barrier, and 'local-sgd' says more than its sizes"),
        ("grouped:inside=grouped", "inside a group is a barrier, and 'grouped' says more than its sizes"),
        (
            "grouped:across=grouped",
            "groups wait for each other as under bsp, asp, ssp or dssp, and 'grouped' says more",
        ),
        ("grouped:across=lb-bsp", "groups wait for each other as under bsp, asp, ssp or dssp, and 'lb-bsp' says more"),
        ("grouped:across=asp:servers=2", "and 'asp:servers=2' says more than that"),
        ("grouped:clip=1,servers=2", "no server sees the whole of a sum of several workers' gradients"),
        ("ssp:load=bsp:micro_batch=4", "ssp takes only the sizes of 'bsp:micro_batch=4'"),
        ("static", "there are no batch sizes: give a number of samples for each worker, such as 12/9/3"),
        ("static:", "there are no batch sizes"),
        ("static:12/x/3", "the batch size of worker 1 must be a whole number from 1 to 2147483647, not 'x'"),
        ("static:12/9,multiple=3", "a batch size cannot be that of '12/9,multiple': write rank:NUMBER, host:NAME or"),
        ("ssp:load=static:12/0", "the batch size of worker 1 must be a whole number from 1 to 2147483647, not 0"),
    ],
)
def test_parameters_that_do_not_go_together_say_so(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_scheme(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sssp", "there is no scheme 'sssp': did you mean 'ssp'?"),
        ("lbsp", "there is no scheme 'lbsp': did you mean 'lb-bsp'?"),
        ("assp", "there is no scheme 'assp': did you mean 'asp'?"),
        ("", "there is no scheme ''"),
        ("ssp,bound=3", "there is no scheme 'ssp,bound=3': did you mean 'ssp:bound=3'?"),
        ("lb_bsp minimum=2,maximum=9", "did you mean 'lb_bsp:minimum=2,maximum=9'?"),
        ("fast,bound=3", "choose one of 'bsp', 'lb-bsp'"),
        ("dbs:predictor=ema", "the scheme 'dbs' has no parameter 'predictor'"),
        ("ssp:bond=3", "the scheme 'ssp' has no parameter 'bond': did you mean 'bound'?"),
        ("ssp:bound", "the parameter 'bound' of 'ssp:bound' has no value: write bound=..."),
        ("ssp:bound=", "the parameter 'bound' of 'ssp:bound=' has no value"),
        ("ssp:bound=3,bound=4", "the parameter 'bound' stands twice"),
        ("ssp:bound=three", "bound of the scheme 'ssp' takes a whole number, not 'three'"),
        ("ssp:bound=2.5", "bound of the scheme 'ssp' takes a whole number, not '2.5'"),
        ("ssp:bound=" + "9" * 30, "takes a whole number of at most 2147483647, not 9999"),
        ("ssp:bound=" + "9" * 5000, "bound of the scheme 'ssp' takes a whole number, not '9999"),
        ("asp:clip=much", "clip of the scheme 'asp' takes a number, not 'much'"),
        ("dssp:bounded=0", "bounded of the scheme 'dssp' is true or false, not '0'"),
        ("grouped:wire=int8", "the scheme 'grouped' has no parameter 'wire'"),
        ("ssp:micro_batch=4", "the scheme 'ssp' has no parameter 'micro_batch'"),
        ("ssp:load=lbbsp", "there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ("ssp:load=lb-bsp:minimum=few", "minimum of the scheme 'lb-bsp' takes a whole number"),
        ("ssp:load=lb-bsp:predictor=ema,minimum=4", "the scheme 'ssp' has no parameter 'minimum'"),
    ],
)
def test_a_string_that_cannot_be_read_says_what_to_write(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_scheme(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("recipe", "arguments", "says"),
    [
        (evenstep.schemes.ssp, {"bound": "3"}, "bound of the scheme 'ssp' takes a whole number, not '3'"),
        (evenstep.schemes.ssp, {"bound": 2.5}, "bound of the scheme 'ssp' takes a whole number, not 2.5"),
        (evenstep.schemes.ssp, {"bound": True}, "bound of the scheme 'ssp' takes a whole number, not True"),
        (evenstep.schemes.ssp, {"bound": 10**30}, "takes a whole number of at most 2147483647, not 1000"),
        (evenstep.schemes.ssp, {"load": 3}, "load of the scheme 'ssp' takes a scheme or a name, not 3"),
        (evenstep.schemes.asp, {"clip": "1"}, "clip of the scheme 'asp' takes a number, not '1'"),
        (evenstep.schemes.asp, {"rate": ["share"]}, "rate of the scheme 'asp' takes a name, not ['share']"),
        (evenstep.schemes.dssp, {"bounded": 0}, "bounded of the scheme 'dssp' is true or false, not 0"),
        (evenstep.schemes.lb_bsp, {"minimum": 1.5}, "minimum of the scheme 'lb-bsp' takes a whole number, not 1.5"),
        (evenstep.schemes.static, {"sizes": 3}, "sizes of the scheme 'static' takes batch sizes such as 12/9/3, not 3"),
        (evenstep.schemes.static, {"sizes": [3, "5"]}, "the batch size of worker 1 must be a whole number from 1 to"),
        (
            evenstep.schemes.grouped,
            {"groups": 2.5},
            "groups of the scheme 'grouped' takes a whole number or a name, not 2.5",
        ),
    ],
)
def test_a_recipe_refuses_an_argument_of_another_type(recipe, arguments, says):
    with pytest.raises(ConfigError) as caught:
        recipe(**arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_takes_the_integers_of_numpy():
    assert evenstep.schemes.ssp(bound=np.int64(2)) == evenstep.schemes.ssp(bound=2)


def test_there_cannot_be_more_groups_than_workers():
    for text in ("grouped:groups=9", "grouped:groups=9,by=speed"):
        with pytest.raises(ConfigError, match="2 workers cannot be in 9 groups: use 2 or fewer"):
            placed(parse_scheme(text), ["here", "here"])


def scheme(**parts):
    return Scheme(**{"name": "mine", "load": Equal(), **parts})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: evenstep.schemes.local_sgd(load=evenstep.schemes.dbs(weighting="mean")), "takes only the sizes of"),
        (lambda: evenstep.schemes.local_sgd(load=evenstep.schemes.bsp(micro_batch=2)), "takes only the sizes of"),
        (lambda: evenstep.schemes.ssp(load=scheme(name="lb-bsp")), "'lb-bsp' is not a name that makes these"),
        (lambda: evenstep.schemes.asp(load=scheme()), "'mine' is not a name that makes these"),
        (lambda: scheme(load=Equal(multiple=2), period=2, micro_batch=2), "leave out micro_batch"),
        (lambda: scheme(period=2, exchange="blocking"), "leave out exchange"),
        (lambda: scheme(weighting="median"), "weighting cannot be 'median'"),
        (lambda: scheme(sync=Bounded(bound=1)), "need parameter servers: give served=Served()"),
        (
            lambda: scheme(served=Served(exchange="overlapped")),
            "a barrier leaves nothing to compute on while it is waited for",
        ),
        (lambda: scheme(served=Served(clip=1, servers=2)), "clip with one server, or without a barrier"),
        (lambda: scheme(served=Served(), sync=Bounded(bound=1), period=2), "give an Outer without fragments"),
        (lambda: scheme(served=Served(), micro_batch=1), "leave out micro_batch and the exchange of speeds"),
        (lambda: scheme(served=Served(), exchange="blocking"), "leave out micro_batch and the exchange"),
        (lambda: scheme(served=Served(), weighting="mean"), "weigh by samples: leave out weighting"),
    ],
)
def test_nor_do_parts_in_python(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clip_and_overlap_go_together_where_workers_go_their_own_ways():
    served = Served(clip=1, servers=2, exchange="overlapped")
    assert scheme(sync=Bounded(bound=1), served=served).served == served


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("asp", "the scheme 'asp' cannot run while members come and go: use lb-bsp"),
        ("lb-bsp:micro_batch=4", "cannot run while members come and go"),
        ("lb-bsp:predictor=narx", "without predictor=narx and nonfinite=refuse"),
        ("diloco:load=lb-bsp,nonfinite=refuse", "without predictor=narx and nonfinite=refuse"),
        ("diloco:fragments=2", "leave out fragments, alpha, delay and wire"),
        ("diloco:period=4,delay=1", "leave out fragments, alpha, delay and wire"),
        ("diloco:wire=int8", "leave out fragments, alpha, delay and wire"),
    ],
)
def test_and_some_schemes_where_workers_come_and_go(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_scheme(text).require_elastic()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    parse_scheme("diloco:steps=speed").require_elastic()
