"""Train GPT-2 with one attention or several, and compare: loss, tokens per second, peak memory.

    python examples/gpt2/train.py --attention eager sdpa flashgen --plot gpt2.png

The model is Hugging Face's GPT-2 with random weights, by default at the size of GPT-2 small. The
tokens are the bytes of the Python reference manual that CPython ships (pydoc_data.topics), a
twentieth of it held out. Every attention starts from the same weights and sees the same batches. On
a GPU the weights are float32 and the products bfloat16 (autocast). On a CPU all is float32, and
"flashgen" is torch's attention unless TRITON_INTERPRET=1 and FLASHGEN_GPU select its kernels. Needs
transformers, and matplotlib for --plot.

The first steps compile kernels, so tokens per second are counted from the step after --warm on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from flashgen.errors import FlashgenError
from flashgen.runtime import transformers as flashgen_backend

IMPLEMENTATIONS = ("eager", "sdpa", "flashgen")
HELD_OUT = 20  # one byte in so many
VALIDATION_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run. peak_bytes is what torch allocated on the GPU at most; None on a CPU."""

    attention: str
    losses: list[float]
    validation_loss: float
    tokens_per_second: float
    peak_bytes: int | None


def read_text() -> tuple[Tensor, Tensor]:
    """The bytes to train on and those held out, uint8."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(data) // HELD_OUT
    return data[:-held_out], data[-held_out:]


def draw_batch(data: Tensor, options: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Windows of the text that begin anywhere, int64 (batch, length)."""
    starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator)
    windows = torch.stack([data[start : start + options.length] for start in starts.tolist()])
    return windows.long().to(options.device)


def make_model(attention: str, options: argparse.Namespace) -> nn.Module:
    """GPT-2 of random weights, the same for every attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(options.seed)
    config = GPT2Config(
        n_layer=options.layers,
        n_head=options.heads,
        n_embd=options.width,
        n_positions=options.length,
        vocab_size=options.vocabulary,
        attn_pdrop=options.dropout,
        embd_pdrop=options.dropout,
        resid_pdrop=options.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    model: nn.Module = GPT2LMHeadModel(config).to(options.device)
    return torch.compile(model) if options.compile else model  # type: ignore[return-value]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    on_gpu = tokens.is_cuda
    cast: AbstractContextManager[object] = (
        torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
    )
    with cast:
        logits = model(tokens).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def train(attention: str, options: argparse.Namespace) -> Outcome:
    """One training run from the first step to the last."""
    data, held_out = read_text()
    generator = torch.Generator().manual_seed(options.seed)
    model = make_model(attention, options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.1)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    began = 0.0
    for step in range(options.steps):
        if step == options.warm:
            began = now(options)
        optimizer.param_groups[0]["lr"] = options.rate * min(1.0, (step + 1) / 10)
        loss = loss_of(model, draw_batch(data, options, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 9:
            print(f"{attention:9} step {step + 1:4}  loss {float(loss):.4f}", flush=True)
    seconds = now(options) - began
    tokens = (options.steps - options.warm) * options.batch * options.length
    return Outcome(
        attention=attention,
        losses=torch.stack(losses).tolist(),
        validation_loss=validate(model, held_out, options),
        tokens_per_second=tokens / seconds,
        peak_bytes=torch.cuda.max_memory_allocated() if options.device == "cuda" else None,
    )


@torch.no_grad()
def validate(model: nn.Module, held_out: Tensor, options: argparse.Namespace) -> float:
    """The loss on text that was not trained on."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    model.eval()
    batches = [draw_batch(held_out, options, generator) for _ in range(VALIDATION_BATCHES)]
    return sum(float(loss_of(model, batch)) for batch in batches) / VALIDATION_BATCHES


def now(options: argparse.Namespace) -> float:
    """Seconds, once the GPU has done all it was asked."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def show(outcomes: list[Outcome]) -> None:
    """The table of all runs, ratios to the first."""
    first = outcomes[0]
    print(f"\n{'':10}{'loss':>8}{'held out':>10}{'ppl':>8}{'tokens/s':>11}{'x':>6}{'peak GiB':>10}")
    for run in outcomes:
        peak = "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.2f}"
        ratio = run.tokens_per_second / first.tokens_per_second
        print(
            f"{run.attention:10}{run.losses[-1]:8.4f}{run.validation_loss:10.4f}"
            f"{math.exp(run.validation_loss):8.2f}{run.tokens_per_second:11.0f}{ratio:6.2f}{peak:>10}"
        )


def plot(outcomes: list[Outcome], file: Path) -> None:
    """Loss by step, and tokens per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    # Equal curves lie on each other: the first is the widest and below, so each remains visible.
    for number, run in enumerate(outcomes):
        width = 1.2 + 2.4 * (len(outcomes) - 1 - number)
        steps = range(1, len(run.losses) + 1)
        left.plot(steps, run.losses, label=run.attention, linewidth=width)
    left.set(xlabel="step", ylabel="loss (nats a byte)")
    left.legend()
    right.bar([run.attention for run in outcomes], [run.tokens_per_second for run in outcomes])
    right.set(ylabel="tokens per second")
    figure.savefig(file, dpi=150)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, those that contradict each other refused."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--attention", nargs="+", choices=IMPLEMENTATIONS, default=["flashgen"])
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--heads", type=int, default=12, help="of each layer")
    parser.add_argument("--width", type=int, default=768, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=50257, help="rows of the embedding")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer")
    parser.add_argument("--warm", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    if options.vocabulary < 256:
        parser.error(
            f"--vocabulary must be at least 256, for tokens are bytes: {options.vocabulary}"
        )
    if not 0 <= options.warm < options.steps:
        parser.error(f"--warm must be less than --steps: {options.warm} and {options.steps}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'matplotlib>=3.8'")
    for file in (options.json, options.plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def save(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """Write all figures so far, and what they were taken with."""
    settings = {
        name: value for name, value in vars(options).items() if name not in ("json", "plot")
    }
    record = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": settings,
    }
    for package in ("torch", "triton", "transformers", "flashgen"):
        record[package] = importlib.import_module(package).__version__
    record["runs"] = [asdict(run) for run in outcomes]
    options.json.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Train with every attention asked for, then compare. Figures are written after each run."""
    options = parse(arguments)
    flashgen_backend.register()
    outcomes: list[Outcome] = []
    for attention in options.attention:
        outcomes.append(train(attention, options))
        if options.json:
            save(outcomes, options)
    show(outcomes)
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    try:
        main()
    except FlashgenError as error:
        sys.exit(f"train.py: {error}")
