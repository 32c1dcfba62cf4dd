"""The dispatcher on CPU tensors, running the very kernels it would run on a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from flashgen.errors import GeneratedError, InvalidArgument, LaunchError, ToolchainError
from flashgen.kernels import arguments
from flashgen.kernels.plan import Plan
from flashgen.reference.attention import judge
from flashgen.runtime import Dispatcher
from flashgen.spec.problem import BUCKETS
from tests.makers import make_config, make_spec
from tests.package import make_choice, make_dispatcher
from tests.serving import serve, watch_plans

SPECS = [make_spec("bfloat16", 64, mask) for mask in ("none", "causal")]
BY_DESCRIPTOR = make_config(64, 32, schedule="s_ahead", loads="descriptor")
LONGER = make_config(32, 32)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    choices = [
        make_choice(s, c, b)
        for s in SPECS
        for c, b in ((BY_DESCRIPTOR, BUCKETS[0]), (LONGER, BUCKETS[1]))
    ]
    return make_dispatcher(tmp_path, "nvidia_h200", "sm_90", choices)


def draw(
    sq: int = 70, sk: int = 90, heads: int = 4, kv: int = 2, dim: int = 64
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sq + sk + dim)
    return tuple(
        torch.randn(1, h, s, dim).bfloat16() for h, s in ((heads, sq), (kv, sk), (kv, sk))
    )  # fmt: skip


def assert_right(
    dispatcher: Dispatcher, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> None:
    o, lse = dispatcher.attention(q, k, v, return_lse=True, **options)  # type: ignore[call-overload]
    causal = options.get("causal", False)
    diagonal = None if causal is False else 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    scale = options.get("scale", q.shape[3] ** -0.5)
    assert o.dtype == q.dtype
    assert o.shape == (*q.shape[:3], v.shape[3])
    assert judge(o, lse, q, k, v, scale=scale, diagonal=diagonal).passed  # type: ignore[arg-type]


def names_of_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels launched from here on."""
    names: list[str] = []
    watch_plans(monkeypatch, lambda x: names.append(f"{x.spec.name}_{x.config.label}"))
    return names


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_the_kernel_of_the_table_runs_and_is_right(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, causal: object
) -> None:
    names = names_of_launches(monkeypatch)
    assert_right(dispatcher, *draw(), causal=causal)
    assert names == [f"{SPECS[causal is not False].name}_{BY_DESCRIPTOR.label}"]


def test_a_bucket_has_its_own_kernel(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of_launches(monkeypatch)
    assert_right(dispatcher, *draw(sq=3, sk=1023))
    assert_right(dispatcher, *draw(sq=3, sk=1024))
    assert [name.split("_w4")[0] for name in names] == [
        "fwd_bf16_d64_br64_bc32",
        "fwd_bf16_d64_br32_bc32",
    ]


def test_unaligned_tensors_take_the_pointer_twin(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of_launches(monkeypatch)
    q, k, v = draw()
    wide = torch.randn(1, 2, 90, 67).bfloat16()  # rows of 134 bytes: no multiple of 16
    assert_right(dispatcher, q, wide[..., 1:65], v)
    assert_right(dispatcher, q, k[:, :1].expand(1, 2, 90, 64), v)  # a stride of 0
    assert len(names) == 2
    assert all("_fa2_ptr" in name for name in names)


def test_layouts_scales_and_copies(
    dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = draw()
    bshd = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(dispatcher, bshd, k, v, causal=True)
    assert dispatcher.attention(bshd, k, v).stride() == bshd.stride()
    for scale in (-0.2, 0.0, 3.0):
        assert_right(dispatcher, q, k, v, scale=scale)
    turned = k.transpose(2, 3).contiguous().transpose(2, 3)
    for _ in range(2):
        assert_right(dispatcher, q, turned, v)
    storage = torch.randn((1 << 23) + 64).bfloat16()
    far = storage.as_strided((1, 2, 2, 64), (0, 0, 1 << 23, 1))
    assert_right(dispatcher, q, far, far)
    assert [
        r.getMessage().split(" is copied")[0] for r in caplog.records if "copied" in r.getMessage()
    ] == ["k", "v"]


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (9, 5)])
def test_empty_and_unseen(dispatcher: Dispatcher, sq: int, sk: int) -> None:
    q, k, v = draw(sq, sk)
    o, lse = dispatcher.attention(q, k, v, causal=True, return_lse=True)
    assert o.shape == q.shape
    unseen = max(0, sq - sk)
    assert (o[:, :, :unseen] == 0).all()
    assert (lse[:, :, :unseen] == float("-inf")).all()


def test_an_untuned_spec_is_served_by_the_default_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    dispatcher = make_dispatcher(tmp_path, "nvidia_h200", "sm_90")
    q, k, v = draw(dim=40)
    for _ in range(3):
        assert_right(dispatcher, q, k, v, causal=True)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "flashgen tune --target nvidia_l4 --dtype bf16 --head-dim 40 --causal" in said[0]
    assert "default" in str(dispatcher.explain(q, k, v, causal=True))


class OutOfResources(Exception):
    """Named as Triton's: the launcher knows it by its name."""


def fail_with(monkeypatch: pytest.MonkeyPatch, label: str, error: Exception) -> None:
    def fail(plan: Plan) -> None:
        if label in plan.config.label:
            raise error

    watch_plans(monkeypatch, fail)


def test_out_of_resources_takes_the_next_rung_and_logs_it(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_with(monkeypatch, BY_DESCRIPTOR.label, OutOfResources("shared memory, required: 300000"))
    names = names_of_launches(monkeypatch)
    for _ in range(2):
        assert_right(dispatcher, *draw())
    assert [BY_DESCRIPTOR.label in name for name in names] == [True, False, False]
    assert sum("does not fit this GPU" in r.getMessage() for r in caplog.records) == 1


def test_no_rung_left_is_one_sentence(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "", OutOfResources("shared memory"))
    with pytest.raises(LaunchError, match="no kernel fits"):
        dispatcher.attention(*draw())


def test_no_c_compiler_is_named(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, "", RuntimeError("Failed to find C compiler. Please specify via CC"))
    with pytest.raises(ToolchainError, match="C compiler"):
        dispatcher.attention(*draw())


def test_other_errors_pass_through(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, "", KeyError("a bug"))
    with pytest.raises(KeyError):
        dispatcher.attention(*draw())


def test_a_missing_kernel_file_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    choice = make_choice(SPECS[0], LONGER, BUCKETS[1])
    dispatcher = make_dispatcher(tmp_path, "nvidia_h200", "sm_90", [choice])
    for file in tmp_path.rglob("*.py"):
        file.unlink()
    with pytest.raises(GeneratedError, match="flashgen generate"):
        dispatcher.attention(*draw())


def test_a_kernel_file_that_lacks_a_module_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    choice = make_choice(SPECS[0], LONGER, BUCKETS[1])
    dispatcher = make_dispatcher(tmp_path, "nvidia_h200", "sm_90", [choice])
    for file in tmp_path.rglob("*.py"):
        file.write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        dispatcher.attention(*draw())


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same values, the memory holding their negatives."""
    view = torch._neg_view(-x)
    assert torch.equal(view, x)
    return view


def test_a_view_of_negatives_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.complex(a, b).conj().imag is one: kernels read memory, not what torch says of it."""
    dispatcher = serve(monkeypatch)
    q, k, v, bias, do = (torch.randn(1, 2, 16, 32) for _ in range(5))
    bias, slopes, sinks = bias[..., :16], torch.rand(2), torch.randn(2)
    conjugate = torch.complex(torch.zeros(2, 16, 16), -bias[0]).conj().imag
    assert conjugate.is_neg()
    x = q.clone().requires_grad_()
    o = dispatcher.attention(x, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks)
    (gradient,) = torch.autograd.grad(o, x, do, retain_graph=True)
    assert torch.equal(torch.autograd.grad(o, x, negated(do))[0], gradient)
    for given in (
        (negated(q), k, v, bias, slopes, sinks), (q, negated(k), negated(v), bias, slopes, sinks),
        (q, k, v, conjugate, slopes, sinks), (q, k, v, bias, negated(slopes), negated(sinks)),
    ):  # fmt: skip
        found = dispatcher.attention(
            *given[:3], bias=given[3], alibi_slopes=given[4], sinks=given[5]
        )
        assert torch.equal(found, o)
    lengths = torch.full((1,), 9, dtype=torch.int32)
    o = dispatcher.decode(q[:, :, :1], k, v, lengths=lengths)
    found = dispatcher.decode(negated(q[:, :, :1]), negated(k), v, lengths=negated(lengths))
    assert torch.equal(found, o)


def test_a_twin_that_does_not_fit_takes_nothing_from_aligned_tensors(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "br64_bc32_w4_s2_fa2_ptr", OutOfResources("shared memory"))
    q, k, v = draw()
    unaligned = torch.randn(1, 2, 90, 67).bfloat16()[..., 1:65]
    names = names_of_launches(monkeypatch)
    assert_right(dispatcher, q, unaligned, v)
    assert_right(dispatcher, q, k, v)
    assert BY_DESCRIPTOR.label in names[-1]
    assert "br32_bc32" in names[-2]


def test_explain_says_what_runs(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw()
    unaligned = torch.randn(1, 2, 90, 67).bfloat16()[..., 1:65]
    assert "twin" not in str(dispatcher.explain(q, k, v))
    assert "br64_bc32_w4_s2_fa2_ptr" in str(dispatcher.explain(q, unaligned, v))
    fail_with(monkeypatch, BY_DESCRIPTOR.label, OutOfResources("shared memory"))
    dispatcher.attention(q, k, v)
    assert dispatcher.explain(q, k, v).selection.choice.config == LONGER  # type: ignore[union-attr]


def test_a_slug_nobody_knows_is_refused(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h20O")  # a letter for a zero
    with pytest.raises(ValueError, match="nvidia_h20"):
        dispatcher.attention(*draw())


def test_another_device_is_refused_though_a_gpu_is_named(dispatcher: Dispatcher) -> None:
    q, k, v = (x.to("meta") for x in draw())
    with pytest.raises(InvalidArgument, match="q must be on a GPU or on the CPU: got device meta"):
        dispatcher.attention(q, k, v)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, k, v: (q[0], k, v), "q must have shape"),
        (lambda q, k, v: (q[:, :3], k, v), "heads"),
        (lambda q, k, v: (q, k[:, :, :-1], v), "v must have the heads and length"),
        (lambda q, k, v: (q, k.half(), v), "k must have the dtype"),
        (lambda q, k, v: (q[..., :32], k, v), "k must have the head_dim"),
        (lambda q, k, v: (q.expand(2, -1, -1, -1), k, v), "k must have the batch"),
    ],
)
def test_a_resolved_spec_still_checks_its_tensors(
    dispatcher: Dispatcher, change: object, named: str
) -> None:
    q, k, v = draw()
    dispatcher.attention(q, k, v)
    with pytest.raises(ValueError, match=named):
        dispatcher.attention(*change(q, k, v))  # type: ignore[operator]


def test_strides_that_a_narrow_kernel_cannot_take_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    spec = make_spec("bfloat16", 40)
    choices = [make_choice(spec, make_config(64, 32), BUCKETS[0])]
    dispatcher = make_dispatcher(tmp_path, "nvidia_h200", "sm_90", choices)
    arguments._say_copied.cache_clear()  # said once a process
    q, k, v = draw(dim=40)
    wide = torch.randn(1, 2, 90, 43).bfloat16()[..., 1:41]
    assert_right(dispatcher, q, wide, v)
    assert_right(dispatcher, q, k, wide)
    assert sum("no multiples of 8" in r.getMessage() for r in caplog.records) == 1
