"""Manifests for Kubernetes, against a schema of their objects; with `kubernetes-validate`, Kubernetes' own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml

from paceline.cli.launch import _around, _load
from paceline.world.discover.environment import discover
from paceline.world.launch.schedulers.job import join
from paceline.world.launch.schedulers.kubernetes import Kind, Pods, manifest, object_name
from tests.world.launch.schedulers.test_script import GOLDEN, JOB, SMALLEST

TEXT, COUNT, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
LABEL = {"type": "string", "pattern": r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"}
HOST = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}


def exactly(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    fields = {**required, **optional}
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def several(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


LABELS = {"type": "object", "additionalProperties": LABEL}
META = exactly({"name": HOST, "labels": LABELS}, namespace=HOST)
AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(Mi)?$"}}
SECRET_KEY = exactly({"secretKeyRef": exactly({"name": HOST, "key": TEXT})})
OWN_FIELD = exactly({"fieldRef": exactly({"fieldPath": {"enum": ["status.podIP"]}})})
CONTAINER = exactly(
    {
        "name": HOST,
        "image": TEXT,
        "command": several(TEXT),
        "env": several(
            {
                "oneOf": [
                    exactly({"name": TEXT, "value": TEXT}),
                    exactly({"name": TEXT, "valueFrom": {"oneOf": [SECRET_KEY, OWN_FIELD]}}),
                ]
            }
        ),
        "volumeMounts": several(exactly({"name": HOST, "mountPath": TEXT})),
    },
    envFrom=several(exactly({"secretRef": exactly({"name": HOST})})),
    resources=exactly({"requests": AMOUNTS, "limits": AMOUNTS}),
)
VOLUME = exactly(
    {"name": HOST},
    emptyDir=exactly({"medium": {"const": "Memory"}}),
    persistentVolumeClaim=exactly({"claimName": TEXT}),
)
POD = {"containers": several(CONTAINER), "volumes": several(VOLUME), "terminationGracePeriodSeconds": COUNT}
RESTARTS = {"enum": ["OnFailure", "Never"]}
TEMPLATE_META = exactly({"labels": LABELS})
REPLICAS = exactly(
    {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": RESTARTS,
        "template": exactly({"metadata": TEMPLATE_META, "spec": exactly(POD, serviceAccountName=HOST)}),
    }
)
SCHEMAS = {
    "Secret": exactly(
        {"apiVersion": {"const": "v1"}, "kind": TEXT, "metadata": META, "stringData": {"type": "object"}}
    ),
    "Service": exactly(
        {
            "apiVersion": {"const": "v1"},
            "kind": TEXT,
            "metadata": META,
            "spec": exactly(
                {
                    "clusterIP": {"const": "None"},
                    "publishNotReadyAddresses": YES,
                    "selector": LABELS,
                    "ports": several(exactly({"name": HOST, "port": COUNT})),
                }
            ),
        }
    ),
    "Job": exactly(
        {
            "apiVersion": {"const": "batch/v1"},
            "kind": TEXT,
            "metadata": META,
            "spec": exactly(
                {
                    "completions": COUNT,
                    "parallelism": COUNT,
                    "completionMode": {"const": "Indexed"},
                    "backoffLimit": COUNT,
                    "template": exactly(
                        {
                            "metadata": TEMPLATE_META,
                            "spec": exactly(
                                {**POD, "subdomain": HOST, "restartPolicy": RESTARTS}, serviceAccountName=HOST
                            ),
                        }
                    ),
                },
                activeDeadlineSeconds=COUNT,
            ),
        }
    ),
    "PyTorchJob": exactly(
        {
            "apiVersion": {"const": "kubeflow.org/v1"},
            "kind": TEXT,
            "metadata": META,
            "spec": exactly(
                {
                    "runPolicy": exactly(
                        {"cleanPodPolicy": {"enum": ["None", "Running", "All"]}, "backoffLimit": COUNT},
                        activeDeadlineSeconds=COUNT,
                    ),
                    "pytorchReplicaSpecs": exactly({"Master": REPLICAS}, Worker=REPLICAS),
                }
            ),
        }
    ),
}
COMMAND = ("train", "asr", "--out", "s3://bucket/quartz net", "--resume", "auto")
PODS = Pods(
    "registry/me/paceline:1", "job", "speech", ("runs", "/runs"), ("aws", "wandb"), "nvidia.com/gpu", "trainer", 75
)


def objects(kind: Kind, job: Any = JOB, pods: Pods = PODS) -> dict[str, dict[str, Any]]:
    text = manifest(replace(job, command=COMMAND), replace(pods, kind=kind), "secret" * 8)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_the_manifest_is_the_golden_one(kind):
    text = manifest(replace(JOB, command=COMMAND), replace(PODS, kind=kind), "secret" * 8)
    assert text == (GOLDEN / f"k8s-{kind}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
@pytest.mark.parametrize(("job", "pods"), [(JOB, PODS), (SMALLEST, Pods("image"))])
def test_objects_have_what_their_schema_allows(kind, job, pods):
    made = objects(kind, job, pods)
    assert set(made) == ({"Secret", "Service", "Job"} if kind == "job" else {"Secret", "PyTorchJob"})
    for name, value in made.items():
        jsonschema.validate(value, SCHEMAS[name])


def test_objects_are_valid_for_kubernetes_itself():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for value in objects("job").values():
        validate.validate(value, validate.latest_version(), strict=True)
    pod = objects("pytorchjob")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"], "spec": pod["spec"]}
    validate.validate(whole, validate.latest_version(), strict=True)


def test_pods_of_a_job_find_each_other():
    made = objects("job")
    spec = made["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (4, 4, 129_600)
    pod = spec["template"]["spec"]
    assert made["Service"]["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == made["Service"]["metadata"]["name"] == "quartznet"
    (container,) = pod["containers"]
    *setup, line = container["command"][-1].splitlines()
    assert setup == ["module load cuda"]
    assert line == (
        'exec paceline launch --nproc-per-node 8 --nnodes 4 --node-rank "$JOB_COMPLETION_INDEX" '
        "--master-addr quartznet-0.quartznet --master-port 29500 --grace-s 120 --stopped-code 75 -- "
        "train asr --out 's3://bucket/quartz net' --resume auto"
    )
    assert container["resources"]["limits"] == {"cpu": "48", "memory": "65536Mi", "nvidia.com/gpu": "8"}
    assert {"name": "PACELINE_LISTEN", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
    assert made["Secret"]["stringData"] == {"PACELINE_SECRET": "secret" * 8}


def test_pods_of_a_pytorchjob_are_told_by_its_operator():
    """The command of each pod, with the variables that the operator sets, is the launcher of its machine."""
    specs = objects("pytorchjob")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert (specs["Master"]["replicas"], specs["Worker"]["replicas"]) == (1, 3)
    line = specs["Worker"]["template"]["spec"]["containers"][0]["command"][-1].splitlines()[-1]
    words = line.removeprefix("exec paceline launch ").partition(" -- ")[0].split()
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "m",
        "MASTER_PORT": "1",
        "PET_NODE_RANK": "3",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NNODES": "4",
    }
    options = _load(words, ["train", "digits"], _around(pod))
    assert (options.nnodes, options.nproc_per_node) == (4, 8)
    assert discover(pod).rank == 3


@pytest.mark.parametrize(
    ("text", "name"),
    [("quartznet_15x5", "quartznet-15x5"), ("2026-run", "p-2026-run"), ("Ä", "paceline"), ("a" * 80, "a" * 52)],
)
def test_names_that_kubernetes_takes(text, name):
    assert object_name(text) == name


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a command or a value: `$(NAME)` is a variable if there is one, `$$` is `$`."""
    return re.sub(
        r"\$(\$|\((.*?)\))", lambda match: "$" if match[1] == "$" else variables.get(match[2], match[0]), text
    )


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_kubernetes_leaves_words_and_values_as_they_are(kind):
    """Before, `a$$b` arrived as `a$b`, and `$(HOME)` as a folder, also inside of quotes."""
    texts = ["$$", "$(HOME)", "$$(HOME)", "$HOME", "a$$$b", "x$", "$(od -An)", "'$$'\n: {evil}", "#$ -q x"]
    job = replace(JOB, setup=tuple(texts), environment=tuple((f"V{number}", text) for number, text in enumerate(texts)))
    text = manifest(replace(job, command=("train", *texts)), replace(PODS, kind=kind), "secret" * 8)
    *_, last = yaml.safe_load_all(text)
    pod = last["spec"]["template"] if kind == "job" else last["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = pod["spec"]["containers"]
    known = {"HOME": "/root"}
    assert [expanded(each["value"], known) for each in container["env"] if "value" in each] == texts
    shell = expanded(container["command"][-1], known)
    assert shell.startswith("\n".join(texts))
    assert f" -- train {join(texts)}" in shell
