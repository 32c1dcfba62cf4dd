"""Serve a dozen requests with a tiny model of random weights, step by step.

    python examples/decode_server/serve.py [--requests 12] [--pages 24] [--page-size 4]

Prints a line a step: tokens generated, tokens of prompts run, requests finished and sent back. On a
GPU the model is bfloat16 and attention runs flashgen's kernels; on a CPU it is float32 and torch
serves, unless TRITON_INTERPRET=1 and FLASHGEN_GPU select the kernels. At the end every answer is
compared with that of the same request served by itself; exit code 1 if one differs. (In bfloat16
ties of two tokens may be decided differently in another batch.)
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from engine import Engine, Request
from page_pool import PagePool
from tiny_model import Sizes, TinyModel


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=16, help="at most, of a request")
    parser.add_argument("--sequences", type=int, default=4, help="at work together")
    parser.add_argument("--tokens-per-step", type=int, default=16)
    parser.add_argument("--pages", type=int, default=24)
    parser.add_argument("--page-size", type=int, default=4, help="a power of two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


MOST_TOKENS = 2**20
"""In the pages of a cache: 512 MiB of keys and values in float32."""


def refused(options: argparse.Namespace) -> str | None:
    """Why the options cannot be served, in a sentence; None if they can."""
    for name in ("new_tokens", "sequences", "tokens_per_step", "pages", "page_size"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} must be 1 or more: got {getattr(options, name)}"
    size, positions = options.page_size, Sizes().positions
    if size & (size - 1) or size > positions:
        return f"--page-size must be a power of two up to {positions}: got {size}"
    if options.pages > (most := MOST_TOKENS // size):
        return f"--pages must be at most {most} of {size} tokens: got {options.pages}"
    if not 0 <= options.seed < 2**63:
        return f"--seed must be from 0 to {2**63 - 1}: got {options.seed}"
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch has no one error for it
        why = str(error).splitlines()[0]
        return f"--device must be one that torch has here: got {options.device} ({why})"
    return None


def drawn_requests(options: argparse.Namespace) -> list[Request]:
    """Requests of random tokens, prompts and answers of all lengths."""
    draw = random.Random(options.seed)
    return [
        Request(
            name=f"r{number}",
            prompt=tuple(draw.randrange(Sizes().vocabulary) for _ in range(draw.randint(1, 40))),
            new_tokens=draw.randint(1, options.new_tokens),
        )
        for number in range(options.requests)
    ]


def make_engine(model: TinyModel, options: argparse.Namespace, *, alone: bool = False) -> Engine:
    """An engine with an empty cache; alone: for one sequence at a time, with all the room it may
    need.
    """
    pages = model.sizes.positions // options.page_size if alone else options.pages
    pool = PagePool(
        model.sizes,
        pages=pages,
        page_size=options.page_size,
        dtype=model.embedding.weight.dtype,
        device=model.embedding.weight.device,
    )
    sequences = 1 if alone else options.sequences
    return Engine(model, pool, sequences=sequences, tokens_per_step=options.tokens_per_step)


def main(arguments: list[str] | None = None) -> int:
    """Serve, compare, and return the exit code."""
    options = parse(arguments)
    if (sentence := refused(options)) is not None:
        print(f"serve.py: {sentence}", file=sys.stderr)
        return 2
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    model = TinyModel(Sizes(), options.seed).to(options.device, dtype).eval()
    requests = drawn_requests(options)
    try:
        engine = make_engine(model, options)
        engine.submit(requests)
    except ValueError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    print("step  decoded  prefilled  free pages  finished, sent back")
    steps = 0
    while len(engine.results) < len(requests):
        step = engine.step()
        steps += 1
        news = [*step.finished, *(f"-{name}" for name in step.preempted)]
        print(
            f"{steps:4}  {step.decoded:7}  {step.prefilled:9}  {engine.pool.free:10}  "
            + " ".join(news)
        )
    alone = make_engine(model, options, alone=True)
    alone.submit(requests)
    expected = alone.run()
    differing = [name for name in expected if engine.results[name] != expected[name]]
    tokens = sum(map(len, engine.results.values()))
    print(f"{len(requests)} requests, {tokens} tokens in {steps} steps; differ from the run alone: "
          + (" ".join(differing) or "none"))  # fmt: skip
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
