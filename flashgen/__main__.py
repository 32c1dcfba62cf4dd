"""python -m flashgen, and the flashgen command."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default with sys.argv, and exit with its code."""
    try:
        from flashgen import cli
    except ModuleNotFoundError as error:  # in a clone that is not installed
        from flashgen.paths import install_command_after

        if (command := install_command_after(error)) is None:
            raise
        sys.exit(f"flashgen: the command line needs {error.name}: {command}")
    cli.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
