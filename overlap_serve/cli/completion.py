"""`overlap-serve completion SHELL`: a static completion script, made from the parser by shtab (nothing runs when TAB is pressed)."""

from __future__ import annotations

import argparse

import shtab

from overlap_serve.cli.options import Commands, with_examples

SHELLS = ("bash", "zsh", "fish")


def add(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """parser: the whole, which the script describes."""
    own = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a script that completes commands, options and file names.",
        **with_examples(
            "overlap-serve completion bash > ~/.local/share/bash-completion/completions/overlap-serve",
            'overlap-serve completion zsh > "${fpath[1]}/_overlap-serve"',
            "overlap-serve completion fish > ~/.config/fish/completions/overlap-serve.fish",
        ),
    )
    own.add_argument("shell", choices=SHELLS)

    def run(args: argparse.Namespace) -> int:
        print(shtab.complete(parser, args.shell))
        return 0

    own.set_defaults(run=run)
