"""The files of deploy/: their form, and the command lines in them, of which one runs on two hosts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import training
from support.hosts import enter, two_hosts
from support.slurm import slurm as slurm_cluster
from support.started import Started, ended, torchrun
from support.training import Run
from torch.distributed.run import get_args_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = Path(training.__file__).with_name("two_hosts.py")

# In place of a cluster's commands: the first says which hosts a job has; the others write down how they were called.
SCONTROL = "#!/bin/sh\necho $HOST_0; echo $HOST_1\n"
SRUN = '#!/bin/sh\ncase "$1" in --*) shift;; esac\nexec "$@"\n'
CALLED = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], {{k: v for k, v in os.environ.items() if k.startswith(("EVENSTEP_", "PET_"))}}]))
"""


def called(shell, tmp_path, **environment):
    """What a shell script calls torchrun or ray with: its arguments, and the variables that concern it."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": CALLED, "ray": CALLED}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run(["bash", "-c", shell], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def slurm(node, hosts, tmp_path):
    job = {"SLURM_JOB_ID": 17, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": 2, "SLURM_NODEID": node}
    return called((DEPLOY / "slurm.sbatch").read_text(encoding="utf-8"), tmp_path, **hosts, **job)


def skypilot(node, hosts, tmp_path):
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text(encoding="utf-8"))
    given = {"NODE_IPS": "\n".join(hosts.values()), "NUM_NODES": 2, "NODE_RANK": node, "NUM_GPUS_PER_NODE": 0}
    assert task["num_nodes"] == 2
    return called(task["run"], tmp_path, **task["envs"], **{f"SKYPILOT_{name}": given[name] for name in given})


def kubeflow(node, hosts, tmp_path):
    trainer = yaml.safe_load((DEPLOY / "kubeflow.yaml").read_text(encoding="utf-8"))["spec"]["trainer"]
    runtime = {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": node,
        "PET_MASTER_ADDR": hosts["HOST_0"],
        "PET_MASTER_PORT": 29400,
    }
    given = {each["name"]: each["value"] for each in trainer["env"] if "value" in each}
    return called(" ".join(trainer["command"]), tmp_path, **runtime, **given)


def kubernetes(node, hosts, tmp_path):
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in worker["env"] if "value" in each}
    assert given["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert given["PET_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    given |= {"PET_NODE_RANK": node, "PET_MASTER_ADDR": hosts["HOST_0"]}
    return called(" ".join(worker["command"]), tmp_path, **given)


def compose(node, hosts, tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    given = {name: _filled(value) for name, value in services[f"worker-{node}"]["environment"].items()}
    # A name that the network of the containers knows.
    assert given["PET_MASTER_ADDR"] == "worker-0"
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^CMD (.*)$", image, re.MULTILINE)
    return called(" ".join(json.loads(command)), tmp_path, **{**given, "PET_MASTER_ADDR": hosts["HOST_0"]})


def _filled(value):
    """With the defaults of Compose's variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def write_script(folder):
    folder.mkdir(exist_ok=True)
    run = f"sys.argv[1:] = [{str(folder)!r}]\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    (folder / "train.py").write_text(f"import runpy, sys\n{run}", encoding="utf-8")


def trained_as_one_process_does(folder, workers):
    expected = training.train_alone(Run(samples=82, epochs=2), 5 * workers)
    for rank in range(workers):
        value = json.loads((folder / f"worker-{rank}.json").read_text(encoding="utf-8"))
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    assert any((folder / "runs").rglob("*.jsonl"))


def torchrun_on(host, folder, *words):
    enter(host)
    os.chdir(folder)
    torchrun(*words)


@pytest.mark.parametrize("system", [slurm, skypilot, kubernetes, kubeflow, compose])
def test_its_command_line_is_that_of_a_worker_on_each_of_two_nodes(system, tmp_path, monkeypatch):
    ports = set()
    for node in range(2):
        words, environment = system(node, {"HOST_0": "first", "HOST_1": "second"}, tmp_path)
        assert environment["EVENSTEP_SCHEME"] == "lb-bsp"
        assert environment["EVENSTEP_RUN_DIR"]
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            asked = get_args_parser().parse_args(words)
        assert (asked.nnodes, asked.node_rank, asked.nproc_per_node) == ("2", node, "1")
        assert (asked.rdzv_backend, asked.master_addr) == ("static", "first")
        assert (asked.training_script, asked.training_script_args) == ("train.py", [])
        ports.add(asked.master_port)
    assert len(ports) == 1


@pytest.mark.multiprocess
@pytest.mark.netns
def test_such_a_command_line_trains_on_two_hosts_as_one_process_does(tmp_path):
    write_script(tmp_path)
    with two_hosts() as hosts:
        addresses = {f"HOST_{number}": address for number, (_, _, address) in enumerate(hosts)}
        agents = []
        for node, host in enumerate(hosts):
            words, environment = kubernetes(node, addresses, tmp_path)
            environment |= {
                "EVENSTEP_RUN_DIR": str(tmp_path / "runs"),
                "GLOO_SOCKET_IFNAME": host[1],
                "OMP_NUM_THREADS": "1",
            }
            agents.append(Started(torchrun_on, host, tmp_path, *words, environment=environment))
        codes, said = ended(agents)
    assert codes == [0, 0], said
    trained_as_one_process_does(tmp_path, workers=2)


@pytest.mark.multiprocess
@pytest.mark.netns
def test_two_slurm_jobs_train_beside_each_other_on_two_nodes(tmp_path):
    kinds = {
        "unlike": ("--nodes=1", "--gpus-per-node=2", "--constraint=fast", ":", "--nodes=1", "--constraint=slow"),
        "alike": ("--nodes=2", "--gpus-per-node=0"),
    }
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with slurm_cluster() as cluster:
        jobs = []
        for name, options in kinds.items():
            write_script(folder := tmp_path / name)
            options = [f"--chdir={folder}", "--output=job.log", "--cpus-per-task=1", *options]
            jobs.append(cluster.submit(*options, str(DEPLOY / "slurm.sbatch"), **environment))
        codes, said = ended(jobs)
    logs = [(tmp_path / name / "job.log").read_text(encoding="utf-8") for name in kinds]
    assert codes == [0, 0], (said, logs)
    trained_as_one_process_does(tmp_path / "unlike", workers=3)
    trained_as_one_process_does(tmp_path / "alike", workers=2)


def test_a_ray_job_has_the_scheme_in_its_environment(tmp_path):
    words, _ = called((DEPLOY / "ray.sh").read_text(encoding="utf-8"), tmp_path, EVENSTEP_SCHEME="ssp:bound=3")
    options = dict(zip(words[2::2], words[3::2], strict=False))
    assert words[:2] == ["job", "submit"]
    assert json.loads(options["--runtime-env-json"])["env_vars"] == {"EVENSTEP_SCHEME": "ssp:bound=3"}
    assert words[-3:] == ["--", "python", "train.py"]


def test_the_manifests_are_what_kubernetes_takes():
    reason = "needs the schemas of Kubernetes: pip install kubernetes-validate"
    validated = pytest.importorskip("kubernetes_validate", reason=reason).validate
    for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")):
        validated(each, "1.31", strict=True)


def test_a_train_job_names_what_kubeflow_knows():
    job = yaml.safe_load((DEPLOY / "kubeflow.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"].keys() == {"runtimeRef", "trainer"}
    assert job["spec"]["trainer"].keys() <= {
        "image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode",
    }  # fmt: skip
