"""serve_config.yaml and k8s/rayservice.yaml say what they seem to say: Serve's own schema ignores misspelt keys, so we check them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from deployments.app import DETOKENIZER, INGRESS, SCHEDULER, build
from deployments.prepare import main, serve_configs
from overlap_serve.config import ServeConfig, parse_config
from overlap_serve.errors import ConfigError

ROOT = Path(__file__).parents[2]
SERVE_CONFIG = ROOT / "serve_config.yaml"
MANIFEST = ROOT / "k8s" / "rayservice.yaml"
CRD = ROOT.parent / "shared" / "kuberay" / "crd.yaml"
DEPLOYMENTS = {INGRESS, SCHEDULER, DETOKENIZER}


def load(file: Path) -> Any:
    return yaml.load(file.read_text(), yaml.CSafeLoader)  # 10 times as fast on the 1 MB CRD


def embedded() -> Any:
    """The Serve configuration inside the RayService."""
    return yaml.safe_load(load(MANIFEST)["spec"]["serveConfigV2"])


SERVE_DOCUMENTS = [pytest.param(load(SERVE_CONFIG), id="serve_config"), pytest.param(embedded(), id="rayservice")]


def unknown_keys(value: object, model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Keys of a document that the pydantic model, or a model nested in it, does not have."""
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{path}{key}"
            continue
        for nested in nested_models(field.annotation):
            for index, element in enumerate(item if isinstance(item, list) else [item]):
                yield from unknown_keys(
                    element, nested, f"{path}{key}[{index}]." if isinstance(item, list) else f"{path}{key}."
                )


def nested_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in nested_models(argument)]


@pytest.mark.parametrize("document", SERVE_DOCUMENTS)
def test_serve_config_is_valid_and_has_no_misspelt_key(document: dict[str, Any]) -> None:
    ServeDeploySchema.model_validate(document)
    assert list(unknown_keys(document, ServeDeploySchema)) == []


def test_a_misspelt_serve_key_is_found() -> None:
    document = copy.deepcopy(embedded())
    document["applications"][0]["deployments"][0]["max_ongoing_request"] = 512
    document["http_optoins"] = {}
    assert sorted(unknown_keys(document, ServeDeploySchema)) == [
        "applications[0].deployments[0].max_ongoing_request",
        "http_optoins",
    ]


@pytest.mark.parametrize("document", SERVE_DOCUMENTS)
def test_args_build_and_overrides_name_deployments_that_exist(document: dict[str, Any]) -> None:
    (application,) = document["applications"]
    assert application["import_path"] == "deployments.app:build"
    config = parse_config(application["args"])
    assert {entry["name"] for entry in application.get("deployments", [])} <= DEPLOYMENTS
    app = build(config.model_copy(update={"engine": "fake"}))
    assert app._bound_deployment.name == INGRESS


def test_scheduler_replica_gets_one_bundle_for_itself_and_one_gpu_bundle_for_its_rank() -> None:
    app = build(ServeConfig(engine="fake", device="cuda", scheduler_replicas=3))
    scheduler = app._bound_deployment.init_args[1]._bound_deployment
    assert scheduler.name == SCHEDULER
    assert scheduler.num_replicas == 3
    config = scheduler._deployment_config, scheduler._replica_config
    assert config[1].placement_group_bundles == [{"CPU": 0.1}, {"CPU": 1, "GPU": 1}]
    assert config[1].placement_group_strategy == "STRICT_PACK"


def test_both_files_switch_the_same_throughput_settings_on() -> None:
    local = load(SERVE_CONFIG)
    env = local["controller_options"]["runtime_env"]["env_vars"]
    assert local["applications"][0]["runtime_env"]["env_vars"] == env
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    pods = {item["name"]: item.get("value") for item in containers(load(MANIFEST))[0]["env"]}
    assert set(env) <= set(pods)


def test_head_and_workers_have_equal_serve_environments() -> None:
    environments = [
        {item["name"]: item.get("value") for item in container["env"] if item["name"].startswith("RAY_SERVE_")}
        for container in containers(load(MANIFEST))
    ]
    assert len(environments) == 2
    assert environments[0] == environments[1] != {}


def test_pods_live_longer_than_the_drain() -> None:
    manifest = load(MANIFEST)
    config = parse_config(embedded()["applications"][0]["args"])
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_timeout
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] > config.drain_timeout


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


# -- the RayService against KubeRay's own schema


def strict(schema: Any) -> Any:
    """openAPIV3Schema as a JSON schema in which an unknown field is an error, as `kubectl --validate=strict` has it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items() if key not in {"default", "required", "format"}}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
        with_default = {
            name for name, item in schema["properties"].items() if isinstance(item, dict) and "default" in item
        }
        if required := [name for name in schema.get("required", []) if name not in with_default]:
            out["required"] = required
    if schema.get("nullable") and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out


@pytest.fixture(scope="module")
def rayservice_schema() -> Any:
    if not CRD.is_file():
        pytest.skip(f"needs KubeRay's CRD at {CRD}")
    versions = {version["name"]: version for version in load(CRD)["spec"]["versions"]}
    schema = strict(versions["v1"]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def test_rayservice_matches_kuberays_crd_strictly(rayservice_schema: Any) -> None:
    jsonschema.validate(load(MANIFEST), rayservice_schema)


def test_a_misspelt_rayservice_field_is_found(rayservice_schema: Any) -> None:
    manifest = load(MANIFEST)
    manifest["spec"]["rayClusterDeletionDelaySecond"] = 1
    with pytest.raises(jsonschema.ValidationError, match="rayClusterDeletionDelaySecond"):
        jsonschema.validate(manifest, rayservice_schema)


# -- `python -m deployments.prepare`, which `make serve` runs first


def write(folder: Path, args: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"import_path": "deployments.app:build", "args": args}]}))
    return file


def test_prepare_reads_the_args_of_our_applications() -> None:
    (config,) = serve_configs(SERVE_CONFIG)
    assert config == parse_config(load(SERVE_CONFIG)["applications"][0]["args"])


def test_prepare_names_an_unknown_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path, {"modle": "x"}))]) == 2
    assert "modle: unknown field" in capsys.readouterr().err


def test_prepare_needs_nothing_for_the_fake_engine(tmp_path: Path) -> None:
    assert main([str(write(tmp_path, {"engine": "fake"}))]) == 0


@pytest.mark.parametrize("text", ["", "applications: 3", "a: [", "- 1"])
def test_prepare_refuses_files_that_are_no_serve_config(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        list(serve_configs(file))
