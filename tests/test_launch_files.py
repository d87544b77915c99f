"""scripts/launch/: torchrun on one machine and on two is run, the rest is checked for its
syntax.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from socket import socket

import pytest
import tyro
from layout_runs import ROOT, train

LAUNCH = ROOT / "scripts" / "launch"
SHELL = ["one_machine.sh", "two_machines.sh", "slurm.sbatch", "trn1.sh", "trn2.sh"]
SMALL = ("--steps", "2", "--batch-size", "4", "--micro-batch-size", "1", "--seq-len", "32")
SMALL += ("--device", "cpu", "--dtype", "fp32")

# What sbatch, and the training operator's PyTorchJob with a pod's spec, call things.
SBATCH_OPTIONS = {
    *("job-name", "nodes", "gpus-per-node", "cpus-per-task", "partition", "time", "requeue"),
    *("ntasks-per-node", "signal", "output"),
}
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "namespace", "labels"},
    "spec": {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs", "elasticPolicy"},
    "runPolicy": {"cleanPodPolicy", "backoffLimit", "ttlSecondsAfterFinished", "suspend"},
    "replicas": {"replicas", "restartPolicy", "template"},
    "pod": {"containers", "volumes", "terminationGracePeriodSeconds", "nodeSelector"},
    "container": {
        *("name", "image", "workingDir", "command", "args", "env"),
        *("resources", "volumeMounts"),
    },
    "volume": {"name", "persistentVolumeClaim", "emptyDir"},
}


def command(name: str, *arguments, path=(), **variables) -> dict:
    """Arguments of subprocess for one of the files, with this Python's torchrun on the path."""
    places = [*map(str, path), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "PATH": ":".join(places)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return {"args": ["bash", LAUNCH / name, *map(str, arguments)], "env": environment, **pipes}


def free_port() -> str:
    with closing(socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def fake(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def data(tmp_path):
    """Flags of a short run on four rows."""
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"input_ids": list(range(n, n + 32))}) for n in range(4)]
    path.write_text("\n".join(rows) + "\n")
    return (*SMALL, "--data", path)


def losses(out: Path) -> list[float]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_one_machine_and_two(tmp_path, data):
    """Red when torchrun's options in a file are wrong, or two agents do not become one job: four
    processes on one machine, and two on each of two agents, train alike.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    run = subprocess.run(
        **command("one_machine.sh", *data, "--tp", 2, "--out", one, PROCESSES="4"), timeout=180
    )
    assert run.returncode == 0, run.stdout
    settings = {"HOST": "127.0.0.1", "PORT": free_port(), "PROCESSES": "2"}
    line = command("two_machines.sh", *data, "--tp", 2, "--out", two, **settings)
    machines = [subprocess.Popen(**line), subprocess.Popen(**line)]
    try:
        outputs = [machine.communicate(timeout=180)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sum("4 ranks = dp 2 x sp 1 x tp 2" in output for output in outputs) == 1
    assert len(losses(one)) == 2 and losses(two) == pytest.approx(losses(one), rel=1e-6)


def test_slurm(tmp_path, data):
    """Red when the batch file does not start what it should with the variables that SLURM sets, or
    has a directive that sbatch does not know.
    """
    fake(tmp_path, "scontrol", 'test "$*" = "show hostnames node[1-1]" && echo 127.0.0.1')
    fake(tmp_path, "srun", 'exec "$@"')
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
    }
    out = tmp_path / "out"
    line = command("slurm.sbatch", *data, "--out", out, path=[tmp_path], PORT=free_port(), **job)
    run = subprocess.run(**line, timeout=180)
    assert run.returncode == 0 and len(losses(out)) == 2, run.stdout

    text = (LAUNCH / "slurm.sbatch").read_text()
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    names = [re.fullmatch(r"--([a-z-]+)(=\S+)?", directive).group(1) for directive in directives]
    assert set(names) == SBATCH_OPTIONS and len(names) == len(set(names))
    commands = [n for n, text in enumerate(text.splitlines()) if text and text[0] != "#"]
    last = max(n for n, text in enumerate(text.splitlines()) if text.startswith("#SBATCH"))
    assert last < min(commands)  # sbatch reads no directive after a command


@pytest.mark.parametrize("name", SHELL)
def test_shell_syntax(name):
    """Red when bash cannot read a file."""
    check = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("name, device", [("trn1.sh", "xla"), ("trn2.sh", "neuron")])
def test_trainium(tmp_path, name, device):
    """Red when the command line for Trainium is not one that torchrun and train.py read, or a
    variable is set that train.py refuses.
    """
    fake(tmp_path, "torchrun", 'printf "%s\\n" "$@"; env | grep ^XLA_ || true')
    line = command(name, "--tp", 4, path=[tmp_path], PROCESSES="8", XLA_USE_BF16="0")
    words = subprocess.run(**line, timeout=60).stdout.split("\n")
    script = words.index("scripts/train.py")
    options = dict(zip(words[:script:2], words[1:script:2]))
    assert options["--nproc_per_node"] == "8" and options["--nnodes"] == "1"
    config = tyro.cli(
        train.TrainConfig, args=[w for w in words[script + 1 :] if w[:3] != "XLA"][:-1]
    )
    assert (config.device, config.tp) == (device, 4)


def check_names(found: dict, kind: str) -> None:
    assert set(found) <= FIELDS[kind], f"{kind}: {set(found) - FIELDS[kind]}"


def test_kubernetes():
    """Red when the manifest has a field that a PyTorchJob has not, or passes flags that train.py
    does not read.
    """
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check_names(job, "")
    check_names(job["metadata"], "metadata")
    spec = job["spec"]
    check_names(spec, "spec")
    check_names(spec["runPolicy"], "runPolicy")
    assert isinstance(spec["nprocPerNode"], str)
    assert set(spec["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    for replicas in spec["pytorchReplicaSpecs"].values():
        check_names(replicas, "replicas")
        assert set(replicas["template"]) == {"spec"}
        pod = replicas["template"]["spec"]
        check_names(pod, "pod")
        (container,) = pod["containers"]
        check_names(container, "container")
        assert container["name"] == "pytorch"
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
        for volume in pod["volumes"]:
            check_names(volume, "volume")
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert container["command"][:2] == ["torchrun", "scripts/train.py"]
        config = tyro.cli(train.TrainConfig, args=container["command"][2:])
        assert config.resume and config.tp == 8
    assert spec["pytorchReplicaSpecs"]["Master"]["replicas"] == 1


def test_every_line_to_change_is_marked():
    """Red when a file says nowhere what a user must change."""
    files = [path for path in LAUNCH.iterdir() if path.is_file()]
    assert sorted(path.name for path in files) == sorted([*SHELL, "kubernetes.yaml"])
    for path in files:
        assert len(re.findall(r"# change[:,]", path.read_text())) >= 2, path.name
