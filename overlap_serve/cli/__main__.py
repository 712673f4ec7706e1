"""`python -m overlap_serve.cli`: the same as the command `overlap-serve`."""

import sys

from overlap_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
