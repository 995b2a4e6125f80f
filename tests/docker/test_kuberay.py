"""The KubeRay manifest against the schema of its resource, without a cluster.

The schema holds what KubeRay's types of ray.io/v1 and Kubernetes' of core/v1 say of the fields that such a manifest needs.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jsonschema
import pytest
import yaml

from rstar2_megatron.settings.load import load
from tests.e2e.runs import ROOT

TEXT, WHOLE, FLAG, WORDS = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
)
NAMED = {"type": "object", "additionalProperties": {"type": "string"}}
ANY, LIST = {"type": "object"}, {"type": "array", "items": {"type": "object"}}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def items(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


ENV = closed("name", name=TEXT, value=TEXT, valueFrom=ANY)
MOUNT = closed("name mountPath", name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=FLAG)
CAPABILITIES = closed(add=WORDS, drop=WORDS)
CONTAINER = closed(
    "name",
    name=TEXT,
    image=TEXT,
    imagePullPolicy={"enum": ["Always", "Never", "IfNotPresent"]},
    command=WORDS,
    args=WORDS,
    workingDir=TEXT,
    env=items(ENV),
    envFrom=LIST,
    ports=LIST,
    resources=closed(limits=QUANTITIES, requests=QUANTITIES),
    securityContext=closed(privileged=FLAG, capabilities=CAPABILITIES, runAsUser=WHOLE, seccompProfile=ANY),
    volumeMounts=items(MOUNT),
    lifecycle=ANY,
)
VOLUME = closed(
    "name",
    name=TEXT,
    persistentVolumeClaim=closed("claimName", claimName=TEXT, readOnly=FLAG),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit={"type": ["integer", "string"]}),
    hostPath=closed("path", path=TEXT, type=TEXT),
    configMap=ANY,
    secret=ANY,
)
POD = closed(
    "containers",
    containers=items(CONTAINER),
    initContainers=items(CONTAINER),
    volumes=items(VOLUME),
    nodeSelector=NAMED,
    tolerations=LIST,
    affinity=ANY,
    hostNetwork=FLAG,
    dnsPolicy=TEXT,
    serviceAccountName=TEXT,
    imagePullSecrets=LIST,
)
TEMPLATE = closed(metadata=closed(annotations=NAMED, labels=NAMED), spec=POD)
HEAD = closed("rayStartParams template", serviceType=TEXT, enableIngress=FLAG, rayStartParams=NAMED, template=TEMPLATE)
GROUP = closed(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=WHOLE,
    numOfHosts=WHOLE,
    rayStartParams=NAMED,
    template=TEMPLATE,
)
CLUSTER = closed(
    "headGroupSpec",
    headGroupSpec=HEAD,
    workerGroupSpecs=items(GROUP),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    suspend=FLAG,
)
JOB = closed(
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    backoffLimit=WHOLE,
    activeDeadlineSeconds=WHOLE,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=WHOLE,
    runtimeEnvYAML=TEXT,
    suspend=FLAG,
    rayClusterSpec=CLUSTER,
)
SCHEMA = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed("name", name=TEXT, namespace=TEXT, labels=NAMED, annotations=NAMED),
    spec=JOB,
)


def head_of(job: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    return template


@pytest.fixture
def manifest() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "kuberay.yaml").read_text())
    return copy.deepcopy(read)


def test_the_manifest_is_valid(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(backofLimit=3),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"][0].update(
            value=0
        ),
    ],
)
def test_a_wrong_field_is_noticed(manifest: dict[str, Any], spoil: Callable[[dict[str, Any]], object]) -> None:
    spoil(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_the_pods_fit_the_configuration_that_the_entrypoint_names(manifest: dict[str, Any]) -> None:
    job = manifest["spec"]
    cluster = job["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(group["template"]["spec"] for group in cluster["workerGroupSpecs"])]
    containers = [pod["containers"][0] for pod in pods]
    words = shlex.split(job["entrypoint"].split("bash run_rstar2.sh ")[1])
    settings = load(words[0], words[1:]).settings
    assert settings.cluster.num_nodes == len(pods)
    ranks = [{entry["name"]: entry["value"] for entry in container["env"]}["RLINF_NODE_RANK"] for container in containers]
    assert ranks == [str(rank) for rank in range(len(pods))]
    assert cluster["rayVersion"] == version("ray")
    image = (ROOT / "docker" / "train.Dockerfile").read_text()
    for pod, container in zip(pods, containers, strict=True):
        assert re.search(rf"^WORKDIR {container['workingDir']}$", image, re.MULTILINE)
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
