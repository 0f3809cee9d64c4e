"""Which files that a benchmark judges have changed since a commit in a way that can change its figures."""

import ast
import subprocess
from collections import defaultdict
from functools import cache

from harness.judges import ALL, JUDGES

RECORD = "benchmarks/harness/record.py"
"""Every benchmark imports it, and it only writes figures down."""


def git(root, *command):
    """What git prints, or None where it fails or is missing."""
    try:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def changed(root, commit, script):
    """The paths that `script` judges and that are gone, or differ from what they were at `commit`, or were not there.

    Definitions and files that were only added do not count: no figure depends on them unless something else changed.
    """
    paths = judged(root, script)
    found = {path for path in paths if not any(f"{name}/".startswith(f"{path}/") for name in _names_at(root, commit))}
    for line in git(root, "diff", "--name-status", "--no-renames", commit, "--", *paths).splitlines():
        status, name = line.split("\t")
        if status == "D" or (status != "A" and not _kept(root, commit, name)):
            found.add(name)
    return sorted(found)


def judged(root, script):
    """The files and folders whose changes can change the figures of this script."""
    elsewhere = ("benchmarks/", "examples/")
    return _modules(root, f"benchmarks/{script}.py") | {
        path if path.startswith(elsewhere) else f"src/evenstep/{path}".rstrip("/") for path in JUDGES.get(script, ALL)
    }


def _modules(root, script):
    """The script and the modules in benchmarks/ that it imports, directly or not."""
    found, ahead = {script}, [script]
    while ahead:
        for node in ast.walk(_parsed(root / ahead.pop())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                stems = [f"benchmarks/{name.replace('.', '/')}" for name in names]
                files = {f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")} - found - {RECORD}
                new = {file for file in files if (root / file).exists()}
                found |= new
                ahead += new
    return found


def _kept(root, commit, name):
    """Whether a Python file still has all that it defined at `commit`, unchanged; of other files nothing is known."""
    if not name.endswith(".py"):
        return False
    return _definitions_at(root, commit, name).items() <= _definitions(_parsed(root / name)).items()


@cache
def _names_at(root, commit):
    return git(root, "ls-tree", "-r", "--name-only", commit).splitlines()


@cache
def _definitions_at(root, commit, name):
    return _definitions(ast.parse(git(root, "show", f"{commit}:{name}")))


def _parsed(path):
    """A file as it is now; one that is missing, or is just being edited, defines nothing."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, SyntaxError):
        return ast.Module([], [])


def _definitions(module):
    """What a module defines, by name, without what changes no figure."""
    found = defaultdict(str, {"": ""})
    _define(found, "", _Plain().visit(module).body)
    return found


def _define(found, owner, body):
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                for each in node.names:
                    found[owner + (each.asname or each.name)] += f"{getattr(node, 'module', '')}:{each.name}"
            case ast.ClassDef(name=name):
                _define(found, f"{owner}{name}.", node.body)
                node.body = []
                found[owner + name] += ast.dump(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[owner + name] += ast.dump(node)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                found[owner + ast.unparse(target)] += ast.dump(node)
            case _:
                found[owner] += ast.dump(node)


class _Plain(ast.NodeTransformer):
    """Takes out docstrings, the words of errors, imports for type checkers and `__all__`."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Raise(self, node):
        return ast.Raise(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Assign(self, node):
        return None if ast.unparse(node.targets[0]) == "__all__" else self.generic_visit(node)
