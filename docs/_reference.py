"""The pages of the reference that are made from the source, so that they cannot differ from it."""

import ast
import re
from html import escape
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import msgspec

SRC = Path(__file__).parent.parent / "src"
FIRST = {
    "evenstep": ("prepare", "Session", "balance", "Balancer", "Client"),
    "evenstep.schemes": ("lb_bsp", "dbs", "bsp", "static", "local_sgd", "diloco", "asp", "ssp", "dssp", "grouped"),
}
"""What readers look for first on a page; then come functions, classes, constants and errors."""


def page(name):
    """The page reference/NAME.md: of the command line, of the events of a run, or of a module."""
    return {"command-line": _command_line, "events": _events}.get(name, lambda: _module(name))()


def anchors(name):
    """What can be looked up on that page: options, events, or the public names of a module."""
    if name == "command-line":
        return [_anchor(own, action) for own, parser in _parsers() for action in parser._actions]
    if name == "events":
        return list(import_module("evenstep.telemetry.events").RECORDS)
    tree = _tree(name)
    public = [each.name for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
            public = ast.literal_eval(each.value)
    others = [own for module, own in _imports(tree) if not module.startswith("evenstep")]
    return [f"{name}.{own}" for own in public if not own.startswith("_") and own not in others]


def _module(name):
    """The public names of a module, each in a block; one that a submodule has too is looked up there."""
    hidden = [own for module, own in _imports(_tree(name)) if module == f"{name}.{own}"]
    first, modules = FIRST.get(name, ()), ("checkpoint", "policies", "schemes")  # Modules have pages of their own.

    def place(own):
        at = first.index(own) if own in first else len(first)
        return at, own.endswith("Error"), own.isupper(), own[0].isupper()

    names = sorted((each.removeprefix(f"{name}.") for each in anchors(name)), key=place)
    blocks = [
        f"[](){{ #{name}.{own} }}\n\n::: {name}.{own}.{own}\n" if own in hidden else f"::: {name}.{own}\n"
        for own in names
        if own not in modules
    ]
    if name == "evenstep.schemes":
        own = import_module(name)
        blocks[: len(first)] = [
            block + _parameters(getattr(own, each), each.replace("_", "-"))
            for each, block in zip(first, blocks, strict=False)
        ]
    about = "{show_root_heading: false, show_root_toc_entry: false, members: false}"
    return "\n".join([f"# {name}\n", f"::: {name}\n    options: {about}\n", *blocks])


def _parameters(recipe, scheme):
    """What follows the block of a recipe: the help of its parameters, which is in their annotations, and its page."""
    text = recipe.__doc__.partition("\nArgs:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    shown = "".join(f"* **`{name}`**: {' '.join(help.split())}\n" for name, help in found)
    page = "batch-sizes" if scheme == "static" else scheme
    picture = (
        "" if scheme == "static" else f"![Four workers under {scheme}, in virtual time](../images/{scheme}.svg)\n\n"
    )
    return (
        f"    options: {{show_signature_annotations: false}}\n\n**Parameters:**\n\n{shown}\n"
        f"Equations and commands: [{scheme}](../schemes/{page}.md).\n\n{picture}"
    )


def _tree(name):
    path = SRC.joinpath(*name.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _imports(tree):
    return [(each.module, own.name) for each in tree.body if isinstance(each, ast.ImportFrom) for own in each.names]


def _command_line():
    subcommands = import_module("evenstep.cli.main").SUBCOMMANDS
    shown = "".join(f"| [`evenstep {name}`](#{name}) | {summary} |\n" for name, summary in subcommands.items())
    rest = "\n".join(_subcommand(name, parser) for name, parser in _parsers())
    return f"# Command line\n\n| subcommand | |\n|---|---|\n{shown}\n{rest}"


def _parsers():
    for name in import_module("evenstep.cli.main").SUBCOMMANDS:
        yield name, import_module(f"evenstep.cli.{name}").make_parser()


def _anchor(name, action):
    return name + (action.option_strings[-1] if action.option_strings else f"-{action.dest}")


def _subcommand(name, parser):
    formatter = parser._get_formatter()
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts = [f"## evenstep {name} {{ #{name} }}\n", f"```text\n{usage}\n```\n"]
    parts += [
        f"```text\n{text}\n```\n" if re.search(r"\S   ", text) else f"<p>{escape(text)}</p>\n"  # Columns stay columns.
        for text in parser.description.split("\n\n")
    ]
    parts.append('<dl class="options">')
    for action in parser._actions:
        shown, text = formatter._format_action_invocation(action), formatter._expand_help(action)
        parts.append(f'<dt id="{_anchor(name, action)}"><code>{escape(shown)}</code></dt><dd>{escape(text)}</dd>')
    example = parser.epilog.partition("\n")[2].strip()
    return "\n".join([*parts, f"</dl>\n\n```sh\n{example}\n```\n"])


def _events():
    events = import_module("evenstep.telemetry.events")
    schemas = msgspec.json.schema_components(events.RECORDS.values())[1]
    parts = [f"# Events\n\n{events.__doc__}"]
    for writer in (events.WorkerEvent, events.ServerEvent, events.LauncherEvent):
        parts.append(f"## Of a {writer.__name__.removesuffix('Event').lower()}\n\n{writer.__doc__}\n")
        for kind, record in events.RECORDS.items():
            if not issubclass(record, writer):
                continue
            parts.append(f"### {kind} {{ #{kind} }}\n\n{cleandoc(record.__doc__)}\n")
            parts.append("| field | value | if missing |\n|---|---|---|")
            for field in msgspec.structs.fields(record):
                value = schemas[record.__name__]["properties"][field.encode_name]
                parts.append(f"| `{field.encode_name}` | {_shown(value)} | {_default(field)} |")
            parts.append("")
    return "\n".join(parts)


def _shown(value):
    if "anyOf" in value:
        return " or ".join(_shown(each) for each in value["anyOf"])
    if "enum" in value:
        return " or ".join(f"`{each}`" for each in value["enum"])
    return f"array of {_shown(value['items'])}s" if value["type"] == "array" else value["type"]


def _default(field):
    if field.required:
        return ""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return f"`{msgspec.json.encode(value).decode()}`"
