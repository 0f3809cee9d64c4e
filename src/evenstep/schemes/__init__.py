"""The schemes: their parts, the recipes under their usual names, and the parser of scheme strings."""

from evenstep.schemes.collective import bsp, dbs, diloco, in_batches, lb_bsp, local_sgd, static
from evenstep.schemes.grouped import group_servers, grouped
from evenstep.schemes.recipe import DEFAULT, RECIPES, import_recipes, parse_scheme, recipe, recipe_modules
from evenstep.schemes.scheme import Outer, Scheme, Served, ServerOptions, placed
from evenstep.schemes.served import asp, dssp, ssp

__all__ = [
    "DEFAULT",
    "RECIPES",
    "Outer",
    "Scheme",
    "Served",
    "ServerOptions",
    "asp",
    "bsp",
    "dbs",
    "diloco",
    "dssp",
    "group_servers",
    "grouped",
    "import_recipes",
    "in_batches",
    "lb_bsp",
    "local_sgd",
    "parse_scheme",
    "placed",
    "recipe",
    "recipe_modules",
    "ssp",
    "static",
]
