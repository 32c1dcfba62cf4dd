"""Makes landscapes like those of well-known tuned kernels, whose times come from a coarse model.

    python benchmarks/made_landscapes.py FOLDER

FOLDER gets one T4 file per kernel: a matrix product, a hotspot stencil, a dedispersion and a test
of points in a polygon. Parameters and constraints are of the kind that tuners of such kernels
publish. A time is work over the occupancy that registers, shared memory and blocks allow, in whole
waves, times factors of single values and of pairs of values, drawn at random: what a compiler does
with them. Such spaces have valleys, cliffs and failures. They say nothing about a GPU, and are for
choosing the settings of a search, where few recorded spaces are at hand.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.recorded import Landscape, dump

PROCESSORS, THREADS, REGISTERS, SHARED_BYTES = 108, 2048, 65536, 164 * 1024
"""Of the GPU that is imagined, all but the first per multiprocessor."""

MOST_THREADS, MOST_REGISTERS, MOST_SHARED_BYTES, MOST_BLOCKS = 1024, 255, 96 * 1024, 32
LUCK, PAIR_LUCK, NOISE = 0.10, 0.07, 0.01
"""Deviations of the logarithms of the random factors."""

Config = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a config asks of the GPU. work: of a thread, in operations; traffic: of a block, in
    bytes; parallel: independent operations of a thread, which hide latency.
    """

    threads: int
    blocks: int
    registers: int
    shared_bytes: int
    work: float
    traffic: float
    parallel: float


def seconds(load: Load) -> float | None:
    """The time of a launch; None if the kernel cannot run."""
    if load.threads > MOST_THREADS or load.shared_bytes > MOST_SHARED_BYTES:
        return None
    if load.registers > 1.5 * MOST_REGISTERS:
        return None
    spilled = max(0, load.registers - MOST_REGISTERS)
    warps = -(-load.threads // 32)
    resident = min(
        MOST_BLOCKS,
        THREADS // (32 * warps),
        REGISTERS // (32 * warps * min(load.registers, MOST_REGISTERS)),
        SHARED_BYTES // max(1, load.shared_bytes),
    )
    if resident < 1:
        return None
    waves = math.ceil(load.blocks / (PROCESSORS * resident))
    busy = min(1.0, warps * resident * load.parallel / 48)
    operations = warps * 32 * load.work * (1 + spilled / 20) / (128 * busy)
    bytes_cycles = load.traffic / (14 * min(1.0, warps * resident / 12))
    return (waves * resident * max(operations, bytes_cycles) + 2000 * waves) / 1.4e9


def product(config: Config) -> Load | None:
    """A matrix product of 4096 in single precision; None where the constraints exclude it."""
    rows, columns, depth = config["rows"], config["columns"], config["depth"]
    x, y, vx, vy = config["x"], config["y"], config["vx"], config["vy"]
    ax, by = config["ax"], config["by"]
    if rows % (x * vx) or columns % (y * vy) or rows % (ax * vx) or columns % (by * vy):
        return None
    if (x * y) % ax or (x * y) % by or depth % (x * y // ax) or depth % (x * y // by):
        return None
    threads, per_thread = x * y, rows * columns // (x * y)
    reads = (0.25 if config["shared_a"] else 1.0) * rows / x
    reads += (0.25 if config["shared_b"] else 1.0) * columns / y
    work = 4096 * (per_thread + 4 * reads / math.sqrt(vx * vy) + 20 / depth)
    bytes_each = 4 * 4096 * (rows * (1 if config["shared_a"] else 2))
    bytes_each += 4 * 4096 * (columns * (1 if config["shared_b"] else 2))
    apart = 1 + 0.3 * (vx == 1) + 0.3 * (vy == 1) + 0.5 * (ax * vx < 32)
    return Load(
        threads=threads, blocks=(4096 // rows) * (4096 // columns),
        registers=24 + int(1.3 * per_thread) + 2 * int(rows / x + columns / y),
        shared_bytes=4 * depth * (rows * config["shared_a"] + columns * config["shared_b"]),
        work=work, traffic=bytes_each * apart / 8, parallel=1 + per_thread / 8,
    )  # fmt: skip


def hotspot(config: Config) -> Load | None:
    """A stencil in time steps that a block repeats on a tile with a border."""
    x, y, tx, ty, steps = (config[name] for name in ("x", "y", "tx", "ty", "steps"))
    if not 32 <= x * y <= MOST_THREADS or steps % config["unroll"]:
        return None
    wide, high = x * tx, y * ty
    inner = (wide - 2 * steps) * (high - 2 * steps)
    if wide <= 2 * steps or high <= 2 * steps:
        return None
    blocks = math.ceil(4096 * 4096 / inner)
    shared = 4 * wide * high * (2 + config["shared_power"])
    apart = 1 + 2.0 * (x < 32) * (32 / x - 1) / 4
    work = steps * tx * ty * (12 + 6 / config["unroll"]) + 40
    traffic = 4 * wide * high * (2 + (0 if config["shared_power"] else steps - 1) / 2) * apart
    return Load(
        threads=x * y, blocks=-(-blocks // steps), shared_bytes=shared, work=work, traffic=traffic,
        registers=20 + 3 * tx * ty + 4 * config["unroll"], parallel=1 + tx * ty / 4,
    )  # fmt: skip


def dedispersion(config: Config) -> Load | None:
    """Sums over 1,536 channels with a delay each, for many samples and trial delays."""
    x, y, tx, ty = (config[name] for name in ("x", "y", "tx", "ty"))
    if not 32 <= x * y <= MOST_THREADS or (tx == 1 and config["strided_x"]):
        return None
    if ty == 1 and config["strided_y"]:
        return None
    apart = 1.0 + 0.5 * (tx > 1) * (not config["strided_x"]) * min(tx, 8) / 4 + (x < 32) * 16 / x
    reuse = 1 + 0.6 * math.log2(y * ty) * (1.0 if config["strided_y"] else 0.8)
    unroll = config["unroll"] or 6
    work = 1536 * (tx * ty * 2.5 + 6 / unroll + tx)
    return Load(
        threads=x * y, blocks=math.ceil(25000 / (x * tx)) * math.ceil(2048 / (y * ty)),
        registers=22 + 2 * tx * ty + unroll * (1 + tx // 2), shared_bytes=0, work=work,
        traffic=1536 * x * tx * y * ty / reuse * apart,
        parallel=(1 + tx * ty / 3) * (1 + unroll / 8),
    )  # fmt: skip


def polygon(config: Config) -> Load | None:
    """2e7 points tested against a polygon of 600 edges."""
    tile = config["tile"]
    edge = {0: 9.0, 1: 7.0, 2: 8.0, 3: 11.0}[config["between"]] - 1.5 * config["slopes"]
    edge += {0: 2.0, 1: 1.0, 2: 3.5}[config["method"]]
    return Load(
        threads=config["x"], blocks=math.ceil(2e7 / (config["x"] * tile)),
        registers=16 + 6 * tile + 6 * (config["between"] == 3), shared_bytes=0,
        work=600 * (edge * tile + 3 + 2 * config["slopes"]), traffic=8 * config["x"] * tile,
        parallel=1 + tile / 2,
    )  # fmt: skip


POWERS = tuple(2**power for power in range(10))
KERNELS: dict[str, tuple[Callable[[Config], Load | None], dict[str, tuple[int, ...]]]] = {
    "product": (product, {
        "rows": POWERS[4:8], "columns": POWERS[4:8], "depth": (16, 32), "x": POWERS[3:6],
        "y": POWERS[3:6], "ax": POWERS[3:6], "by": POWERS[3:6], "vx": POWERS[:4], "vy": POWERS[:4],
        "shared_a": (0, 1), "shared_b": (0, 1),
    }),
    "hotspot": (hotspot, {
        "x": POWERS[2:10], "y": POWERS[:6], "tx": tuple(range(1, 9)), "ty": tuple(range(1, 9)),
        "steps": tuple(range(1, 9)), "unroll": (1, 2, 4), "shared_power": (0, 1),
    }),
    "dedispersion": (dedispersion, {
        "x": POWERS[:10], "y": POWERS[:8], "tx": tuple(range(1, 9)), "ty": tuple(range(1, 9)),
        "strided_x": (0, 1), "strided_y": (0, 1), "unroll": (0, 1, 2, 4, 8),
    }),
    "polygon": (polygon, {
        "x": tuple(range(32, 1024, 32)), "tile": (1, *range(2, 21, 2)), "between": (0, 1, 2, 3),
        "slopes": (0, 1), "method": (0, 1, 2),
    }),
}  # fmt: skip


def landscapes() -> Iterator[Landscape]:
    """All of them, the same at every call."""
    for name, (load_of, values) in KERNELS.items():
        points = [
            dict(zip(values, combination, strict=True))
            for combination in itertools.product(*values.values())
        ]
        legal = [(point, load) for point in points if (load := load_of(point))]
        luck = _Luck(name)
        times = [
            None if (time := seconds(load)) is None else 1e3 * time * luck.factor(point)
            for point, load in legal
        ]
        yield Landscape(
            name=f"made {name}",
            source="made",
            unit="ms",
            points=tuple(point for point, _ in legal),
            times=tuple(times),
        )


class _Luck:
    """Factors of values and of pairs of values, each drawn when it is first met."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)
        self._drawn: dict[object, float] = {}

    def factor(self, point: Config) -> float:
        """The product of all factors of a point."""
        keys = [(item,) for item in point.items()]
        pairs = itertools.combinations(point.items(), 2)
        total = sum(self._of(key, LUCK / math.sqrt(len(keys))) for key in keys)
        total += sum(self._of(key, PAIR_LUCK / math.sqrt(len(keys))) for key in pairs)
        return math.exp(total + self._random.gauss(0, NOISE))

    def _of(self, key: object, deviation: float) -> float:
        if key not in self._drawn:
            self._drawn[key] = self._random.gauss(0, deviation)
        return self._drawn[key]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for landscape in landscapes():
        (folder / f"{landscape.name.replace(' ', '_')}.json").write_text(dump(landscape))


if __name__ == "__main__":
    main()
