"""python -m flashgen, and the flashgen command."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default with sys.argv, and exit with its code."""
    try:
        from flashgen import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "flashgen":
            raise
        from flashgen.paths import install_command

        sys.exit(
            f"flashgen: the command line needs {error.name}, of the extra `tune`: "
            + install_command("tune")
        )
    cli.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
