"""What a side of `cpu_decode` is: a process that does one job after the other and says how long each took.

A job is a line of JSON on stdin, its seconds are a line on stdout. Whatever a job's prompts cannot share with an earlier job is
made fresh from its seed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

MAX_STREAMS = 16
MAX_PROMPT = 1024
FIRST_ID, LAST_ID = 1000, 40000  # ordinary tokens of the embedded model


@dataclass(frozen=True)
class Job:
    """streams prompts of prompt_len random tokens, each continued greedily by num_tokens tokens, side by side."""

    streams: int
    prompt_len: int
    num_tokens: int
    seed: int

    def line(self) -> str:
        return json.dumps(asdict(self))

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [[rng.randint(FIRST_ID, LAST_ID) for _ in range(self.prompt_len)] for _ in range(self.streams)]


def answer_jobs(run: Callable[[Job], float]) -> None:
    """Do the jobs that arrive on stdin; `run` gives the seconds of one. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print("ready", file=answers)
    for line in sys.stdin:
        print(run(Job(**json.loads(line))), file=answers)
