"""Contents of a JobSet: field names and types of the public APIs, for templates that no cluster is there to check.

JobSet v1alpha2: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/; Job and Pod: https://kubernetes.io/docs/reference/kubernetes-api/.
Fields that no manifest of ours is likely to have are listed too, so that only what the API does not know is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANY = object()
TEXTS = {"*": str}
META = {"name": str, "generateName": str, "namespace": str, "labels": TEXTS, "annotations": TEXTS, "finalizers": [str]}
QUANTITIES = {"*": (int, str)}
PROBE = ANY
VOLUME_MOUNT = {"name": str, "mountPath": str, "subPath": str, "readOnly": bool, "mountPropagation": str, "subPathExpr": str}
CONTAINER = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [{"name": str, "value": str, "valueFrom": ANY}],
    "envFrom": [ANY],
    "ports": [{"name": str, "containerPort": int, "hostPort": int, "hostIP": str, "protocol": str}],
    "resources": {"limits": QUANTITIES, "requests": QUANTITIES, "claims": [ANY]},
    "volumeMounts": [VOLUME_MOUNT],
    "volumeDevices": [ANY],
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "startupProbe": PROBE,
    "lifecycle": ANY,
    "securityContext": ANY,
    "stdin": bool,
    "stdinOnce": bool,
    "tty": bool,
    "terminationMessagePath": str,
    "terminationMessagePolicy": str,
    "restartPolicy": str,
}
POD = {
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": [ANY],
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "activeDeadlineSeconds": int,
    "dnsPolicy": str,
    "dnsConfig": ANY,
    "nodeSelector": TEXTS,
    "nodeName": str,
    "serviceAccountName": str,
    "automountServiceAccountToken": bool,
    "hostNetwork": bool,
    "hostPID": bool,
    "hostIPC": bool,
    "hostname": str,
    "subdomain": str,
    "setHostnameAsFQDN": bool,
    "affinity": ANY,
    "schedulerName": str,
    "tolerations": [ANY],
    "hostAliases": [ANY],
    "priorityClassName": str,
    "priority": int,
    "preemptionPolicy": str,
    "imagePullSecrets": [ANY],
    "securityContext": ANY,
    "enableServiceLinks": bool,
    "topologySpreadConstraints": [ANY],
    "runtimeClassName": str,
    "shareProcessNamespace": bool,
    "schedulingGates": [ANY],
    "resourceClaims": [ANY],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "backoffLimitPerIndex": int,
    "maxFailedIndexes": int,
    "podFailurePolicy": ANY,
    "successPolicy": ANY,
    "podReplacementPolicy": str,
    "activeDeadlineSeconds": int,
    "ttlSecondsAfterFinished": int,
    "suspend": bool,
    "selector": ANY,
    "manualSelector": bool,
    "template": {"metadata": META, "spec": POD},
}
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "replicatedJobs": [
            {"name": str, "groupName": str, "replicas": int, "template": {"metadata": META, "spec": JOB}, "dependsOn": [ANY]}
        ],
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": [ANY]},
        "startupPolicy": {"startupPolicyOrder": str},
        "suspend": bool,
        "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
        "managedBy": str,
        "ttlSecondsAfterFinished": int,
    },
}


def faults(manifest: Any) -> list[str]:
    """The faults that a JobSet controller would refuse: unknown fields, wrong types, and rules between fields."""
    found = [*_unknown(manifest, JOBSET, "")]
    if found:
        return found
    if (manifest["apiVersion"], manifest["kind"]) != ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        found.append(f"{manifest['apiVersion']} {manifest['kind']}")
    for job in manifest["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        # <JobSet>-<replicated job>-<index of the job>-<index of the pod>-<5 characters>, a DNS label
        name = f"{manifest['metadata']['name']}-{job['name']}-{job['replicas'] - 1}-{spec['completions'] - 1}-abcde"
        if len(name) > 63:
            found.append(f"pods would be named {name}")
        if pod["restartPolicy"] not in ("Never", "OnFailure"):
            found.append(f"restartPolicy {pod['restartPolicy']} of a Job")
        if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
            found.append("pods on the host's network that cannot resolve the names of others")
        found += [f"container {one['name']} has no image" for one in pod["containers"] if not one.get("image")]
    return found


def _unknown(value: Any, expected: Any, path: str) -> Iterator[str]:
    if expected is ANY:
        return
    if isinstance(expected, list):
        if not isinstance(value, list):
            yield f"{path}: not a list"
            return
        for number, one in enumerate(value):
            yield from _unknown(one, expected[0], f"{path}[{number}]")
    elif isinstance(expected, dict):
        if not isinstance(value, dict):
            yield f"{path}: not an object"
            return
        for name, one in value.items():
            if name not in expected and "*" not in expected:
                yield f"{path}.{name}: no such field"
            else:
                yield from _unknown(one, expected.get(name, expected.get("*")), f"{path}.{name}")
    elif not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        yield f"{path}: {value!r}"
