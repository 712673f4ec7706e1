"""What the kinds of documents may hold: KubeRay's own schema for RayService, Kubernetes' schemas from the package kubernetes-validate,
and the few fields of a PodMonitor that we use. In each an unknown field is an error, as `kubectl --validate=strict` has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

CRD = Path(__file__).parents[3] / "shared" / "kuberay" / "crd.yaml"
KUBERNETES = ("1.29", "1.37")  # the oldest that we say works, and the newest that the package knows
NO_CRD = f"needs KubeRay's CRD at {CRD}"

RELABELING = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "sourceLabels": {"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}},
        "targetLabel": {"type": "string"},
        "regex": {"type": "string"},
        "action": {"enum": ["replace", "keep", "drop", "labeldrop", "labelkeep"]},
    },
}
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"additionalProperties": {"type": "string"}}},
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                            "relabelings": {"type": "array", "items": RELABELING},
                            "metricRelabelings": {"type": "array", "items": RELABELING},
                        },
                    },
                },
            },
        },
    },
}


def has_crd() -> bool:
    return CRD.is_file()


def schema_problems(document: Any) -> tuple[str, ...]:
    """A RayService is not looked at where there is no CRD."""
    return _schema_problems(json.dumps(document))


@cache  # most documents come unchanged, over and over, and reading the schemas takes its time
def _schema_problems(text: str) -> tuple[str, ...]:
    document = json.loads(text)
    name = f"{document['kind']} {document['metadata']['name']}"
    return tuple(f"{name}: {problem}" for problem in by_kind(document))


def by_kind(document: Any) -> Iterator[str]:
    if document["kind"] == "RayService":
        yield from against(document, rayservice_schema() if has_crd() else {})
    elif document["kind"] == "PodMonitor":
        yield from against(document, POD_MONITOR)
    else:
        yield from kubernetes_problems(document)


def against(document: Any, schema: Any) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        yield f"{error.json_path}: {error.message}"


def kubernetes_problems(document: Any) -> Iterator[str]:
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {error.json_path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield error.message


@cache
def rayservice_schema() -> Any:
    document = yaml.load(CRD.read_text(), yaml.CSafeLoader)  # 10 times as fast on 1 MB
    versions = {version["name"]: version for version in document["spec"]["versions"]}
    schema = strict(versions["v1"]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def strict(schema: Any) -> Any:
    """openAPIV3Schema as a JSON schema in which an unknown field is an error, and a field with a default is optional."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {key: strict(value) for key, value in schema.items() if key not in {"default", "required", "format"}}
    if "properties" in schema:
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
        defaults = {name for name, item in schema["properties"].items() if isinstance(item, dict) and "default" in item}
        if required := [name for name in schema.get("required", []) if name not in defaults]:
            out["required"] = required
    if schema.get("nullable") and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out
