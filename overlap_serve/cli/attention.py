"""`overlap-serve install-attention`: bring the FlashAttention library of the vllm wheel (ADR-0010), for GPUs.

This version computes attention with plain torch only, so there is nothing to install for: the command says so and fails, lest an
image seem to hold what it does not.
"""

from __future__ import annotations

import argparse
import sys

from overlap_serve.cli.options import Commands, with_examples

UNAVAILABLE = 1


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "install-attention",
        help="install the FlashAttention library for GPUs (not in this version)",
        description="Install the FlashAttention library for GPUs. This version has only the reference attention in plain torch, so the "
        f"command fails with exit status {UNAVAILABLE}.",
        **with_examples("overlap-serve install-attention"),
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(
        "overlap-serve: install-attention: this version has only the reference attention (attention_backend: reference), in plain torch, "
        "on GPUs too; nothing was installed. Leave the command out, in k8s/Dockerfile.gpu by INSTALL_ATTENTION=0",
        file=sys.stderr,
    )
    return UNAVAILABLE
