"""serve_config.yaml says what it seems to say: Serve's own schema ignores misspelt keys, so we check them. And
`python -m deployments.prepare`, which reads such files before Ray starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.app import INGRESS, SCHEDULER, build
from deployments.prepare import main, serve_configs
from overlap_serve.config import ServeConfig, parse_config
from overlap_serve.errors import ConfigError
from tests.k8s.rules import SWITCHES, unknown_keys
from tests.k8s.view import DEPLOYMENTS

SERVE_CONFIG = Path(__file__).parents[2] / "serve_config.yaml"


def load() -> Any:
    return yaml.safe_load(SERVE_CONFIG.read_text())


def test_serve_config_is_valid_and_has_no_misspelt_key() -> None:
    ServeDeploySchema.model_validate(load())
    assert list(unknown_keys(load(), ServeDeploySchema)) == []


def test_a_misspelt_serve_key_is_found() -> None:
    document = copy.deepcopy(load())
    document["applications"][0]["deployments"] = [{"name": INGRESS, "max_ongoing_request": 512}]
    document["http_optoins"] = {}
    assert sorted(unknown_keys(document, ServeDeploySchema)) == [
        "applications[0].deployments[0].max_ongoing_request",
        "http_optoins",
    ]


def test_args_build_and_overrides_name_deployments_that_exist() -> None:
    [application] = load()["applications"]
    assert application["import_path"] == "deployments.app:build"
    config = parse_config(application["args"])
    assert {entry["name"] for entry in application.get("deployments", [])} <= DEPLOYMENTS
    assert build(config.model_copy(update={"engine": "fake"}))._bound_deployment.name == INGRESS


def test_scheduler_replica_gets_one_bundle_for_itself_and_one_gpu_bundle_for_its_rank() -> None:
    app = build(ServeConfig(engine="fake", device="cuda", scheduler_replicas=3))
    scheduler = app._bound_deployment.init_args[1]._bound_deployment
    assert scheduler.name == SCHEDULER
    assert scheduler.num_replicas == 3
    config = scheduler._replica_config
    assert config.placement_group_bundles == [{"CPU": 0.1}, {"CPU": 1, "GPU": 1}]
    assert config.placement_group_strategy == "STRICT_PACK"


def test_the_throughput_switches_are_on_and_equal_in_both_places() -> None:
    env = load()["controller_options"]["runtime_env"]["env_vars"]
    assert load()["applications"][0]["runtime_env"]["env_vars"] == env
    assert SWITCHES.items() <= env.items()


# -- `python -m deployments.prepare`, which `make serve` runs first


def write(folder: Path, args: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"import_path": "deployments.app:build", "args": args}]}))
    return file


def test_prepare_reads_the_args_of_our_applications() -> None:
    [config] = serve_configs(SERVE_CONFIG)
    assert config == parse_config(load()["applications"][0]["args"])


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
