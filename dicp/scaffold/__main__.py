"""`python -m dicp.scaffold NAME`: the package of a new vendor, which runs, to start from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dicp.errors import OptionError
from dicp.scaffold import write


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 where the name or the folder will not do."""
    parser = argparse.ArgumentParser(prog="python -m dicp.scaffold", description=__doc__)
    parser.add_argument("name", help="of the vendor, its package and its torch.compile backend")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--loops", dest="kind", action="store_const", const="loops", help="its kernels are C loops"
    )
    kinds.add_argument(
        "--graphs",
        dest="kind",
        action="store_const",
        const="graphs",
        help="for a toolchain that takes whole graphs",
    )
    parser.set_defaults(kind="kernels")
    parser.add_argument("--into", type=Path, default=Path(), metavar="DIR", help="default: here")
    options = parser.parse_args(arguments)
    try:
        folder = write(options.name, options.into, options.kind)
    except (OptionError, OSError) as e:
        print(f"dicp.scaffold: {e}", file=sys.stderr)
        return 2
    print(f"{folder} has a vendor that runs. Next:")
    print(f"  pip install -e {folder}")
    print(f"  python -m pytest {folder / 'tests'}")
    print(f"  less {folder / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
