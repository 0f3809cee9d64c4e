"""MXNet's ps-lite: a `dist_async` KVStore with the SGD optimizer on one server, all its processes on this host."""

import json
import os
import socket
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from contestants.case import Measured, Timed

REQUIREMENTS = ("mxnet==1.9.1", "numpy<1.24")
_LIMIT_SECONDS = 300


def measure(case, *, python, layout):
    """The model as `one key` or as the `model keys` of its parameters, on an interpreter that has MXNet."""
    environment = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(case.workers),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [python, "-m", "contestants.mxnet_node", json.dumps(asdict(case)), layout]
    roles = ["scheduler", "server", *["worker"] * case.workers]
    with tempfile.TemporaryFile("w+") as complaints:
        nodes = [
            subprocess.Popen(
                command,
                env={**environment, "DMLC_ROLE": role},
                cwd=Path(__file__).parents[1],
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )
            for role in roles
        ]
        try:
            results = [_result(node) for role, node in zip(roles, nodes, strict=True) if role == "worker"]
            for node in nodes:
                node.communicate(timeout=_LIMIT_SECONDS)
        except Exception as error:
            complaints.seek(0)
            raise RuntimeError(f"a node of ps-lite failed: {error}\n{complaints.read()}") from error
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    return Measured(
        workers=tuple(Timed(exchanges=each["exchanges"], seconds=each["seconds"]) for each in results),
        details={"keys": results[0]["keys"]},
    )


def _result(node):
    output, _ = node.communicate(timeout=_LIMIT_SECONDS)
    if node.returncode:
        raise RuntimeError(f"exit status {node.returncode}")
    return json.loads(output)


def _free_port():
    """One that was free a moment ago: ps-lite's scheduler cannot choose its own and tell it."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]
