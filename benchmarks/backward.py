"""The backward pass on a GPU: flashgen, its untuned default and the peers, in one run.

    python benchmarks/backward.py [--head-dim 128] [--seq 4096] [--out FOLDER]
    python benchmarks/backward.py --smoke      every path with tiny sizes on a CPU; measures nothing

The same as `flashgen bench --direction backward`, whose options it takes;
docs/tuning.md says what is run and how. Exit codes: 0 done, 1 nothing could be timed (of a
smoke run: some contender failed), 2 usage, 3 no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashgen.cli import main

if __name__ == "__main__":
    if "--help" in sys.argv:
        print(f"usage: backward.py [OPTION OF flashgen bench]...\n\n{__doc__}")
        sys.exit(0)
    main(["bench", "--direction", "backward", *sys.argv[1:]])
