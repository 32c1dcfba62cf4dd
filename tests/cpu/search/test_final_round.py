"""THE RULE of the final round: by hand, and on a GPU whose noise and drifting clock are made up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from flashgen.evaluate import measure
from flashgen.evaluate.measure import BUDGETS, Ceiling
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome
from flashgen.search import decide
from flashgen.search.decide import LEVEL, SMALLEST_EFFECT, choose, p_faster, p_value
from tests.searches import PROBLEM, SPACE, SPEC, fake

A, B, C, D = SPACE[:4]
PASSES = 20


def raced(config: KernelConfig, *passes: float, spread: float = 50.0) -> Outcome:
    """A final round's outcome. Its band is wide, so that it is the passes which decide."""
    us = sorted(passes)[len(passes) // 2]
    outcome = fake(us=lambda _: us, spread=spread).outcome("final", SPEC, PROBLEM, config)
    return replace(outcome, passes_us=passes)


def shaken(us: float, *, by: float = 0.01, seed: int = 0, count: int = PASSES) -> tuple[float, ...]:
    """Passes around `us` with some noise, the same for the same seed."""
    draw = random.Random(seed)
    return tuple(us * (1 + by * draw.uniform(-1, 1)) for _ in range(count))


def by_median(*outcomes: Outcome) -> list[Outcome]:
    return sorted(outcomes, key=lambda o: o.timing.median_us if o.timing else math.inf)


NINE_OF_TEN = (*(95.0 + 0.1 * n for n in range(9)), 99.6)
"""Passes that beat 100 us, but for one, and lost that by less than they won any other: p 2/1024."""


class TestTheTest:
    def test_it_pairs_passes(self) -> None:
        """A clock that doubles every time hides nothing: within each pass one is 2 % faster."""
        clock = [1.3**n for n in range(PASSES)]
        noise = zip(shaken(1.0, by=0.005), shaken(1.0, by=0.005, seed=1), strict=True)
        one, other = zip(*noise, strict=True)
        slower = tuple(100 * c * n for c, n in zip(clock, one, strict=True))
        faster = tuple(98 * c * n for c, n in zip(clock, other, strict=True))
        assert p_faster(faster, slower) < 1e-4
        assert p_faster(faster, slower[::-1]) > 0.1  # other pairs, and there is nothing to see

    def test_it_has_one_side(self) -> None:
        fast, slow = shaken(95.0), shaken(100.0, seed=1)
        assert p_faster(fast, slow) < 1e-4
        assert p_faster(slow, fast) > 0.999

    def test_the_smallest_effect_is_asked_for(self) -> None:
        other = shaken(100.0, by=0.001)
        just = [us / (1 + SMALLEST_EFFECT) for us in other]
        more, less = (tuple(us * factor for us in just) for factor in (0.9999, 1.0001))
        assert p_faster(more, other) < 1e-4  # by a little more, each time
        assert p_faster(less, other) > 0.99

    def test_the_exact_p_of_few(self) -> None:
        for count in (1, 5, 10):
            p = p_faster(shaken(50.0, count=count), shaken(100.0, count=count, seed=1))
            assert p == pytest.approx(0.5**count)

    def test_ten_passes_are_enough_and_six_are_not(self) -> None:
        assert BUDGETS["final"].least == 10
        for count, chosen in ((10, A), (6, B)):
            fast, slow = shaken(50.0, count=count), shaken(100.0, count=count, seed=1)
            held = raced(B, *slow)
            challengers = [raced(c, *fast) for c in SPACE[2:11]]
            winner = choose([raced(A, *fast), *challengers, held], [held])
            assert winner is not None
            assert winner.config == chosen

    def test_what_is_equal_proves_nothing(self, recwarn: pytest.WarningsRecorder) -> None:
        same = (100.0,) * PASSES
        just = (100.0 / math.exp(math.log1p(SMALLEST_EFFECT)),) * PASSES
        assert p_faster(same, same) > 0.99
        assert p_faster(just, same) > 0.99
        assert p_faster((90.0,) * PASSES, same) < 1e-4  # all ties, but all on one side
        assert not recwarn.list

    def test_one_pass_that_was_hit_decides_nothing(self) -> None:
        fast, slow = shaken(97.0), shaken(100.0, seed=1)
        hit = (*fast[:7], 5000.0, *fast[8:])
        assert p_faster(hit, slow) < LEVEL
        assert p_faster(slow, hit) > 0.9


class TestTheRule:
    @pytest.mark.parametrize(
        ("challenger", "incumbent", "default", "winner"),
        [
            (90.0, 100.0, 110.0, "challenger"),
            (99.8, 100.0, 110.0, "incumbent"),  # faster, but not by the smallest effect
            (98.0, 110.0, 98.2, "default"),  # beats the incumbent, not the default
            (120.0, 100.0, 99.8, "incumbent"),
            (120.0, 100.0, 90.0, "default"),
            (90.0, None, 100.0, "challenger"),
            (99.8, None, 100.0, "default"),
            (99.8, 100.0, None, "incumbent"),
            (99.8, None, None, "challenger"),
        ],
    )
    def test_who_is_written(
        self, challenger: float, incumbent: float | None, default: float | None, winner: str
    ) -> None:
        noise = shaken(1.0, by=0.002)
        rounds = {
            name: raced(config, *(us * each for each in noise))
            for name, config, us in (
                ("challenger", A, challenger), ("incumbent", B, incumbent), ("default", C, default),
            )
            if us is not None
        }  # fmt: skip
        held = [rounds[name] for name in ("incumbent", "default") if name in rounds]
        assert choose(by_median(*rounds.values()), held) == rounds[winner]
        assert choose([], []) is None

    def test_of_several_that_win_the_fastest(self) -> None:
        held = raced(C, *shaken(100.0))
        steady, faster = raced(A, *shaken(95.0, seed=1)), raced(B, *shaken(90.0, seed=2))
        assert choose(by_median(held, steady, faster), [held]) == faster

    def test_a_lucky_median_does_not_hide_a_steady_second(self) -> None:
        held = raced(C, *[100.0] * PASSES)
        lucky = raced(A, *[80.0] * 11, *[130.0] * 9)
        steady = raced(B, *shaken(95.0))
        assert choose([lucky, steady, held], [held]) == steady

    def test_a_challenger_is_chosen_before_a_default_of_a_luckier_median(self) -> None:
        """It wins every pass against the default but one, which it loses by far."""
        incumbent, default = raced(B, *[200.0] * 20), raced(C, *[100.0] * 11, *[110.0] * 9)
        challenger = raced(A, *[99.0] * 10, 120.0, *[109.0] * 9)
        finals = by_median(incumbent, default, challenger)
        assert finals[0] == default
        assert choose(finals, [incumbent, default]) == challenger

    def test_p_grows_with_the_number_of_challengers(self) -> None:
        """Nine of ten passes won: enough for one challenger, not for one of four."""
        held = raced(C, *[100.0] * 10)
        odd = raced(A, *NINE_OF_TEN)
        alone = p_faster(odd.passes_us, held.passes_us)
        assert alone == pytest.approx(2 / 1024)
        hopeless = [raced(config, *(110.0 + n for n in range(10))) for config in SPACE[3:9]]
        for others, chosen in ((hopeless[:4], A), (hopeless[:5], C)):
            finals = by_median(odd, held, *others)
            winner = choose(finals, [held])
            assert winner is not None
            assert winner.config == chosen
            p = p_value(odd, finals, [held])
            assert p == pytest.approx((1 + len(others)) * alone)

    def test_steps_of_holm(self) -> None:
        """The second of two pays for itself alone, and never less than the first."""
        held = raced(C, *[100.0] * 10)
        first, second = raced(A, *(90.0 + 0.1 * n for n in range(10))), raced(B, *NINE_OF_TEN)
        finals = by_median(first, second, held)
        assert p_value(first, finals, [held]) == pytest.approx(2 / 1024)
        assert p_value(second, finals, [held]) == pytest.approx(2 / 1024)
        third = raced(D, *NINE_OF_TEN)
        finals = by_median(first, second, third, held)
        assert p_value(first, finals, [held]) == pytest.approx(3 / 1024)
        assert p_value(second, finals, [held]) == pytest.approx(2 * 2 / 1024)
        assert p_value(third, finals, [held]) == pytest.approx(2 * 2 / 1024)  # not 1 * 2 / 1024

    def test_p_is_that_of_the_strongest_rival(self) -> None:
        noise = shaken(1.0, by=0.02)
        challenger = raced(A, *shaken(99.0, by=0.02, seed=3))
        incumbent, default = (
            raced(config, *(us * n for n in noise)) for config, us in ((B, 100.0), (C, 150.0))
        )
        finals = by_median(challenger, incumbent, default)
        p = p_value(challenger, finals, [incumbent, default])
        against = [p_faster(challenger.passes_us, o.passes_us) for o in (incumbent, default)]
        assert against[0] > 100 * against[1]
        assert p is not None
        assert against[0] <= p <= 2 * against[0]

    def test_whose_p_it_is(self) -> None:
        challenger, incumbent, default = (
            raced(config, *shaken(us, seed=seed))
            for config, us, seed in ((A, 99.9, 1), (B, 100.0, 2), (C, 100.8, 3))
        )
        finals = by_median(challenger, incumbent, default)
        stays = p_value(incumbent, finals, [incumbent, default])
        assert stays == pytest.approx(p_faster(incumbent.passes_us, default.passes_us))
        assert p_value(default, [challenger, default], [default]) is None  # no other is held
        assert p_value(incumbent, [challenger, incumbent], [incumbent]) is None
        won = p_value(default, by_median(default, incumbent), [incumbent, default])
        assert won == pytest.approx(p_faster(default.passes_us, incumbent.passes_us))
        assert p_value(challenger, [challenger], []) is None

    def test_a_p_is_never_nothing(self) -> None:
        challenger, held = raced(A, *[50.0] * 250), raced(B, *[100.0] * 250)
        assert p_value(challenger, [challenger, held], [held]) == decide.LEAST_P


# The simulation


NO_CEILING = Ceiling(operations=1.0, peak_tflops=None)
_DRAW = random.Random(3)
NOISE = [_DRAW.gauss(1.0, 0.03) for _ in range(50_021)]
TRIALS = 1000
US = 4000.0


def steady(draw: random.Random) -> Callable[[float], float]:
    return lambda seconds: 1.0


def ramp(draw: random.Random) -> Callable[[float], float]:
    """As a board warms, or cools: up to 10 % a second."""
    slope = draw.uniform(-0.1, 0.1)
    return lambda seconds: math.exp(slope * seconds)


def wave(draw: random.Random) -> Callable[[float], float]:
    """As a controller swings: 5 % each way, a second or ten for once."""
    rate, phase = 2 * math.pi / draw.uniform(0.5, 10.0), draw.uniform(0, 2 * math.pi)
    return lambda seconds: 1 + 0.05 * math.sin(rate * seconds + phase)


def steps(draw: random.Random) -> Callable[[float], float]:
    """As clocks change in steps: to any of 20 %, every half second or so."""
    levels = [draw.uniform(1.0, 1.2) for _ in range(40)]
    length = draw.uniform(0.2, 1.0)
    return lambda seconds: levels[int(seconds / length) % len(levels)]


DRIFTS = (steady, ramp, wave, steps)


class Drifting:
    """A stopwatch whose launches take run() microseconds, times the clock's drift, times noise."""

    def __init__(self, draw: random.Random, drift: Callable[[float], float]) -> None:
        self.seconds = 0.0
        self._place = draw.randrange(len(NOISE))
        self._drift = drift

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        usual, times = float(run()), []  # type: ignore[arg-type]
        for _ in range(count):
            self._place = (self._place + 1) % len(NOISE)
            us = usual * self._drift(self.seconds) * NOISE[self._place]
            self.seconds += us * 1e-6
            times.append(us)
        return times

    def now(self) -> float:
        return self.seconds

    def clock_mhz(self) -> float | None:
        return None


def replaced(draw: random.Random, drift: Callable[[float], float], *faster: float) -> bool:
    """Whether a final round replaces the incumbent by one of these challengers.

    faster: by which share of its time each is; below 0, slower. Where there are several, the default
    is another than the incumbent, and 8 % slower.
    """
    times = {config: US * (1 - share) for config, share in zip(SPACE[2:], faster, strict=False)}
    times |= {A: US, B: 1.08 * US} if len(faster) > 1 else {A: US}
    order = draw.sample(list(times), len(times))
    each = measure.interleave(
        [lambda us=times[config]: us for config in order],  # type: ignore[misc]
        stopwatch=Drifting(draw, drift),
        ceilings=[NO_CEILING] * len(order),
    )
    finals = [
        replace(OUTCOMES[config], timing=one.timing, passes_us=one.passes_us)
        for config, one in zip(order, each, strict=True)
    ]
    finals.sort(key=lambda o: o.timing.median_us if o.timing else math.inf)
    held = [o for config in (A, B) for o in finals if o.config == config]
    winner = choose(finals, held)
    assert winner is not None
    return winner.config != A


OUTCOMES = {config: raced(config, 1.0) for config in SPACE[:8]}


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warming, which decides nothing here, and half the passes: it would take too long."""
    budget = replace(BUDGETS["final"], warm_s=0.0, sample_s=0.5)
    monkeypatch.setitem(measure.BUDGETS, "final", budget)


@pytest.mark.usefixtures("warm")
class TestOnADriftingClock:
    SLOWER = (0.001, 0.002, 0.005, 0.01, 0.03)

    def test_a_slower_challenger_replaces_nothing(self) -> None:
        """Under 1 % of 1,000 rounds, over all drifts, from 0.1 % to 3 % slower, alone or of three."""
        draw = random.Random(0)
        rounds = itertools.cycle(itertools.product(DRIFTS, self.SLOWER, (1, 1, 1, 3)))
        wrong = [
            replaced(draw, drift(draw), *[-slower] * count)
            for drift, slower, count in itertools.islice(rounds, TRIALS)
        ]
        assert sum(wrong) < 0.01 * TRIALS

    def test_luck_alone_would_replace_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same rounds decided by their medians: what THE RULE is there for."""
        monkeypatch.setattr(decide, "_corrected", lambda finals, held: {finals[0].config: 0.0})
        draw = random.Random(0)
        wrong = [replaced(draw, DRIFTS[n % 4](draw), -0.001) for n in range(100)]
        assert sum(wrong) > 20

    @pytest.mark.parametrize("drift", DRIFTS)
    def test_a_faster_one_replaces_it(self, drift: Callable[..., Callable[[float], float]]) -> None:
        """By 3 %, which is the noise of a single launch."""
        draw = random.Random(1)
        right = [replaced(draw, drift(draw), 0.03, -0.01) for _ in range(25)]
        assert sum(right) >= 24

    def test_the_level_is_kept_where_it_is_hardest(self) -> None:
        """Exactly as much faster as is not enough: one round in a hundred may be wrong."""
        draw = random.Random(2)
        just = 1 - 1 / (1 + SMALLEST_EFFECT)
        wrong = [replaced(draw, DRIFTS[n % 4](draw), just) for n in range(400)]
        assert sum(wrong) <= 10  # 4 are expected; more than 10 are a chance of 1 in 300
