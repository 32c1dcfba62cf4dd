"""The YAML of docs/distributed.md: a cluster that `ray up` takes, and a RayJob that KubeRay takes.

Ray brings the schema of the one. Of the other, fields are those that KubeRay knows, of their types:
from the json tags of KubeRay's v1 types, ray-operator/apis/ray/v1/rayjob_types.go (commit 0057210) and
raycluster_types.go (026f143), for what the page uses; of a pod, what Kubernetes' core/v1 has.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"


def exactly(required: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LIMITS = exactly(
    "limits", limits={"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
)
MOUNT = exactly("name mountPath", name=TEXT, mountPath=TEXT)
CONTAINER = exactly(
    "name image", name=TEXT, image=TEXT, resources=LIMITS,
    volumeMounts={"type": "array", "items": MOUNT},
)  # fmt: skip
VOLUME = exactly("name", name=TEXT, persistentVolumeClaim=exactly("claimName", claimName=TEXT))
POD = exactly(
    "containers",
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
    volumes={"type": "array", "items": VOLUME},
)
TEMPLATE = exactly("spec", spec=POD)
HEAD = exactly("rayStartParams template", rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = exactly(
    "groupName minReplicas maxReplicas rayStartParams template", groupName=TEXT, replicas=COUNT,
    minReplicas=COUNT, maxReplicas=COUNT, rayStartParams=TEXTS, template=TEMPLATE,
)  # fmt: skip
CLUSTER = exactly(
    "headGroupSpec", headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": WORKERS}
)
SPEC = exactly(
    "", entrypoint=TEXT, shutdownAfterJobFinishes={"type": "boolean"}, backoffLimit=COUNT,
    rayClusterSpec=CLUSTER,
)  # fmt: skip
JOB = exactly(
    "apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata=exactly("name", name=TEXT), spec=SPEC,
)  # fmt: skip


def shown(name: str) -> Any:
    (text,) = re.findall(rf"```yaml\n# {name}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return yaml.safe_load(text)


def the_job() -> Any:
    return shown("flashgen.yaml")


def test_the_cluster_is_one_that_ray_up_takes() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(shown("cluster.yaml"))
    util.validate_config(config)
    assert config["available_node_types"]["h100"]["min_workers"] == config["max_workers"]
    with pytest.raises(jsonschema.ValidationError):
        util.validate_config(config | {"head_node_typ": "head"})


def test_the_job_is_one_that_kuberay_takes() -> None:
    jsonschema.validate(the_job(), JOB)


@pytest.mark.parametrize(
    ("group", "change"),
    [
        ("headGroupSpec", {"rayStartParam": {}}),
        ("headGroupSpec", {"rayStartParams": {"num-cpus": 0}}),
    ],
)
def test_a_field_that_is_misspelt_or_of_another_type_is_found(group: str, change: Any) -> None:
    job = the_job()
    job["spec"]["rayClusterSpec"][group] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, JOB)


def test_what_is_mounted_is_a_volume_of_the_pod() -> None:
    head = the_job()["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = {
        mount["name"] for each in head["containers"] for mount in each.get("volumeMounts", ())
    }
    assert mounted == {volume["name"] for volume in head["volumes"]}
