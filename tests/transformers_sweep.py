"""Every model type of the installed transformers, tiny, with our two names and with "eager".

    python -m tests.transformers_sweep                      the list that docs/integrations.md shows
    python -m tests.transformers_sweep --types llama t5     what became of these
    python -m tests.transformers_sweep --ways               the table that docs/integrations.md shows

Outputs, gradients of all parameters and generation agree with eager's in every way of WAYS that the
model has, and attention weights are refused; or the model is refused by name, or its packed batches
are. Everything else is a difference, and the exit code is 1. Models run in a process of their own:
one that crashes takes none with it. On CPU tensors torch computes, so this is about masks
and arguments; the kernels are in tests/interpreted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import transformers as backend
from tests import programs, tiny_models

EQUAL = "equal"
AS_SDPA = "equal to sdpa of transformers, whose own eager attention fails"
UNREACHED = "calls no attention of transformers, and stays as it is"
REFUSED = "refused"
DIFFERS = "differs"
NOT_BUILT = "not built"

EAGER_FAILS = ("nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "nemotron3_5_asr")
"""Types whose eager attention is not what is wanted. It sets the scores of visible keys to -inf: it
takes logical_not() of a mask that is 0.0 where a key is visible."""

RTOL = 1e-4
"""Allowed between float32 results, of the largest element of a tensor. Of gradients, also 1e-6 of
the largest of all: that of a key's bias is 0 but for rounding errors."""

TOKENS = 6
MEMORY_BYTES = 10 << 30


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a model type with one of our names; detail: why."""

    model_type: str
    attention: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a model computed of one input, by name."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]


def compare(model_type: str, names: Sequence[str] = backend.NAMES) -> list[Result]:
    """What becomes of a model of this type with each name of ours. Raises nothing."""
    try:
        config = tiny_models.make_config(model_type)
        model = tiny_models.make_model(config, "eager")
        choice = _first_that_runs(model)
        eager = dict(_runs(model, choice))
        found = [(name, *_outcome(config, choice, name, eager)) for name in names]
    except Exception as error:  # whatever a model may raise
        found = [(name, NOT_BUILT, _said(error)) for name in names]
    return [
        Result(model_type=model_type, attention=name, outcome=outcome, detail=detail)
        for name, outcome, detail in found
    ]


def _outcome(config: Any, choice: int, attention: str, eager: dict[str, Run]) -> tuple[str, str]:
    """One of the words above, and why."""
    with _counted_calls() as calls:
        try:
            model = tiny_models.make_model(config, attention)
            runs = dict(_runs(model, choice, eager))
        except InvalidArgument as error:
            return REFUSED, str(error)
        except Exception as error:
            refused = f"attn_implementation='{attention}'` is not supported" in str(error)
            return (REFUSED if refused else DIFFERS), _said(error)
    if _returns_weights(model, choice):
        return DIFFERS, "output_attentions=True is not refused"
    if config.model_type in EAGER_FAILS:
        sdpa = dict(_runs(tiny_models.make_model(config, "sdpa"), choice, eager))
        different = differences(runs, sdpa)
        return (DIFFERS if different else AS_SDPA), different
    if different := differences(runs, eager):
        return DIFFERS, different
    return (EQUAL if calls else UNREACHED), ""


def _returns_weights(model: Any, choice: int) -> bool:
    """Whether a model takes output_attentions=True."""
    given = list(tiny_models.inputs(model, "none"))[choice]
    try:
        model(**given, output_attentions=True)
    except InvalidArgument as error:
        return "output_attentions" not in str(error)
    except TypeError as error:  # it has no such argument
        return "output_attentions" not in str(error)
    return True


class _counted_calls:
    """Counts the calls of the attention function: the list it gives grows by one with each."""

    def __enter__(self) -> list[None]:
        from transformers import AttentionInterface

        calls: list[None] = []

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            return backend.attention_forward(*arguments, **options)

        for name in backend.NAMES:
            AttentionInterface.register(name, counted)
        return calls

    def __exit__(self, *_: object) -> None:
        backend.register()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _first_that_runs(model: Any) -> int:
    """The number of the input that the model can be called with. Raises ValueError."""
    errors = []
    for choice, given in enumerate(tiny_models.inputs(model, "none")):
        try:
            with torch.no_grad():
                model(**given)
        except Exception as error:
            errors.append(_said(error))
        else:
            return choice
    raise ValueError(" | ".join(errors))


def _runs(model: Any, choice: int, like: dict[str, Run] | None = None) -> Iterator[tuple[str, Run]]:
    """What a model computes in each way that makes sense for it; without `like`, that of eager, in
    each that it can. Raises what the model raises.
    """
    for name, run in _ways(model, choice):
        if like is not None and name not in like:
            continue
        try:
            made = run()
        except Exception as error:
            refused = name == "bounds" and isinstance(error, InvalidArgument)
            if (like is not None and not refused) or name == "plain":
                raise
        else:
            if name == "bounds" and like is None and not _keeps_apart(model, choice):
                continue
            yield name, made


WAYS = {
    "plain": "no mask is given",
    "last logits": "`logits_to_keep=3`",
    "mask of ones": "as a tokenizer returns for texts of one length",
    "padded right": "a mask of shape (batch, seq)",
    "padded left": "the same",
    "padded on both sides": "the same",
    "positions": "`position_ids` that begin at 3",
    "4D mask": "an additive mask of shape (batch, 1, seq_q, seq_k) that hides one key in five at random",
    "bounds": "two packed sequences, with `cu_seq_lens_q` and `position_ids`",
    "packed": "two packed sequences, with `position_ids` alone",
    "chunked prefill": "a prompt in two parts, the second over the cache of the first",
    "generation": "greedy, padded left, with the model's own cache",
    "static cache": 'the same with `cache_implementation="static"`',
}
"""What each model is called with, as far as it takes it. docs/integrations.md shows it."""

PREFIX = 10
"""Tokens of the first of two packed sequences, and of the first part of a prompt: whole chunks."""


def _ways(model: Any, choice: int) -> Iterator[tuple[str, Callable[[], Run]]]:
    def given(padding: str) -> dict[str, Tensor]:
        return list(tiny_models.inputs(model, padding))[choice]

    takes = inspect.signature(model.forward).parameters
    ones = given("none")
    plain = {name: x for name, x in ones.items() if name != "attention_mask"}
    yield "plain", lambda: _trained(model, plain)
    if "logits_to_keep" in takes:
        yield "last logits", lambda: _trained(model, plain, logits_to_keep=3)
    if "attention_mask" in ones:
        yield "mask of ones", lambda: _trained(model, ones)
        yield "padded right", lambda: _trained(model, given("right"))
        # Pads on the left see nothing; no output but theirs may be made of theirs.
        if model.can_generate():
            yield "padded left", lambda: _trained(model, given("left"))
            yield "padded on both sides", lambda: _trained(model, given("both"))
    if plain.keys() != {"input_ids"} or not model.can_generate():
        if "attention_mask" in ones and model.can_generate():
            yield "generation", lambda: _generated(model, given("left"))
        return
    tokens = plain["input_ids"]
    if "position_ids" in takes:
        places = torch.arange(tokens.shape[1])
        shifted = (places + 3).expand(tokens.shape)
        yield "positions", lambda: _trained(model, plain | {"position_ids": shifted})
        if "use_cache" in takes:  # with a cache transformers takes a row for one sequence
            yield "bounds", lambda: _trained(model, _packed(tokens), use_cache=False)
            yield "packed", lambda: _trained(model, _by_positions(tokens), use_cache=False)
    if "attention_mask" in ones:
        mask = _mask_of_4_dimensions(*tokens.shape)
        yield "4D mask", lambda: _trained(model, plain, attention_mask=mask)
        if "past_key_values" in takes:
            yield "chunked prefill", lambda: _in_two_parts(model, tokens)
        yield "generation", lambda: _generated(model, given("left"))
        yield (
            "static cache",
            lambda: _generated(model, given("left"), cache_implementation="static"),
        )


@torch.no_grad()
def _keeps_apart(model: Any, choice: int) -> bool:
    """Whether eager gives to packed sequences what each has alone: it looks at the positions, where
    the model hands them to its mask.
    """
    tokens = list(tiny_models.inputs(model, "none"))[choice]["input_ids"]
    packed = model(**_by_positions(tokens), use_cache=False).logits[:, PREFIX:]
    alone = model(input_ids=tokens[1:], use_cache=False).logits
    return torch.allclose(packed, alone, rtol=0, atol=RTOL * float(alone.abs().max()))


def _packed(tokens: Tensor) -> dict[str, Any]:
    """Both texts of a batch in one row, the second one cut, with positions and bounds of each, as
    DataCollatorWithFlattening makes them.
    """
    first, second = tokens[:1, :PREFIX], tokens[1:]
    lengths = first.shape[1], second.shape[1]
    bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    return {
        "input_ids": torch.cat([first, second], 1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def _by_positions(tokens: Tensor) -> dict[str, Tensor]:
    """The same row with positions alone, which begin anew with each text."""
    given = _packed(tokens)
    return {name: given[name] for name in ("input_ids", "position_ids")}


def _mask_of_4_dimensions(batch: int, length: int) -> Tensor:
    """What is added to scores: 0.0 where a query sees a key, of the causal ones four in five."""
    generator = torch.Generator().manual_seed(6)
    visible = torch.rand(batch, 1, length, length, generator=generator) < 0.8
    visible = (visible | torch.eye(length, dtype=torch.bool)).tril()
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)


@torch.no_grad()
def _in_two_parts(model: Any, tokens: Tensor) -> Run:
    """The logits of a prompt whose second part finds the first one in the cache."""
    first = model(input_ids=tokens[:, :PREFIX], use_cache=True)
    cache = first.past_key_values
    second = model(input_ids=tokens[:, PREFIX:], past_key_values=cache, use_cache=True)
    return Run(outputs={"first": first.logits, "second": second.logits}, grads={})


def _trained(model: Any, given: dict[str, Any], **options: Any) -> Run:
    """Outputs of real tokens, and the gradients of a random sum of them."""
    model.zero_grad()
    torch.manual_seed(3)
    real = given.get("attention_mask", torch.ones(0, 0)).bool()
    outputs = dict(_floating("", model(**given, **options)))
    weights = torch.Generator().manual_seed(4)
    loss = torch.zeros(())
    for name, x in outputs.items():
        kept = x[real] if x.shape[:2] == real.shape else x
        outputs[name] = kept.detach()
        if kept.requires_grad:
            finite = torch.where(torch.isfinite(kept), kept, 0)
            loss = loss + (finite * torch.randn(kept.shape, generator=weights)).mean()
    if loss.requires_grad:
        loss.backward()
    parameters = model.named_parameters()
    return Run(
        outputs=outputs,
        grads={name: x.grad.clone() for name, x in parameters if x.grad is not None},
    )


def _floating(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a model's output, by name: no caches, no losses, and no attention
    weights, which BridgeTower returns unasked.
    """
    if isinstance(x, Tensor) and x.is_floating_point():
        yield name, x
    elif isinstance(x, (list, tuple)):
        for index, part in enumerate(x):
            yield from _floating(f"{name}.{index}", part)
    elif hasattr(x, "items"):
        for part_name, part in x.items():
            if part_name not in ("past_key_values", "loss") and "attentions" not in part_name:
                yield from _floating(f"{name}.{part_name}", part)


@torch.no_grad()
def _generated(model: Any, given: dict[str, Tensor], **options: Any) -> Run:
    """Tokens of a greedy continuation, and the scores they were chosen by."""
    made = model.generate(
        **{name: x for name, x in given.items() if name != "decoder_input_ids"},
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    scores = {f"score {index}": x for index, x in enumerate(made.scores)}
    return Run(outputs={"tokens": made.sequences.double(), **scores}, grads={})


def differences(runs: dict[str, Run], wanted: dict[str, Run]) -> str:
    """What differs, each in a few words; "" if nothing does."""
    found = []
    for name, run in wanted.items():
        if name == "bounds" and name not in runs:  # refused
            continue
        outputs = _first_difference(runs[name].outputs, run.outputs, 0.0)
        largest = max((float(x.abs().max()) for x in run.grads.values() if x.numel()), default=0.0)
        grads = _first_difference(runs[name].grads, run.grads, 1e-6 * largest)
        found += [f"{name}: {what}" for what in (outputs, grads) if what]
    return "; ".join(found)


def _first_difference(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float) -> str:
    if found.keys() != wanted.keys():
        return f"other tensors: {sorted(found.keys() ^ wanted.keys())[:3]}"
    for name, x in wanted.items():
        if found[name].shape != x.shape:
            return f"{name} has another shape"
        finite = torch.isfinite(x)
        if not torch.equal(finite, torch.isfinite(found[name])):
            return f"{name} has other infinities"
        if not finite.any():
            continue
        error = float((found[name] - x)[finite].abs().max())
        limit = RTOL * float(x[finite].abs().max()) + atol
        if not error <= limit:
            return f"{name} by {error:.2g}, of which {limit:.2g} is allowed"
    return ""


# ---- a process for each model ------------------------------------------------------------------


def sweep(model_types: Sequence[str]) -> Iterator[Result]:
    """What becomes of each type; one that ends its process is a difference."""
    for model_type in model_types:
        done = programs.run(["-m", "tests.transformers_sweep", "--one", model_type])
        if done.returncode == 0:
            yield from (Result(**each) for each in json.loads(done.stdout.splitlines()[-1]))
            continue
        why = f"the process ended with exit code {done.returncode}"
        for name in backend.NAMES:
            yield Result(model_type=model_type, attention=name, outcome=DIFFERS, detail=why)


def _one(model_type: str) -> None:
    """Print what becomes of a type as the last line, of JSON."""
    prepare()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    found = [asdict(result) for result in compare(model_type)]
    print(f"\n{json.dumps(found)}")


def prepare() -> None:
    """Register our names, and silence transformers."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    backend.register()


# ---- the list ----------------------------------------------------------------------------------


def model_types() -> list[str]:
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING)


def table(results: Iterable[Result]) -> str:
    """The list of docs/integrations.md."""
    import transformers

    by_type: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_type[result.model_type].append(result)
    groups: dict[str, list[str]] = defaultdict(list)
    for model_type, found in sorted(by_type.items()):
        for title, names in titles(found).items():
            only = "" if len(names) == len(found) else f' (as "{names[0]}")'
            groups[title].append(model_type + only)
    built = sum(found[0].outcome != NOT_BUILT for found in by_type.values())
    lines = [
        f"transformers {transformers.__version__}: {len(by_type)} model types, of which {built} were "
        "built tiny and compared with eager"
    ]
    for title in sorted(groups, key=lambda title: (TITLES.index(title.partition(":")[0]), title)):
        names = textwrap.fill(", ".join(groups[title]), 116, break_on_hyphens=False)
        lines += ["", f"{title} ({len(groups[title])})", textwrap.indent(names, "    ")]
    return "\n".join(lines)


def ways() -> str:
    """The table of docs/integrations.md."""
    rows = [f"| {name} | {what} |" for name, what in WAYS.items()]
    return "\n".join(["| way | what it is |", "|---|---|", *rows])


TITLES = [DIFFERS, EQUAL, AS_SDPA, REFUSED, UNREACHED]


def titles(found: Sequence[Result]) -> dict[str, list[str]]:
    """The groups that a type belongs to, with the names of ours that put it there."""
    titles: dict[str, list[str]] = defaultdict(list)
    for result in found:
        if result.outcome == NOT_BUILT:
            continue
        title = result.outcome
        if title == REFUSED:
            title += f": {reason(result.detail)}"
        titles[title].append(result.attention)
    return titles


def reason(message: str) -> str:
    """Why a model was refused, in a few words of the message."""
    if "table of its own" in message:
        return "takes its attention from a table of its own"
    if "computes its own" in message:
        return "computes its own attention, and would add up a boolean mask"
    if " must not be given" in message:
        return f"passes {message.partition(' must')[0]}"
    return "by transformers" if "is not supported" in message else message


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.transformers_sweep")
    parser.add_argument("--types", nargs="+", help="these alone, one line each")
    parser.add_argument("--ways", action="store_true", help="what each model is called with")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one or given.ways:
        _one(given.one) if given.one else print(ways())
        return 0
    results = []
    for result in sweep(given.types or model_types()):
        results.append(result)
        if given.types:
            print(result.model_type, result.attention, result.outcome, result.detail)
    programs.RUNNING.close()
    if not given.types:
        print(table(results))
    different = [result for result in results if result.outcome == DIFFERS]
    for result in different:
        print(f"{result.model_type} {result.attention}: {result.detail}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
