"""The schemes: what they are made of, the recipes by the names that people know, and the parser of scheme strings."""

from evenstep.schemes.collective import bsp, dbs, lb_bsp, local_sgd, static
from evenstep.schemes.grouped import group_servers, grouped, placed
from evenstep.schemes.parse import DEFAULT, parse_scheme
from evenstep.schemes.recipe import RECIPES
from evenstep.schemes.scheme import Scheme, Served
from evenstep.schemes.served import asp, dssp, ssp

__all__ = [
    "DEFAULT",
    "RECIPES",
    "Scheme",
    "Served",
    "asp",
    "bsp",
    "dbs",
    "dssp",
    "group_servers",
    "grouped",
    "lb_bsp",
    "local_sgd",
    "parse_scheme",
    "placed",
    "ssp",
    "static",
]
