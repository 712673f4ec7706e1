"""`Profiler`: records what the threads of this process do with torch, and the device's kernels, into a gzipped Chrome trace.

Owns one thread for each recording, because a recording must be ended by the thread that began it, and callers come and go. Knows no
engine: it sees every thread of the process, the loop's as well as the streams'. A recording that nobody ends ends by itself after
its limit, as its events pile up in memory; its file is there for the next `stop`.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import threading
from datetime import datetime, timezone
from pathlib import Path

from overlap_serve.runtime.control import PROFILE_LIMIT_S, ProfileAnswer

log = logging.getLogger(__name__)


class Recording:
    """One recording, from its begin to its file. folder: made if it is not there. Raises OSError if it cannot be.

    error: why there is no file, once the thread has ended.
    """

    def __init__(self, folder: Path, name: str, limit_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.error: Exception | None = None
        self._file = folder / name
        self._limit_s = limit_s
        self._began = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
        self._thread.start()
        self._began.wait()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Blocks until the file is written, or `error` is set."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        plain, packed = (self._file.with_name(f".{self.name}.{kind}") for kind in ("plain", "packed"))
        try:
            self._record(plain)
            with plain.open("rb") as events, gzip.open(packed, "wb", compresslevel=6) as file:
                shutil.copyfileobj(events, file)
            os.replace(packed, self._file)
        except Exception as error:
            log.exception("the profile %s could not be recorded", self._file)
            self.error = error
            packed.unlink(missing_ok=True)
        finally:
            plain.unlink(missing_ok=True)
            self._began.set()

    def _record(self, file: Path) -> None:
        # Not at the top: a process of the fake engine never loads torch. Not torch.profiler.profile, which is a shell around this one:
        # its first start imports 822 modules of torch._inductor, 3.5 s of Python beside a loop that serves.
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd.profiler import profile

        # Other threads are seen only with the first of these; without the second torch builds a Python object of every event.
        every_thread = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        device = "cuda" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        with profile(use_device=device, use_kineto=True, experimental_config=every_thread) as profiler:
            self._began.set()
            if not self._stop.wait(self._limit_s):
                log.warning("nobody has ended the profile %s within %g s: it ends now", self.name, self._limit_s)
        profiler.export_chrome_trace(str(file))


class Profiler:
    """At most one recording at a time. replica: name for answers and files. Thread-safe; a call waits for the one before it."""

    def __init__(self, replica: str, limit_s: float = PROFILE_LIMIT_S) -> None:
        self._replica = replica
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._recording: Recording | None = None

    def start(self, folder: Path) -> ProfileAnswer:
        """Record from now on, for a file in this folder."""
        with self._lock:
            if self._recording is not None and self._recording.running:
                return ProfileAnswer(self._replica, "none")
            moment = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
            name = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self._replica)}-{moment}.trace.json.gz"
            try:
                self._recording = Recording(folder, name, self._limit_s)
            except OSError as error:
                log.error("no profile can be recorded in %s: %s", folder, error)
                return self._failed(error)
            return self._answer(self._recording)

    def stop(self) -> ProfileAnswer:
        """End the recording and write its file; also of one that has reached its limit."""
        with self._lock:
            recording, self._recording = self._recording, None
            if recording is None:
                return ProfileAnswer(self._replica, "none")
            recording.end()
            return self._answer(recording)

    def _answer(self, recording: Recording) -> ProfileAnswer:
        if recording.error is not None:
            return self._failed(recording.error)
        return ProfileAnswer(self._replica, "done", recording.name)

    def _failed(self, error: Exception) -> ProfileAnswer:
        """Clients see no paths."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        return ProfileAnswer(self._replica, "failed", reason)
