"""`evenstep env`: what is installed and what this machine has, for a bug report."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import psutil

from evenstep import __version__
from evenstep.cli.arguments import Parser

_PACKAGES: Final = (
    "torch", "numpy", "msgspec", "lightning", "accelerate", "transformers", "ray", "tensorflow", "jax", "flwr",
)  # fmt: skip
_SETTINGS: Final = ("EVENSTEP_", "GLOO_", "NCCL_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "RANK")
_SECRET: Final = "SECRET"
_DESCRIPTION: Final = """\
Print what a bug report needs: versions, processors, memory, devices, backends of torch.distributed, and the environment
variables that change how it communicates. The secret of a run is never among them."""
# A separate process imports PyTorch: a broken installation may crash it.
_ASK_TORCH: Final = """
import json, torch, torch.distributed as dist
backends = [name for name in ("gloo", "nccl", "mpi", "xccl", "ucc") if getattr(dist, f"is_{name}_available", bool)()]
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": devices, "backends": backends}))
"""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    found = facts()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep env", description=_DESCRIPTION, example="evenstep env --json")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def facts() -> dict[str, object]:
    """Return what this process finds out about its machine, by name."""
    memory = psutil.virtual_memory()
    return {
        "evenstep": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: installed for name in _PACKAGES if (installed := _version(name)) is not None},
        **_torch(),
        "processors": f"{len(psutil.Process().cpu_affinity() or ())} usable of {os.cpu_count()}",
        "memory": f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB",
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS) and _SECRET not in name
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> dict[str, object]:
    if _version("torch") is None:
        return {}
    done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"torch's import": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    said = json.loads(done.stdout.splitlines()[-1])
    return {"cuda": said["cuda"] or "none", "devices": said["devices"] or ["cpu"], "backends": said["backends"]}
