"""Kubernetes objects of a job: an indexed Job with its Service, or a PyTorchJob of Kubeflow. Pure functions.

Each pod is a machine: its `paceline launch` starts the ranks there and finds the others. In a Job by the number of the
pod and the name of the first one, in a PyTorchJob by the variables that the operator sets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from paceline.world.launch.schedulers.job import BatchJob, join
from paceline.world.rendezvous.secret import VARIABLE
from paceline.world.rendezvous.server import LISTEN

Kind = Literal["job", "pytorchjob"]
PORT = 29500
_MAX_NAME = 52
"""Letters of a Job's name: those of its pods have the index and five letters more, and must be names of hosts."""


@dataclass(frozen=True)
class Pods:
    """Facts that a cluster needs besides the job."""

    image: str
    kind: Kind = "job"
    namespace: str | None = None
    volume: tuple[str, str] | None = None
    """Claim of a volume that all pods share, and where it is mounted."""
    secret_refs: tuple[str, ...] = ()
    """Secrets of the cluster whose keys become variables: credentials of a store."""
    gpu_resource: str = "nvidia.com/gpu"
    service_account: str | None = None
    stopped_code: int = 0
    """Exit code of pods whose run was told to stop, and has saved. Kubernetes takes 0 for done, and a pod that is done
    is not started again."""


def object_name(text: str) -> str:
    """Return a name that objects, pods and hosts may have."""
    plain = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:_MAX_NAME].strip("-") or "paceline"
    return plain if plain[0].isalpha() else f"p-{plain}"[:_MAX_NAME]


def literal(text: str) -> str:
    """Return a text that Kubernetes leaves as it is: it puts values in place of `$(NAME)`, and `$` in place of `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def manifest(job: BatchJob, pods: Pods, secret: str) -> str:
    """Return the YAML for `kubectl apply`. `secret` is what ranks know each other by: a new one for every job."""
    name = object_name(job.name)
    objects = [_secret(name, secret)]
    objects += [_service(name), _job(name, job, pods)] if pods.kind == "job" else [_pytorchjob(name, job, pods)]
    for each in objects:
        if pods.namespace is not None:
            each["metadata"]["namespace"] = pods.namespace
    return yaml.safe_dump_all(objects, sort_keys=False, width=120, allow_unicode=True)


def _meta(name: str) -> dict[str, Any]:
    return {"name": name, "labels": {"app.kubernetes.io/managed-by": "paceline", "paceline/job": name}}


def _secret(name: str, secret: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _meta(name), "stringData": {VARIABLE: secret}}


def _service(name: str) -> dict[str, Any]:
    """The Service without an address of its own, by which pods have names: `<job>-0.<job>`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # launchers meet before anything is ready
            "selector": {"paceline/job": name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }


def _job(name: str, job: BatchJob, pods: Pods) -> dict[str, Any]:
    launch = ["paceline", "launch", "--nproc-per-node", str(job.procs_per_node), "--nnodes", str(job.nodes)]
    line = f'exec {join(launch)} --node-rank "$JOB_COMPLETION_INDEX" --master-addr {name}-0.{name}'
    line += f" --master-port {PORT} {join(_leaving(job, pods))} -- {join(job.command)}"
    spec: dict[str, Any] = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 10 * job.nodes if job.requeue else 0,
    }
    if job.time_s is not None:
        spec["activeDeadlineSeconds"] = job.time_s
    spec["template"] = {
        "metadata": {"labels": _meta(name)["labels"]},
        "spec": {
            "subdomain": name,
            "restartPolicy": "OnFailure" if job.requeue else "Never",
            **_pod(name, "paceline", line, job, pods),
        },
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(name), "spec": spec}


def _leaving(job: BatchJob, pods: Pods) -> list[str]:
    """Return the options that say how the ranks of a pod end which is told to leave."""
    code = ["--stopped-code", str(pods.stopped_code)] if pods.stopped_code else []
    return ["--grace-s", str(job.signal_s), *code]


def _pytorchjob(name: str, job: BatchJob, pods: Pods) -> dict[str, Any]:
    launch = ["paceline", "launch", "--nproc-per-node", str(job.procs_per_node), *_leaving(job, pods)]
    line = f"exec {join([*launch, '--', *job.command])}"

    def replicas(number: int) -> dict[str, Any]:
        return {
            "replicas": number,
            "restartPolicy": "OnFailure" if job.requeue else "Never",
            "template": {
                "metadata": {"labels": _meta(name)["labels"]},
                "spec": _pod(name, "pytorch", line, job, pods),  # the operator looks for a container of this name
            },
        }

    specs = {"Master": replicas(1)}
    if job.nodes > 1:
        specs["Worker"] = replicas(job.nodes - 1)
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": 10 * job.nodes if job.requeue else 0}
    if job.time_s is not None:
        policy["activeDeadlineSeconds"] = job.time_s
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": specs}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _meta(name), "spec": spec}


def _pod(name: str, container: str, line: str, job: BatchJob, pods: Pods) -> dict[str, Any]:
    shell = literal("\n".join([*job.setup, line]))
    variables: list[Mapping[str, Any]] = [{"name": key, "value": literal(value)} for key, value in job.environment]
    variables.append({"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": VARIABLE}}})
    # The first launcher serves at its own address: its name is known to the cluster's name server only a while later.
    variables.append({"name": LISTEN, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    amounts: dict[str, Any] = {}
    if job.cpus_per_rank is not None:
        amounts["cpu"] = str(job.cpus_per_rank * job.procs_per_node)
    if job.memory_mib is not None:
        amounts["memory"] = f"{job.memory_mib}Mi"
    if job.gpus_per_node:
        amounts[pods.gpu_resource] = str(job.gpus_per_node)
    main: dict[str, Any] = {
        "name": container,
        "image": pods.image,
        "command": ["/bin/bash", "-c", shell],
        "env": variables,
        # Loader workers hand batches over in shared memory, of which a container has 64 MB.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if pods.secret_refs:
        main["envFrom"] = [{"secretRef": {"name": each}} for each in pods.secret_refs]
    if amounts:
        main["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": job.signal_s,
        "containers": [main],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if pods.volume is not None:
        claim, path = pods.volume
        main["volumeMounts"].append({"name": "runs", "mountPath": path})
        spec["volumes"].append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    if pods.service_account is not None:
        spec["serviceAccountName"] = pods.service_account
    return spec
