"""Republishes a process' metrics through Ray's own exporter, which knows nothing of prometheus_client.

    every PERIOD_S:  families -> ours and the names that Ray's Grafana dashboard for SGLang reads -> ray.util.metrics

Nothing here runs per request or token. A rank's metrics are published by its scheduler replica: the rank's interpreter belongs to the loop.
Counters go by their growth, gauges as they are, histograms as gauges (`runtime.metric_names.flatten`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from prometheus_client import Metric
from ray.util.metrics import Counter, Gauge

from overlap_serve.runtime.metric_names import Series, Translator, flatten, sglang

log = logging.getLogger(__name__)

PERIOD_S = 5.0  # Ray's agent forgets a gauge that was not reported for two of its intervals, by default 20 s


class RayExporter:
    """Ray's metrics by name, made on first use: every series of one name has the same labels."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def publish(self, all_series: Iterable[Series]) -> None:
        for series in all_series:
            tags = dict(series.labels)
            metric = self._metrics.get(series.name)
            if metric is None:
                kind = Counter if series.counter else Gauge
                metric = self._metrics[series.name] = kind(series.name, series.text, tuple(tags))
            if series.counter:
                self._count(metric, series, tags)
            else:
                metric.set(series.value, tags)

    def _count(self, metric: Any, series: Series, tags: dict[str, str]) -> None:
        key = (series.name, series.labels)
        before = self._counted.get(key)
        if before is None and series.value == 0:
            # `inc` refuses 0, but a counter that appears only with its first event has no rate for it.
            metric._record(0.0, tags)
        elif series.value > (before or 0.0):
            metric.inc(series.value - (before or 0.0), tags)
        self._counted[key] = series.value


class MetricsBridge:
    """read: the families of the process as they are now; may fail while the process it asks is ending."""

    def __init__(self, read: Callable[[], Awaitable[Iterable[Metric]]], deployment: str, application: str) -> None:
        self._read = read
        self._labels = {"deployment": deployment, "application": application}
        self._translate = Translator(sglang("sglang_"))
        self._exporter = RayExporter()

    async def run(self) -> None:
        """For ever. A round that fails is left out; the counters of the next make up for it."""
        failing = False
        while True:
            try:
                await self._round()
                failing = False
            except ray.exceptions.RayError:
                pass  # the rank is gone, which is others' business
            except Exception:
                if not failing:  # once, not every few seconds
                    log.exception("cannot publish metrics through Ray; still trying")
                failing = True
            await asyncio.sleep(PERIOD_S)

    async def _round(self) -> None:
        families = list(await self._read())
        self._exporter.publish(flatten([*families, *self._translate(families)], self._labels))
