"""A script that imports this first has torch's compiler only once it asks for more than to be left alone.

The compiler's import takes as long as torch's own. DDP and every optimizer bring it in to learn that nothing is
compiled, and to mark functions that must not be. Scripts that tests start as processes do not compile. Workers that
tests fork, and the examples, have it as it is. A quarter of torch's own import are searches for garbage, of which there
is none.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace


class Postponed(ModuleType):
    """Has what is asked of the compiler where nothing is compiled; for the rest it gives way to the compiler."""

    OptimizedModule = type("OptimizedModule", (), {})
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    decorators = SimpleNamespace(skip=lambda function: function)
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function=None, *_, **__):
        return function if function is not None else lambda decorated: decorated

    @staticmethod
    def graph_break():
        pass

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


sys.modules.setdefault("torch._dynamo", Postponed("torch._dynamo"))
gc.disable()
import_module("torch")
gc.freeze()
gc.enable()
