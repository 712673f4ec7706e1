"""API keys from files: `api_keys_file` and `admin_api_keys_file`, where a Secret of Kubernetes or a password manager puts them.

So no key stands in serve_config.yaml, nor in what Serve and KubeRay store and show of it. Read where the application is built,
once per deploy: a changed file counts from the next deploy on.
"""

from __future__ import annotations

from pathlib import Path

from overlap_serve.config import ServeConfig
from overlap_serve.errors import ConfigError


def with_key_files(config: ServeConfig) -> ServeConfig:
    """The configuration with the files' keys added to `api_keys` and `admin_api_keys`.

    Raises ConfigError naming field and file; a file without a key is one, because no key at all lets everybody in.
    """
    return config.model_copy(
        update={
            "api_keys": config.api_keys + keys_of("api_keys_file", config.api_keys_file),
            "admin_api_keys": config.admin_api_keys + keys_of("admin_api_keys_file", config.admin_api_keys_file),
        }
    )


def keys_of(field: str, file: str | None) -> tuple[str, ...]:
    """One key a line; blank lines and lines that begin with `#` do not count. None: no file, no keys. Raises ConfigError."""
    if file is None:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error.strerror}; on every node it must be there") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{field}: {file} is not text in UTF-8") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"{field}: {file} holds no key; put one on a line, or leave {field} out to let everybody in")
    return keys
