"""`python -m deployments.run serve_config.yaml`: what `serve run` does, for people and for supervisors such as systemd and Docker.

                          serve run                          here
    wrong file, no model  a line among others; stays up      the field or file by name; exit 2, before Ray starts
    port in use           stays up                           named; exit 2
    a deployment fails    stays up                           Ray's reason; exit 1
    SIGTERM               clients are cut off                drains, like Ctrl-C; a second signal skips the wait
    Ctrl-C                all deployments stop at once       the same drain

Joins a running cluster or starts one on this machine exactly as `serve run` does (RAY_ADDRESS).
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray.serve._private import api as serve_api
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema

from deployments.app import DRAIN_MARGIN_S, INGRESS
from deployments.logs import configure_logging
from deployments.prepare import prepare, serve_configs
from overlap_serve.errors import ConfigError, ModelLoadError

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
POLL_S = 0.5
ASK_TIMEOUT_S = 5.0


class DeployFailed(Exception):
    """Serve has given up on an application; the message is Serve's."""


class Signals:
    """Counts SIGTERM and SIGINT. The first asks for a drain, the second for no more waiting."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._again = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait_first(self, timeout_s: float) -> bool:
        return self._came.wait(timeout_s)

    def wait_second(self, timeout_s: float) -> bool:
        return self._again.wait(timeout_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self._again if self._came.is_set() else self._came).set()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(f"usage: python -m deployments.run FILE, given: {list(arguments)}", file=sys.stderr)
        return EXIT_CONFIG
    configure_logging()
    file = Path(arguments[0])
    try:
        schema, drain_s = read(file)
        prepare(file)
        return serve(schema, drain_s)
    except (ConfigError, ModelLoadError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DeployFailed as error:
        print(f"{file}: {error}", file=sys.stderr)
        return EXIT_FAILED


def read(file: Path) -> tuple[ServeDeploySchema, float]:
    """Serve's view of the file, and how long its applications may drain. Raises ConfigError naming the field."""
    drain_s = max((config.drain_timeout for config in serve_configs(file)), default=0.0) + DRAIN_MARGIN_S
    try:
        return ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())), drain_s
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False))
        raise ConfigError(f"Serve refuses the file: {'; '.join(problems)}") from None


def serve(schema: ServeDeploySchema, drain_s: float) -> int:
    """Deploy and stay until a signal. Raises ConfigError, DeployFailed; nothing is left running that was started here."""
    signals = Signals()
    ray.init(namespace=SERVE_NAMESPACE)
    signals.install()  # after ray.init, which installs its own
    names = [application.name for application in schema.applications]
    try:
        if not serve_runs():
            check_port_is_free(schema.http_options.host, schema.http_options.port)
        client = serve_api.serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
            controller_options=schema.controller_options,
        )
        client.deploy_apps(schema, _blocking=False)
        try:
            wait_until_running(client, names, signals)
            while not signals.wait_first(3600.0):
                pass
        finally:
            drain(client, names, signals, drain_s)
    finally:
        ray.shutdown()
    return EXIT_OK


def serve_runs() -> bool:
    """Whether this cluster has Serve already; then its options stand, and its port is taken by itself."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def check_port_is_free(host: str, port: int) -> None:
    """Serve would report the proxy as unhealthy, and go on. Raises ConfigError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"http_options.port: port {port} of {host} is in use; stop what listens there or choose another port"
                ) from None
            raise ConfigError(f"http_options: cannot listen on {host}:{port}: {error.strerror}") from None


def wait_until_running(client: Any, names: Sequence[str], signals: Signals) -> None:
    """Returns when all applications run, or on a signal. Raises DeployFailed."""
    while not signals.wait_first(POLL_S):
        statuses = [status for status in client.list_serve_statuses() if status.name in names]
        for status in statuses:
            if status.app_status.status == "DEPLOY_FAILED":
                raise DeployFailed(f"application {status.name} cannot be deployed: {reasons(status)}")
        if len(statuses) == len(names) and all(status.app_status.status == "RUNNING" for status in statuses):
            log.info("all applications run: %s", ", ".join(names))
            return


def reasons(status: Any) -> str:
    """The last lines of what Serve says, which ends with a traceback: of the deployments where they say anything, else of the
    application."""
    failed = [one for one in status.deployment_statuses if one.status != "HEALTHY" and one.message]
    lines = [f"{one.name}: {last_line(one.message)}" for one in failed] or [last_line(status.app_status.message)]
    return "; ".join(lines)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def drain(client: Any, names: Sequence[str], signals: Signals, drain_s: float) -> None:
    """First the ingresses refuse what is new, while Serve still routes to them: a deleted application answers 404 at once. Then
    delete the applications: callers before callees, each after its open requests. Then Serve itself."""
    log.info("stopping; open requests get %g s, another signal skips the wait", drain_s - DRAIN_MARGIN_S)
    until_s = time.monotonic() + drain_s - DRAIN_MARGIN_S
    while num_open(client, names) > 0 and time.monotonic() < until_s:
        if signals.wait_second(POLL_S):
            log.warning("not waiting for open requests any more")
            return
    client.delete_apps(list(names), blocking=False)
    waited_s = 0.0
    while any(status.name in names for status in client.list_serve_statuses()) and waited_s < drain_s + DRAIN_MARGIN_S:
        if signals.wait_second(POLL_S):
            log.warning("not waiting for open requests any more")
            return
        waited_s += POLL_S
    client.shutdown()


def num_open(client: Any, names: Sequence[str]) -> int:
    """Open requests of all ingresses, each of which refuses new ones from here on. None of an application that does not run."""
    total = 0
    for name in names:
        try:
            handle = client.get_handle(INGRESS, name, check_exists=False).options(_by_reference=False)
            answers = handle.broadcast("drain").results(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
            total += sum(answer for answer in answers if isinstance(answer, int))
        except Exception as error:  # never deployed, or gone: the stop goes on
            log.warning("application %s cannot be asked to drain: %s", name, type(error).__name__)
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
