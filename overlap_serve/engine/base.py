"""What the loop needs of an engine: two seams, so that grammar masks can be uploaded while the forward runs."""

from __future__ import annotations

from typing import Protocol

from overlap_serve.device.base import Watch
from overlap_serve.step import StepPlan, StepResult


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Sync point 2: the only place where the host waits for the device. Raises what the step's work raised."""


class Engine(Protocol):
    """Mirrors the batch from plans and executes them in order. Never sees a request."""

    def launch_forward(self, plan: StepPlan) -> None:
        """Apply the plan's deltas and enqueue its forward pass. The host does not wait."""

    def launch_sample(self) -> PendingStep:
        """Enqueue the sampler of the step launched last, and the copy of its ids to the host. The host does not wait."""

    def device_busy_s(self) -> float:
        """Seconds of device work since the start."""

    def watch_device(self, watch: Watch | None) -> None:
        """See `Stream.watch`; of the stream where the model runs."""

    def close(self) -> None:
        """Wait for what is in flight and release streams. Idempotent."""
