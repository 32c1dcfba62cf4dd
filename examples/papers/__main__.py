"""The claims of the FlashAttention papers, shown on this machine without a GPU, as one page.

    make papers                               all claims, into paper.html
    python examples/papers figure-2 backward  some of them; --out FILE.html names another page
    python examples/papers memories --target nvidia_h200      of another GPU than the papers' A100

Exit codes: 0 all were shown and hold, 1 one is not, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.papers.claims import named
from examples.papers.page import check_file, show, write_page
from flashgen.errors import FlashgenError, printable
from flashgen.spec.gpu import known_target


def main(arguments: Sequence[str]) -> int:
    """Show the claims, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("claim", nargs="*", help="all if none is given")
    parser.add_argument(
        "--target", default="nvidia_a100_sxm4_40gb", help="a known GPU, for memories and programs"
    )
    parser.add_argument("--out", type=Path, default=Path("paper.html"), help="the page")
    asked = parser.parse_args(arguments)
    try:
        check_file(asked.out)
        shown = []
        for one in show(named(asked.claim), known_target(asked.target)):
            shown.append(one)
            held = one.verdict.upper() if one.finding and not one.holds else one.verdict
            print(f"{one.claim.name:15} {held:17} {one.claim.title}", flush=True)
            checks = one.finding.checks if one.finding else ()
            lines = [f"fails: {check.text}" for check in checks if not check.holds]
            for line in [*lines, *[one.why] * bool(one.why)]:
                print(printable(f"  {line}"))
        write_page(shown, asked.out)
    except FlashgenError as error:
        print(f"papers: {error}", file=sys.stderr)
        return error.exit_code
    print(f"Written: {asked.out}")
    return int(not all(one.holds for one in shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
