"""`api_keys_file` and `admin_api_keys_file`: keys that stand in no configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments.app import build
from deployments.key_files import with_key_files
from deployments.prepare import main
from overlap_serve.config import ServeConfig
from overlap_serve.errors import ConfigError


def config(tmp_path: Path, text: str, **fields: object) -> ServeConfig:
    (tmp_path / "keys").write_text(text)
    return ServeConfig.model_validate({"engine": "fake", "api_keys_file": str(tmp_path / "keys"), **fields})


def test_one_key_a_line_beside_the_keys_of_the_configuration(tmp_path: Path) -> None:
    read = with_key_files(config(tmp_path, "# ours\nk1\n\n  k2  \r\nk3", api_keys=["k0"]))
    assert read.api_keys == ("k0", "k1", "k2", "k3")
    assert read.admin_api_keys == ()


def test_admin_keys_have_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("a1\n")
    read = with_key_files(config(tmp_path, "k1", admin_api_keys_file=str(tmp_path / "admin")))
    assert (read.api_keys, read.admin_api_keys) == (("k1",), ("a1",))


def test_the_application_is_built_with_them(tmp_path: Path) -> None:
    ingress = build(config(tmp_path, "k1"))._bound_deployment
    assert ingress.init_args[0].api_keys == ("k1",)


@pytest.mark.parametrize("text", ["", "\n \n", "# only a comment\n"])
def test_a_file_without_a_key_lets_nobody_in_by_mistake(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^api_keys_file: .*keys holds no key; put one on a line"):
        build(config(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^admin_api_keys_file: /nowhere/keys cannot be read: No such file"):
        build(ServeConfig(engine="fake", admin_api_keys_file="/nowhere/keys"))


def test_a_binary_file_is_named(tmp_path: Path) -> None:
    made = config(tmp_path, "k")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        with_key_files(made)


def test_prepare_finds_it_before_ray_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"engine": "fake", "api_keys_file": "/nowhere/keys"}
    document = {"applications": [{"import_path": "deployments.app:build", "args": args}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(document))
    assert main([str(tmp_path / "c.yaml")]) == 2
    assert "api_keys_file: /nowhere/keys cannot be read" in capsys.readouterr().err
