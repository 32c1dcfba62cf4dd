"""Continuous batching over a paged cache (Orca, OSDI 2022; vLLM, arXiv 2309.06180), greedy.

A step runs the model once, on the tokens of all sequences at work: one token of each that
generates, and chunks of the prompts of those that do not yet (chunked prefill, Sarathi, arXiv
2308.16369). In each layer the new keys are appended to the pages, with rotary embedding, and then
attended to: those that generate in one call of decode(), each chunk in one of its own. When pages
run out, the sequence that came last gives its back and begins anew later, with what it has
generated as a part of its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from page_pool import PagePool, block_table
from tiny_model import Attend, TinyModel
from torch import Tensor

from flashgen import append, decode


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt of at least one token, and the number of tokens to generate."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request in progress. cached: how many of its tokens are in the cache."""

    request: Request
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the cache does not have yet: 1 once the prompt is done."""
        return len(self.tokens) - self.cached

    @property
    def done(self) -> bool:
        """Whether all requested tokens are generated."""
        return len(self.tokens) == len(self.request.prompt) + self.request.new_tokens


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens of one sequence that a step runs: `count`, from the first that is not cached."""

    sequence: Sequence
    count: int

    @property
    def tokens(self) -> list[int]:
        """These tokens."""
        start = self.sequence.cached
        return self.sequence.tokens[start : start + self.count]

    @property
    def decodes(self) -> bool:
        """Whether it is the last generated token, and no part of a prompt."""
        sequence = self.sequence
        return sequence.waiting_tokens == 1 and len(sequence.tokens) > len(sequence.request.prompt)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Chunks of one length that one call of append() and decode() serves.

    first: index of their first token within the step. lengths: of the cache before the step.
    """

    chunks: tuple[Chunk, ...]
    first: int
    lengths: Tensor
    block_table: Tensor

    @property
    def count(self) -> int:
        """Tokens of each chunk."""
        return self.chunks[0].count

    @property
    def rows(self) -> slice:
        """Its tokens among those of the step."""
        return slice(self.first, self.first + len(self.chunks) * self.count)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of a step: the tokens generated, tokens of prompts, and which requests finished
    or were preempted.
    """

    decoded: int
    prefilled: int
    finished: tuple[str, ...]
    preempted: tuple[str, ...]


class Engine:
    """Serves requests in order of arrival. tokens_per_step limits the tokens of a step, and
    sequences those in progress.

    Raises ValueError for a request that could never be served.
    """

    def __init__(
        self, model: TinyModel, pool: PagePool, *, sequences: int = 8, tokens_per_step: int = 32
    ) -> None:
        if not 1 <= sequences <= tokens_per_step:
            raise ValueError(
                "sequences must be from 1 to tokens_per_step, for each that generates runs a token "
                f"a step: got {sequences} and {tokens_per_step}"
            )
        self.model, self.pool = model, pool
        self.sequences, self.tokens_per_step = sequences, tokens_per_step
        self.results: dict[str, list[int]] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._width = pool.pages_for(model.sizes.positions)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; any time."""
        for request in requests:
            longest = len(request.prompt) + request.new_tokens
            room = min(self.model.sizes.positions, self.pool.pages * self.pool.page_size)
            if not request.prompt or request.new_tokens < 1 or longest > room:
                raise ValueError(
                    f"request {request.name!r} must have a prompt, ask for at least one token and "
                    f"be of {room} tokens in all at most: got {len(request.prompt)} and "
                    f"{request.new_tokens}"
                )
            self._waiting.append(Sequence(request=request, tokens=list(request.prompt)))

    def run(self) -> dict[str, list[int]]:
        """Step until all requests are done; the tokens generated for each, by name."""
        while self._waiting or self._running:
            self.step()
        return self.results

    @torch.no_grad()
    def step(self) -> Step:
        """Run the model once; with nothing at work it does nothing."""
        self._admit()
        chunks, preempted = self._plan()
        decoded = sum(chunk.decodes for chunk in chunks)
        if chunks:
            groups = self._grouped(chunks)
            ordered = [chunk for group in groups for chunk in group.chunks]
            tokens = torch.tensor([token for chunk in ordered for token in chunk.tokens])
            logits = self.model(tokens.to(self.pool.k.device), self._attention(groups))
            last = torch.tensor([chunk.count for chunk in ordered]).cumsum(0) - 1
            self._extend(ordered, logits[last.to(logits.device)].argmax(dim=1).tolist())
        return Step(
            decoded=decoded,
            prefilled=sum(chunk.count for chunk in chunks) - decoded,
            finished=self._retire(),
            preempted=preempted,
        )

    def _admit(self) -> None:
        """Start waiting sequences while there are slots, and pages for all known tokens,
        including those in progress. Otherwise a preempted sequence would be preempted again
        at once. Pages are allocated by _plan.
        """
        promised = sum(self._missing(sequence) for sequence in self._running)
        while self._waiting and len(self._running) < self.sequences:
            promised += self._missing(self._waiting[0])
            if self._running and promised > self.pool.free:
                return
            self._running.append(self._waiting.popleft())

    def _missing(self, sequence: Sequence) -> int:
        """Pages that a sequence lacks for its tokens and the next one."""
        return max(0, self.pool.pages_for(len(sequence.tokens) + 1) - len(sequence.pages))

    def _plan(self) -> tuple[list[Chunk], tuple[str, ...]]:
        """The chunks of the next step, with pages for their tokens; the oldest sequences first,
        and those that generate before prompts.
        """
        preempted: list[str] = []
        chunks: list[Chunk] = []
        budget = self.tokens_per_step
        for sequence in sorted(self._running, key=lambda each: each.waiting_tokens > 1):
            count = min(sequence.waiting_tokens, budget)
            if count == 0 or sequence not in self._running:
                continue
            while not self.pool.grow(sequence.pages, sequence.cached + count):
                youngest = self._running[-1]
                preempted.append(youngest.request.name)
                self._preempt(youngest)
                chunks = [chunk for chunk in chunks if chunk.sequence is not youngest]
                if youngest is sequence:
                    break
            else:
                chunks.append(Chunk(sequence=sequence, count=count))
                budget -= count
        return chunks, tuple(preempted)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to wait, first in the queue; its pages are free."""
        self._running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.cached = 0
        self._waiting.appendleft(sequence)

    def _grouped(self, chunks: list[Chunk]) -> list[Group]:
        """All chunks of one token together, each of the others by itself."""
        single = tuple(chunk for chunk in chunks if chunk.count == 1)
        together = [single] if single else []
        groups: list[Group] = []
        first = 0
        for of_group in (*together, *((chunk,) for chunk in chunks if chunk.count > 1)):
            device = self.pool.k.device
            lengths = torch.tensor([c.sequence.cached for c in of_group], dtype=torch.int32)
            held = [chunk.sequence.pages for chunk in of_group]
            group = Group(
                chunks=of_group,
                first=first,
                lengths=lengths.to(device),
                block_table=block_table(held, self._width, device),
            )
            groups.append(group)
            first = group.rows.stop
        return groups

    def _attention(self, groups: list[Group]) -> Attend:
        """The attention of a step, as the model calls it in each layer."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = torch.empty_like(q)
            for group in groups:
                of_group = (_of_sequences(x[group.rows], group) for x in (q, k, v))
                o[group.rows] = _of_tokens(self._attend(layer, group, *of_group))
            return o

        return attend

    def _attend(self, layer: int, group: Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """O of a group's tokens, whose keys and values join the cache."""
        k_pool, v_pool = self.pool.k[layer], self.pool.v[layer]
        rotated = append(
            k_pool, v_pool, k, v, group.lengths, block_table=group.block_table,
            q=q, cos=self.model.cos, sin=self.model.sin,
        )  # fmt: skip
        o: Tensor = decode(
            rotated, k_pool, v_pool, lengths=group.lengths + group.count,
            block_table=group.block_table, causal=True,
        )  # fmt: skip
        return o

    def _extend(self, chunks: list[Chunk], following: list[int]) -> None:
        """Count a step's tokens as cached, and append the generated tokens to their sequences."""
        for chunk, token in zip(chunks, following, strict=True):
            sequence = chunk.sequence
            sequence.cached += chunk.count
            if sequence.waiting_tokens == 0:
                sequence.tokens.append(token)

    def _retire(self) -> tuple[str, ...]:
        """Release finished sequences."""
        done = [sequence for sequence in self._running if sequence.done]
        for sequence in done:
            self._running.remove(sequence)
            self.pool.release(sequence.pages)
            request = sequence.request
            self.results[request.name] = sequence.tokens[len(request.prompt) :]
        return tuple(sequence.request.name for sequence in done)


def _of_sequences(x: Tensor, group: Group) -> Tensor:
    """(sequences, heads, count, dim) of packed (tokens, heads, dim)."""
    return x.unflatten(0, (len(group.chunks), group.count)).transpose(1, 2)


def _of_tokens(o: Tensor) -> Tensor:
    """The inverse."""
    return o.transpose(1, 2).flatten(0, 1)
