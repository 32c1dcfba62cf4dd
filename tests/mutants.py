"""Breaks one line of flashgen at a time, and says which of the broken lines no test finds.

    python tests/mutants.py              all of MUTANTS, in a copy of this repository
    python tests/mutants.py sm.py        those of files whose path has this in it

A mutant is data: a file, a text that stands in it once, the text in its place, and the tests that
should fail. Each runs in a process forked from one that has imported torch and Triton. A text that
is not there once, and tests that fail unbroken, are errors of this file: the script ends with 2.
It ends with 1 if fewer than 95 % of the mutants are found.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_FOUND = 0.95
LIMIT_S = 600
"""Of one mutant: one that never ends is found by whoever waits for it."""


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str

    @property
    def interpreted(self) -> bool:
        """Whether its tests need Triton's interpreter."""
        return "tests/interpreted" in self.tests


def of(file: str, tests: str, *pairs: tuple[str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file that the same tests should find: (old, new)."""
    return tuple(Mutant(file, old, new, tests) for old, new in pairs)


RIGHT = "tests/interpreted/kernels/test_wrong_kernels.py -k right_one"
PAIRS = "tests/interpreted/kernels/test_pairs.py"

MUTANTS: tuple[Mutant, ...] = (
    # ------------------------------------------------------------------ templates
    *of("templates/attention_fwd.py.jinja", "tests/interpreted/runtime/test_edge_numerics.py -k 128",
        ("row_max, row_sum = tl.full([BR], LEAST, tl.float32)", "row_max, row_sum = tl.full([BR], 0.0, tl.float32)"),
    ),
    *of("templates/attention_fwd.py.jinja", RIGHT,
        ("+ tl.log2(row_sum)) * LN_2", "+ tl.log2(row_sum))"),
    ),
    *of("templates/attention_fwd.py.jinja", f"{PAIRS} -k d32_causal_sink-",
        ("new_max = tl.maximum(row_max, sink)", "new_max = row_max + 0.0 * sink"),
        ("sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E", "sink = tl.load(sinks_ptr + head).to(tl.float32)"),
    ),
    *of("templates/_scores.py.jinja", RIGHT,
        ("row_start + BR + diagonal + right, 0), seq_k)", "row_start + BR + diagonal + right - BC, 0), seq_k)"),
        ("row_start + diagonal + right + 1, 0), seq_k)", "row_start + diagonal + right + BR, 0), seq_k)"),
        ("= 0, seq_k, 0, seq_k // BC * BC", "= 0, seq_k, 0, tl.cdiv(seq_k, BC) * BC"),
    ),
    *of("templates/attention_bwd_dkv.py.jinja", f"{PAIRS} -k d32_causal_window-",
        ("row_end = tl.minimum(tl.maximum(key_start + BC - diagonal + window_left, 0), seq_q)", "row_end = tl.minimum(tl.maximum(key_start + BC - diagonal, 0), seq_q)"),
    ),
    *of("templates/_scores.py.jinja", "tests/interpreted/kernels/test_chunk.py -k largest_chunk",
        ("first_chunk = tl.where(first_chunk < 0, first_chunk + chunk, first_chunk)", "first_chunk = tl.where(first_chunk < 0, first_chunk, first_chunk)"),
    ),
    *of("templates/attention_decode.py.jinja", RIGHT,
        ("full_end = tl.maximum(split_end // BC * BC, split_start)", "full_end = tl.maximum(tl.cdiv(split_end, BC) * BC, split_start)"),
        ("batch = batch_kv // (heads // group)", "batch = batch_kv % (heads // group)"),
    ),
    *of("templates/attention_decode.py.jinja", "tests/interpreted/kernels/test_decode_narrow.py -k beyond",
        ("p *= (v_scales / tile_scale)[None, :]", "p *= v_scales[None, :]"),
        ("acc += tl.dot(p, v) * tile_scale", "acc += tl.dot(p, v)"),
    ),
    *of("templates/attention_combine.py.jinja", "tests/interpreted/kernels/test_decode.py -k parts_may_lie",
        ("parts = (start + tl.arange(0, BC)).to(tl.int64)", "parts = start + tl.arange(0, BC)"),
        ("lse_ptr + row, row_max + tl.log2(row_sum) * LN_2", "lse_ptr + row, row_max * LN_2 + tl.log2(row_sum)"),
    ),
    *of("templates/attention_combine.py.jinja", RIGHT,
        ("rescale = tl.exp2((row_max - new_max) * LOG2_E)", "rescale = tl.exp2(row_max - new_max)"),
    ),
    *of("templates/attention_bwd_dq.py.jinja", RIGHT,
        ("batch = batch_head // heads", "batch = batch_head // heads * 0"),
        ("in_q = (rows < seq_q)[:, None]", "in_q = (rows < seq_q - 1)[:, None]"),
    ),
    *of("templates/attention_bwd_dkv.py.jinja", RIGHT,
        ("for member in tl.range(0, group)", "for member in tl.range(0, 1)"),
        ("do_base += first_row.to(tl.int64) * stride_dos", "do_base += 0 * stride_dos"),
        ("in_k = (keys < seq_k)[:, None]", "in_k = (keys < seq_k - 1)[:, None]"),
    ),
    *of("templates/attention_bwd_delta.py.jinja", "tests/interpreted/kernels/test_backward.py tests/interpreted/runtime/test_autograd.py -k 'test_delta or output_alone'",
        ("delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) - dlse", "delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) + dlse"),
        ("mask=rows < dlse_rows, other=0.0", "mask=rows < dlse_rows, other=1.0"),
    ),
    *of("templates/attention_bwd_dbias.py.jinja", "tests/interpreted/kernels/test_backward.py -k bias_broadcast",
        ("row_start = (row_tile + step // key_steps % row_steps) * BR", "row_start = (row_tile + step // key_steps) * BR"),
        ("outer = step // key_steps // row_steps", "outer = step // row_steps"),
    ),
    *of("templates/append_kv.py.jinja", f"{PAIRS} -k append_",
        ("new = (rows < new_keys) & (places < seq_k) & (slot < kv_heads)", "new = (rows < new_keys) & (slot < kv_heads)"),
    ),
    *of("templates/append_kv.py.jinja", "tests/interpreted/kernels/test_decode.py -k append_writes",
        ("at = tl.minimum(length + rows * q_step, tl.maximum(seq_k - 1, 0))", "at = tl.minimum(length + rows, tl.maximum(seq_k - 1, 0))"),
    ),
    *of("templates/append_kv.py.jinja", "tests/interpreted/kernels/test_decode_narrow.py -k every_number",
        ("magnitude = tl.minimum(tl.abs(x), LARGEST)", "magnitude = tl.abs(x)"),
        ("code = tl.where(x != x, NAN, code)", "code = tl.where(x != x, 0, code)"),
    ),
    *of("templates/_block_mask.py.jinja", f"{PAIRS} -k d32_blockmask-",
        ("whole = tl.load(block_counts_ptr + lists * 2) * STEPS", "whole = tl.load(block_counts_ptr + lists * 2 + 1) * STEPS"),
        ("lists += {{ own_start }} // BLOCK", "lists += 0 * {{ own_start }} // BLOCK"),
    ),
    *of("templates/_varlen.py.jinja", "tests/interpreted/kernels/test_varlen.py -k bounds_behind",
        ("seq_q = tl.minimum(tl.load(q_ends_ptr + batch) - q_begin, total_q - q_begin)", "seq_q = tl.load(q_ends_ptr + batch) - q_begin"),
    ),
    *of("templates/_varlen.py.jinja", "tests/interpreted/kernels/test_varlen.py -k 'test_alone or seqused_is_clamped or nor_left'",
        ("unused_end = tl.where(batch == sequences - 1, total_{{ x }}, unused_end)", "unused_end = tl.where(batch == sequences, total_{{ x }}, unused_end)"),
    ),
    *of("templates/attention_fwd.py.jinja", "tests/interpreted/kernels/test_varlen.py -k keys_in_pages",
        ("slots = ((start + keys) & page_mask).to(tl.int64)", "slots = (start + keys).to(tl.int64)"),
    ),
    *of("templates/_order.py.jinja", "tests/interpreted/kernels/test_orders.py -k 'test_nasty_shapes or each_tile'",
        ("(tiles - 1 - place // together) * BR", "(tiles - place // together) * BR"),
        ("first_head = pid // (heads_together * tiles) * heads_together", "first_head = pid // (heads_together * tiles)"),
    ),
    *of("templates/_features.py.jinja", "tests/interpreted/kernels/test_features.py -k the_cap_is_right",
        ("large = 1.0 - 2.0 / (1.0 +", "large = 1.0 - 1.0 / (1.0 +"),
        ("return tl.where(tl.abs(x) < 0.55, small, large)", "return large"),
    ),
    *of("templates/_features.py.jinja", "tests/interpreted/kernels/test_features.py -k equal_to_the_threshold",
        ("return word.to(tl.int32, bitcast=True) >= keep_threshold", "return word.to(tl.int32, bitcast=True) > keep_threshold"),
    ),
    *of("templates/_features.py.jinja", f"{PAIRS} -k d32_causal_dropout-",
        ("word = tl.where(low_rows, tl.where(low_keys, a, b), tl.where(low_keys, c, d))", "word = tl.where(low_rows, tl.where(low_keys, a, b), tl.where(low_keys, d, c))"),
    ),
    *of("templates/attention_fwd_fa1.py.jinja", "tests/interpreted/kernels/test_kernels.py -k 'test_tiles and fa1'",
        ("new_sum = kept + tl.sum(p, 1)", "new_sum = old_sum + tl.sum(p, 1)"),
        ("first_row = tl.maximum(start - diagonal, 0) // BR * BR", "first_row = tl.maximum(start + BC - diagonal, 0) // BR * BR"),
    ),
    # ------------------------------------------------------------------ spec: rules and sizes
    *of("flashgen/spec/legality.py", "tests/cpu/runtime/test_selection.py -k 'room or weight or shared_memory'",
        ("room = 160 if spec.direction == \"forward\" else 128", "room = 160"),
        ("room = 96 if exact else 80", "room = 96"),
        ("if set(words) & set(PER_SCORE) or len(words) > 2:", "if set(words) & set(PER_SCORE) or len(words) > 3:"),
        ("    if held > room:", "    if held >= room:"),
        ("ahead = 4 * config.br * config.bc * max(1, config.num_stages - 1)", "ahead = 0"),
    ),
    *of("flashgen/spec/legality.py", "tests/cpu/spec/test_config.py tests/cpu/spec/test_hopper_config.py tests/cpu/spec/test_features.py tests/cpu/spec/test_gpu.py",
        ("if need > limit:", "if need > 2 * limit:"),
        ("if config.order != \"plain\" and not spec.causal:", "if config.order != \"plain\" and spec.causal:"),
        ("if spec.block_mask and config.persistent:", "if False:"),
        ("if spec.paged and config.schedule != \"fa2\":", "if False:"),
        ("if config.maxnreg and gpu.arch != \"sm_90\":", "if config.maxnreg and gpu.arch == \"sm_90\":"),
        ("if config.whole_rows and gpu.arch not in MMA_SYNC:", "if False:"),
        ("if threads > 1024:", "if threads >= 1024:"),
        ("if config.split_keys > 1 and spec.direction != \"decode\":", "if False:"),
        ("if walked < least or walked not in TILES:", "if walked not in TILES:"),
    ),
    *of("flashgen/spec/grid_rules.py", "tests/cpu/compile/test_orders.py -k whole_groups",
        ("return min(blocks, sms) if persistent else blocks", "return max(blocks, sms) if persistent else blocks"),
    ),
    *of("flashgen/spec/grid_rules.py", "tests/cpu/spec/test_splits.py",
        ("(math.ceil(tiles / splits) + START_TILES)", "math.ceil(tiles / splits)"),
        ("time(best) < WORTH_SPLITTING * time(1)", "time(best) < time(1)"),
        ("slots = sms * config.blocks_per_sm", "slots = sms"),
        ("return replace(problem, seq_k=min(problem.seq_k, left + problem.seq_q))", "return replace(problem, seq_k=min(problem.seq_k, left))"),
        ("return max(1, min(MOST_SPLITS, problem.seq_k // config.split_keys))", "return max(1, problem.seq_k // config.split_keys)"),
    ),
    *of("flashgen/spec/space.py", "tests/cpu/spec/test_config.py",
        ("return not tma or config.loads == \"descriptor\"", "return True"),
        ("return gpu.arch == \"sm_90\" and config.loads == \"descriptor\"", "return config.loads == \"descriptor\""),
        ("return min(256, max(16, 1 << (value.bit_length() - 1)))", "return min(256, max(16, 1 << value.bit_length()))"),
    ),
    *of("flashgen/spec/problem.py", "tests/cpu/spec/test_spec.py tests/cpu/spec/test_features.py tests/cpu/estimate/test_trip_counts.py",
        ("if self.kv_heads == 0 or self.heads % self.kv_heads:", "if self.kv_heads == 0:"),
        ("return self.low <= seq_k and (self.high is None or seq_k < self.high)", "return self.low <= seq_k and (self.high is None or seq_k <= self.high)"),
        ("return full * (1 - _share_behind(problem)) if spec.causal else full", "return full"),
        ("return seq_q / (2 * seq_k) if seq_k else 0.0", "return 0.5"),
        ("batch = max(LEAST_PACKED, 2 * TUNED_TOKENS // seq)", "batch = 2 * TUNED_TOKENS // seq"),
        ("i * GOLDEN_SHARE % 1", "i * 0.5 % 1"),
        ("return whole * TUNED_CHUNK * (TUNED_CHUNK + 1) // 2 + rest * (rest + 1) // 2", "return whole * TUNED_CHUNK * (TUNED_CHUNK + 1) // 2"),
    ),
    *of("flashgen/spec/whole_rows.py", "tests/cpu/spec/test_config.py tests/cpu/estimate/test_whole_rows.py",
        ("can = gpu.arch in MMA_SYNC and why_no_rows(spec, rows) is None", "can = why_no_rows(spec, rows) is None"),
    ),
    *of("flashgen/spec/packed.py", "tests/interpreted/kernels/test_varlen.py -k 'seqused_is_clamped or keys_in_pages'",
        ("return cu[:-1] + used.clamp(min=0).minimum(cu.diff())", "return cu[:-1] + used.clamp(min=0)"),
        ("return self.page_size.bit_length() - 1", "return self.page_size.bit_length()"),
    ),
    *of("flashgen/spec/packed.py", "tests/cpu/runtime/test_varlen.py -k 'used or page'",
        ("if page_size < 1 or page_size & (page_size - 1):", "if page_size < 1:"),
    ),
    # ------------------------------------------------------------------ kernels: arguments and launches
    *of("flashgen/kernels/arguments.py", f"{PAIRS} -k dropout_window-",
        ("arguments[\"diagonal\"] = seq_k - seq_q if diagonal is None else diagonal", "arguments[\"diagonal\"] = 0 if diagonal is None else diagonal"),
    ),
    *of("flashgen/kernels/launch_cache.py", RIGHT,
        ("tiles = -(-(heads // kv_heads) * seq_q // plan.config.br)", "tiles = heads // kv_heads * seq_q // plan.config.br"),
    ),
    *of("flashgen/kernels/launch_cache.py", "tests/interpreted/kernels/test_decode.py -k append_writes",
        ("rows = max(rows, seq_q)", "rows = min(rows, seq_q)"),
    ),
    *of("flashgen/kernels/launch_backward.py", "tests/interpreted/kernels/test_backward.py -k bias_broadcast",
        ("steps.append(1 if own == length else count)", "steps.append(1)"),
        ("found = found.sum(summed, keepdim=True)", "found = found.mean(summed, keepdim=True)"),
    ),
    # ------------------------------------------------------------------ evaluate: the check, times, quarantine
    *of("flashgen/evaluate/check.py", "tests/cpu/evaluate/test_check.py",
        ("of_torch.fill_uninitialized_memory = True", "of_torch.fill_uninitialized_memory = False"),
        ("with np.errstate(divide=\"ignore\", invalid=\"ignore\", over=\"ignore\"), poisoned_outputs():", "with np.errstate(divide=\"ignore\", invalid=\"ignore\", over=\"ignore\"):"),
        ("if case.scores == \"even\":", "if True:"),
        ("torch.set_deterministic_debug_mode(mode)", "torch.set_deterministic_debug_mode(0)"),
    ),
    *of("flashgen/evaluate/check_attention.py", "tests/cpu/evaluate/test_check.py",
        ("return 2 * config.num_stages + 2", "return 2"),
        ("case(br, 3 * bc, scores=\"falling\"),", "case(br, 3 * bc),"),
        ("packed_case([(br, 3 * bc + 1)], scores=\"growing\"),", "packed_case([(br, 3 * bc + 1)]),"),
    ),
    *of("flashgen/evaluate/check_cache.py", "tests/cpu/evaluate/test_check.py",
        ("ring = (2 * config.num_stages + 2) * bc", "ring = 2 * bc"),
    ),
    *of("flashgen/reference/attention.py", "tests/cpu/evaluate/test_check.py tests/cpu/reference",
        ("RMS_ACCEPTED = 1.15", "RMS_ACCEPTED = 11.5"),
        ("FLOORS_ACCEPTED = 2.0", "FLOORS_ACCEPTED = 20.0"),
        ("return float(\"inf\") if any(x != x for x in figures) else max(figures)", "return max(figures)"),
        ("LSE_TOLERANCE = 2.0**-16", "LSE_TOLERANCE = 2.0**-6"),
        ("if self.elements >= RMS_ELEMENTS else 0.0", "if self.elements >= 0 else 0.0"),
    ),
    *of("flashgen/reference/gradients.py", "tests/cpu/reference",
        ("return reference.compared(found, exact, ideal, summed)", "return reference.compared(exact, exact, ideal, summed)"),
    ),
    *of("flashgen/reference/cases.py", "tests/cpu/evaluate/test_check.py tests/interpreted/kernels/test_wrong_kernels.py",
        ("LARGEST_SCORES = 64.0", "LARGEST_SCORES = 4.0"),
    ),
    *of("flashgen/evaluate/measure.py", "tests/cpu/evaluate/test_measure.py tests/cpu/evaluate/test_unsteady.py",
        ("if self.peak_tflops is not None and rate > PEAK_MARGIN * self.peak_tflops:", "if False:"),
        ("if change > JUMP:", "if change > 100 * JUMP:"),
        ("return ordered[below] + (place - below) * (ordered[above] - ordered[below])", "return ordered[below]"),
        ("words = 2 * max(l2_bytes, 1 << 20) // 4", "words = max(l2_bytes, 1 << 20) // 8"),
    ),
    *of("flashgen/evaluate/quarantine.py", "tests/cpu/evaluate/test_quarantine.py",
        ("return self.stage == held.stage and (everywhere or self.problem == held.problem)", "return self.stage == held.stage"),
        ("if record.triton != self._triton:", "if False:"),
        ("if record.key not in self._retried:", "if True:"),
    ),
    # ------------------------------------------------------------------ search
    *of("flashgen/search/decide.py", "tests/cpu/search/test_decide.py tests/cpu/search/test_final_round.py",
        ("return winner or (default if default.config in beating else incumbent)", "return winner or default"),
        ("least = max(least, min(1.0, (len(alone) - place) * alone[config]))", "least = max(least, min(1.0, alone[config]))"),
        ("return challenger.timing.high_us < other.timing.low_us", "return challenger.timing.median_us < other.timing.median_us"),
        ("return max(p_faster(outcome.passes_us, other.passes_us) for other in others)", "return min(p_faster(outcome.passes_us, other.passes_us) for other in others)"),
        ("if estimate is None or len(measured) < ENOUGH_RATIOS:", "if estimate is None:"),
    ),
    *of("flashgen/search/log.py", "tests/cpu/search/test_log.py",
        ("return key[:-1] if key[0] in (\"compile\", \"check\") else key", "return key"),
        ("if outcome.gpu != self._gpu:", "if False:"),
        ("each.written, each.error = True, error", "each.written = True"),
    ),
    *of("flashgen/search/minimize.py", "tests/cpu/search/test_minimize.py",
        ("return _minimum(done, exhaustive=ended or len(done) == legal.size)", "return _minimum(done, exhaustive=ended)"),
        ("value, point = min(known, key=lambda pair: pair[0])", "value, point = max(known, key=lambda pair: pair[0])"),
        ("if len(done) == most or time.monotonic() >= end:", "if len(done) == most:"),
    ),
    *of("flashgen/search/staged.py", "tests/cpu/search/test_staged.py tests/cpu/search/test_search_guided.py",
        ("replaced=ranked[0].config != goal.incumbent,", "replaced=False,"),
        ("order += [config for config in best if config not in finalists]", "order += []"),
    ),
    # ------------------------------------------------------------------ table
    *of("flashgen/table/diff.py", "tests/cpu/table/test_diff.py",
        ("return (run.date if run else \"\") > (held_run.date if held_run else \"\")", "return (run.date if run else \"\") >= (held_run.date if held_run else \"\")"),
        ("return STRENGTH[new.source] > STRENGTH[old.source]", "return STRENGTH[new.source] < STRENGTH[old.source]"),
        ("return bool(alike and timed and run and other_run and run.protocol == other_run.protocol)", "return bool(alike and timed and run and other_run)"),
        ("return (one.evidence.high_us or math.inf) < (other.evidence.low_us or 0.0)", "return (one.result.median_us or math.inf) < (other.result.median_us or 0.0)"),
    ),
    *of("flashgen/table/rows.py", "tests/cpu/table/test_executed.py tests/cpu/table/test_table.py -k 'twins or follows'",
        ("name.replace(\"_fp16_\", \"_bf16_\")", "name"),
        ("bool(entry.tritons), dtype", "dtype, bool(entry.tritons)"),
    ),
    *of("flashgen/table/entry.py", "tests/cpu/table/test_table.py tests/cpu/table/test_show.py tests/cpu/table/test_executed.py",
        ("and source != \"measured\" and not tritons:", "and False:"),
        ("if not 0 <= self.max_abs_err_floors < math.inf:", "if False:"),
        ("if (source == \"untimed\") != (median_us is None):", "if False:"),
    ),
    # ------------------------------------------------------------------ compile and estimate
    *of("flashgen/compile/occupancy.py", "tests/cpu/compile/test_compile.py tests/cpu/estimate/test_machines.py -k 'residents or how_many_blocks'",
        ("by_warps = gpu.warps_per_sm // num_warps", "by_warps = gpu.warps_per_sm"),
        ("warp_registers = -(-max(1, registers) * gpu.warp_size // unit) * unit", "warp_registers = max(1, registers) * gpu.warp_size"),
        ("taken = shared_bytes + RESERVED_SHARED_BYTES * gpu.is_nvidia", "taken = shared_bytes"),
    ),
    *of("flashgen/estimate/sm.py", "tests/cpu/estimate/test_sm.py",
        ("STAGGER = 60.0", "STAGGER = 0.0"),
        ("return max(trip, residents * max(self._busy(made).values()))", "return trip"),
    ),
    *of("flashgen/estimate/trip_counts.py", "tests/cpu/estimate/test_trip_counts.py",
        ("run = min(together, heads - first)", "run = together"),
        ("full = math.ceil(max(start + config.bc - 1 - shift, 0) / config.br)", "full = math.ceil(max(start - shift, 0) / config.br)"),
    ),
    *of("flashgen/estimate/trip_counts.py", "tests/cpu/estimate/test_estimate_decode.py -k 'test_trips or split_of'",
        ("tiles = max(tiles, config.split_keys // bc)", "tiles = max(tiles, 1)"),
    ),
    *of("flashgen/estimate/trip_counts.py", "tests/cpu/compile/test_orders.py -k as_the_template",
        ("return (backwards + of_a_head) * (heads // 2) + backwards * (heads % 2)", "return (backwards + of_a_head) * (heads // 2)"),
    ),
    *of("flashgen/estimate/estimate.py", "tests/cpu/estimate/test_estimate.py tests/cpu/estimate/test_estimate_decode.py",
        ("residents = min(replayed.residents, math.ceil(len(kind_of) / gpu.sms))", "residents = replayed.residents"),
        ("median_us=max(median_us, least_us),", "median_us=median_us,"),
    ),
    # ------------------------------------------------------------------ runtime
    *of("flashgen/runtime/selection.py", "tests/cpu/runtime/test_selection.py -k 'fused or origins or registers or relatives or nearest or too_large'",
        ("if fused.slug is None or len(origins) > 1 or None in times:", "if fused.slug is None or None in times:"),
        ("return one < sum(two)", "return one < max(two)"),
        ("archs[other] != gpu.arch, apart, other", "archs[other] != gpu.arch, other"),
        ("return abs(index - here), -index", "return abs(index - here), index"),
    ),
    *of("flashgen/runtime/merge.py", "tests/cpu/runtime/test_merge.py",
        ("highest = torch.where(highest == NONE, 0.0, highest)", "highest = highest"),
        ("seen = torch.where((lse == NONE)[..., None], 0.0, o.to(exact))", "seen = o.to(exact)"),
    ),
    *of("flashgen/runtime/cpu.py", "tests/cpu/runtime/test_dispatcher.py -k 'vmap or cpu'",
        ("torch_modes.refuse_batched(q, k, v, features.bias, *of_heads)", "pass"),
        ("plain = features is PLAIN and (causal is False or causal == \"top_left\" or seq_q == seq_k)", "plain = features is PLAIN"),
    ),
    *of("flashgen/runtime/sdpa.py", "tests/interpreted/runtime/test_sdpa.py -k 'is_torchs_function or is_refused_in'",
        ("causal=\"top_left\" if is_causal else False,", "causal=\"bottom_right\" if is_causal else False,"),
        ("if enable_gqa and q.ndim < 3:  # torch refuses these", "if False:"),
        ("if any(x.layout is not torch.strided for x in every):", "if False:"),
    ),
    *of("flashgen/runtime/eager/attention.py", "tests/cpu/reference",
        ("row_max = torch.where(row_max == float(\"-inf\"), 0.0, row_max)", "row_max = row_max"),
        ("else torch.logaddexp(lse, sinks)", "else torch.maximum(lse, sinks)"),
    ),
    *of("flashgen/runtime/eager/visibility.py", "tests/cpu/reference",
        ("return self.keys <= self.rows", "return self.keys < self.rows"),
        ("inside &= self.keys <= self.rows + right", "inside &= self.keys < self.rows + right"),
        ("return words >= features.dropout_threshold", "return words < features.dropout_threshold"),
    ),
    *of("flashgen/runtime/eager/cache.py", "tests/interpreted/kernels/test_decode.py -k append_writes",
        ("end = max(first, min(first + k.shape[2], cache.capacity))", "end = first + k.shape[2]"),
    ),
    *of("flashgen/runtime/eager/cache.py", "tests/cpu/runtime/test_decode.py tests/cpu/runtime/test_decode_features.py -k 'append or rotat'",
        ("half = cos.shape[1]", "half = cos.shape[1] // 2"),
    ),
    # ------------------------------------------------------------------ tune, paper, cli
    *of("flashgen/tune/run_files.py", "tests/cpu/tune/test_run_files.py",
        ("            if kept.request == begun.request:", "            if True:"),
        ("        write_whole(path, json.dumps(asdict(begun), indent=1) + \"\\n\", durable=True)", "        pass"),
    ),
    *of("flashgen/tune/donors.py", "tests/cpu/tune/test_donors.py",
        ("                each.entry.bucket != bucket,\n", "                each.entry.bucket == bucket,\n"),
        ("                each.gpu.arch != self._gpu.arch,\n", "                each.gpu.arch == self._gpu.arch,\n"),
        ("            and why_illegal(spec, config.kernel, self._gpu) is None\n", ""),
        ("if (on_gpu or not must_have_run(config))", "if True"),
        ("if digests[0] == entry.evidence.digest:", "if True:"),
    ),
    *of("flashgen/search/staged.py", "tests/cpu/tune/test_from_tables.py",
        ("offline = _least_right if goal.derived else _right_in_order", "offline = _right_in_order"),
        ("    ranked.sort(key=lambda outcome: outcome.config != evidence.goal.trusted)\n", ""),
    ),
    *of("flashgen/tune/workloads.py", "tests/cpu/tune/test_workloads.py",
        ("if piece.weight > held.weight:", "if piece.weight < held.weight:"),
        ("if not kv_heads or self.heads < kv_heads or self.heads % kv_heads:", "if not kv_heads:"),
    ),
    *of("flashgen/paper/forms.py", "tests/cpu/paper/test_forms.py",
        ("return sum(min(-(-end // bc) * bc, n) if causal else n for end in ends)", "return sum(end if causal else n for end in ends)"),
        ("return sum(loaded + stored for loaded, stored in traffic.values())", "return sum(loaded for loaded, stored in traffic.values())"),
    ),
    *of("flashgen/paper/gradients.py", "tests/cpu/paper/test_exact.py",
        ("ds = p * (dp - d)", "ds = p * dp"),
        ("dk=ds.T @ q", "dk=ds @ q"),
    ),
    *of("flashgen/paper/scan.py", "tests/cpu/paper/test_exact.py",
        ("o=left * a.o + right * b.o", "o=a.o + b.o"),
        ("step, rounds = 2 * step, rounds + 1", "step, rounds = step + 1, rounds + 1"),
    ),
    # ------------------------------------------------------------------ bench
    *of("flashgen/bench/race.py", "tests/cpu/bench/test_bench.py -k 'Judging or Running or Figures'",
        ("status = \"ok\" if error <= reference.FLOORS_ACCEPTED else \"wrong\"", "status = \"wrong\" if error > reference.FLOORS_ACCEPTED else \"ok\""),
        ("for number in {0, case.problem.batch - 1}:", "for number in {0}:"),
        ("return max(_of_forward(found[0], case, x), _of_backward(found[1:], case, x))", "return _of_forward(found[0], case, x)"),
        ("if ready is not None and (line.status == \"ok\" or not contender.own):", "if ready is not None:"),
        ("            if not again:", "            if again:"),
        ("        ceiling.refuse_above(timing)", "        pass"),
    ),
    *of("flashgen/bench/case.py", "tests/cpu/bench/test_bench.py -k Figures",
        ("\"backward\": 2.5, \"both\": 3.5", "\"backward\": 3.5, \"both\": 3.5"),
        ("if case.bytes <= sizes.gigabytes * 1e9:", "if case.bytes <= sizes.gigabytes * 1e12:"),
    ),
    *of("flashgen/bench/record.py", "tests/cpu/bench/test_bench.py -k Record",
        ("return found is None or not set(names) <= {line.name for line in found.lines}", "return found is None"),
        ("return {name for key, name in self._struck if key == case.key}", "return {name for _, name in self._struck}"),
        ("if self._runs[-1].get(name) != now.get(name):", "if False:"),
    ),
    *of("flashgen/bench/listing.py", "tests/cpu/bench/test_bench.py -k Telling",
        ("if line.name in PEERS and line.status == \"ok\" and line.timing", "if line.name in PEERS and line.timing"),
        ("if case.problem[\"seq_k\"] >= LONG:", "if True:"),
        ("return f\"{line.rate:.0f}{floors}\" if line.status == \"ok\" else f\"~~{line.rate:.0f}~~{floors}\"", "return f\"{line.rate:.0f}{floors}\""),
    ),
    # ------------------------------------------------------------------ report
    *of("flashgen/report/calibrate.py", "tests/cpu/report/test_calibrate.py",
        ("if held is None or TRUST[outcome.stage] >= TRUST[held.stage]:", "if held is None or TRUST[outcome.stage] <= TRUST[held.stage]:"),
        ("return o.gpu, o.triton, o.protocol, o.spec, o.problem", "return o.gpu, o.triton, o.spec, o.problem"),
        ("return self.estimate.low_us <= self.measured_us <= self.estimate.high_us", "return self.measured_us <= self.estimate.high_us"),
        ("errors = sorted(math.exp(abs(math.log(pair.ratio))) - 1 for pair in pairs)", "errors = sorted(abs(pair.ratio - 1) for pair in pairs)"),
        ("return math.exp(statistics.fmean(math.log1p(regret) for regret in regrets)) - 1", "return statistics.fmean(regrets)"),
        ("picks = sorted(search, key=lambda pair: pair.estimate.median_us)[:PICKS]", "picks = sorted(search, key=lambda pair: pair.measured_us)[:PICKS]"),
    ),
    *of("flashgen/report/kernel_limits.py", "tests/cpu/report/test_explain.py -k Anatomy",
        ("steady = -1 if spec.direction in BY_KEYS else 0", "steady = 0"),
        ("(\"registers\", (1, shared_bytes)),", "(\"registers\", (registers, 0)),"),
        ("slack = TAIL if self.streams else EVEN", "slack = EVEN"),
    ),
    *of("flashgen/report/explain.py", "tests/cpu/report/test_explain.py -k 'WhyItLost or Rivals or Explanation'",
        ("times = {c: t for c in others if (t := history.last_timing(c)) and not history.failure(c)}", "times = {c: t for c in others if (t := history.last_timing(c))}"),
        ("tied = loss.us <= TIE * min(history.least_us(), loss.winner_us or loss.us)", "tied = loss.us <= TIE * (loss.winner_us or loss.us)"),
        ("within_spread=mine.low_us <= best.high_us,", "within_spread=False,"),
        ("    if ours > theirs:", "    if ours >= theirs:"),
    ),
    *of("flashgen/report/doctor.py", "tests/cpu/report/test_doctor.py -k 'other_programs or does_not_compile or without_a_gpu or clocks'",
        ("alone = \"end other programs on this GPU before measuring\" if (others or 0) > 1 else \"\"", "alone = \"\""),
        ("            if gpu is None or not compiled.able:", "            if gpu is None:"),
    ),
    # ------------------------------------------------------------------ ptx
    *of("flashgen/ptx/clocks.py", "tests/cpu/ptx/test_checks.py tests/cpu/ptx/test_products.py",
        ("seen: Array = np.where(self.generic, view[ASYNC], view[GENERIC])", "seen: Array = view[GENERIC]"),
    ),
    *of("flashgen/ptx/clocks.py", "tests/cpu/ptx/test_tensor_memory.py",
        ("order[after] = np.maximum(order[after], view[GENERIC, issued : issued + self.warps])", "order[after] = np.iinfo(np.int64).max"),
    ),
    *of("flashgen/ptx/warp.py", "tests/cpu/ptx/test_checks.py tests/cpu/ptx/test_elementwise.py -k 'finds or lanes or programs'",
        ("np.maximum(self.view, view, out=self.view)", "pass"),
        ("published = self.view.copy()", "published = self.view.copy() * 0"),
        ("self.position = min(position for position, _ in paths)", "self.position = max(position for position, _ in paths)"),
        ("self.others = [path for path in paths if path[0] != self.position]", "self.others = []"),
    ),
    *of("flashgen/ptx/shadow.py", "tests/cpu/ptx/test_checks.py",
        ("self.read[agent, cells] = count", "pass"),
        ("missing = self.writer[cells] == self.agents.nobody", "missing = np.zeros(len(cells), bool)"),
        ("by_write = (writers >= 0) & (writers != block)", "by_write = writers > block"),
        ("by_read |= (readers == block) & (self.read[cells] > order[self.reader[cells]])", "pass"),
        ("np.where((readers == -1) | (readers == block), block, MANY)", "np.full_like(readers, block)"),
    ),
    *of("flashgen/ptx/memory.py", "tests/cpu/ptx/test_checks.py tests/cpu/ptx/test_launch.py -k 'finds or outside or bounds'",
        ("if begin <= low and high <= end:", "if begin <= low and low < end:"),
        ("if low < 0 or high + size > self.size:", "if low < 0 or high > self.size:"),
        ("if size > 1 and int(np.bitwise_or.reduce(at)) & size - 1:", "if False:"),
    ),
    *of("flashgen/ptx/access.py", "tests/cpu/ptx/test_checks.py tests/cpu/ptx/test_launch.py",
        ("if conflict is not None and not (conflict.wrote and not changes()):", "if conflict is not None:"),
        ("if found is None or (writes and found[2] and not changes()):", "if found is None or writes:"),
    ),
    *of("flashgen/ptx/schedule.py", "tests/cpu/ptx/test_checks.py tests/cpu/ptx/test_elementwise.py",
        ("if mbarrier.valid and mbarrier.bytes:", "if False:"),
        ("        if barrier.arrived:", "        if False:"),
    ),
    *of("flashgen/ptx/tensor_map.py", "tests/cpu/ptx/test_checks.py -k box",
        ("inside = inside & (index >= 0) & (index < self.shape[axis])", "inside = inside & (index < self.shape[axis])"),
        ("offsets = offsets + index * self.strides[axis] * self.size", "offsets = offsets + index * self.strides[axis]"),
        ("addresses ^ (((addresses >> 7) & ((1 << bits) - 1)) << 4)", "addresses ^ (((addresses >> 8) & ((1 << bits) - 1)) << 4)"),
    ),
    *of("flashgen/ptx/fragments.py", "tests/cpu/ptx/test_products.py",
        ("(bits & np.uint32(0xFFFFE000)).view(np.float32)", "bits.view(np.float32)"),
        ("return columns.transpose(1, 2, 0, 3).reshape(16, -1)", "return columns.transpose(2, 1, 0, 3).reshape(16, -1)"),
        ("offsets = row // 8 * descriptor.stride + row % 8 * width + k * size", "offsets = row // 8 * descriptor.leading + row % 8 * width + k * size"),
    ),
    *of("flashgen/ptx/tensor_memory.py", "tests/cpu/ptx/test_tensor_memory.py",
        ("lanes, columns, width = thread % 16, thread // 16 * split, 1", "lanes, columns, width = thread % 16, thread // 16, 1"),
        ("if not any(first <= low and high < first + held for first, held in self.held.items()):", "if not self.held:"),
        ("for first, columns in self.held.items():\n            yield", "for first, columns in ():\n            yield"),
    ),
    # ------------------------------------------------------------------ paper
    *of("flashgen/paper/parallel.py", "tests/cpu/paper/test_exact.py",
        ("return programs / (math.ceil(programs / sms) * sms)", "return min(1.0, programs / sms)"),
    ),
    *of("flashgen/paper/gpt2.py", "tests/cpu/paper/test_exact.py",
        ("weights = 12 * self.layers * self.width**2 + VOCABULARY * self.width", "weights = 12 * self.layers * self.width**2"),
        ("return (self.products + self.standard) / (self.products + self.tiled)", "return self.standard / self.tiled if self.tiled else 1.0"),
    ),
    *of("flashgen/paper/memories.py", "tests/cpu/paper/test_exact.py",
        ("return bytes_a_cycle * cycles / 1e12 if bytes_a_cycle and cycles else None", "return bytes_a_cycle * cycles / 2e12 if bytes_a_cycle and cycles else None"),
        ("name=\"HBM or GDDR\", bytes=sheet.memory_gb * 1e9,", "name=\"HBM or GDDR\", bytes=80e9,"),
    ),
    *of("flashgen/paper/finding.py", "tests/cpu/paper/test_exact.py tests/cpu/paper/test_page.py -k 'verdict or fails or some_points'",
        ("        return verdicts[0] if self.holds else \"fails\"", "        return verdicts[-1] if self.holds else \"fails\""),
        ("if self.points is None or self.points[0] == self.points[1]:", "if True:"),
    ),
    *of("flashgen/cli/options.py", "tests/cpu/cli/test_cli.py -k 'slug or feature'",
        ("if slug != slug_of(slug) or len(slug) > LONGEST_NAME:  # a path is no slug", "if False:"),
        ("check_word(\"--feature\", word, FEATURE_WORDS)", "pass"),
    ),
)  # fmt: skip


def main(wanted: list[str]) -> int:
    """The exit code."""
    chosen = [m for m in MUTANTS if not wanted or any(word in m.file for word in wanted)]
    if wrong := misplaced(chosen):
        print("\n".join(wrong))
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "flashgen"
        _copy(copy)
        ended: list[tuple[Mutant, bool]] = []
        for interpreted in (False, True):
            those = [mutant for mutant in chosen if mutant.interpreted == interpreted]
            ended += _all_in_forks(those, copy, interpreted=interpreted)
    survived = [mutant for mutant, found in ended if not found]
    if len(ended) < len(chosen):
        return 2
    for mutant in survived:
        print(f"survived: {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    share = 1 - len(survived) / max(1, len(ended))
    print(f"{len(ended) - len(survived)} of {len(ended)} mutants found ({share:.1%})")
    return int(share < LEAST_FOUND)


def misplaced(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """What of this file no longer fits the repository, one sentence each."""
    wrong = []
    for mutant in mutants:
        file = root / mutant.file
        count = file.read_text().count(mutant.old) if file.exists() else 0
        if count != 1:
            wrong.append(
                f"{mutant.file} must hold this text once, it does {count} times: {mutant.old}"
            )
        for word in shlex.split(mutant.tests):
            if word.startswith("tests/") and not (root / word).exists():
                wrong.append(f"{word} does not exist: tests of a mutant of {mutant.file}")
    return wrong


def _copy(to: Path) -> None:
    """The files of the repository that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def _all_in_forks(
    mutants: list[Mutant], copy: Path, *, interpreted: bool
) -> list[tuple[Mutant, bool]]:
    """Each mutant, and whether its tests failed; fewer where tests fail unbroken.

    A process of its own imports torch and Triton once, the latter as interpreter or not.
    """
    pid = os.fork()
    result = copy.parent / f"ended-{interpreted}"
    if pid == 0:
        try:
            _import_once(copy, interpreted=interpreted)
            with result.open("w", buffering=1) as ended:
                _run_all(mutants, copy, ended.write)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    ended = zip(mutants, result.read_text().split(), strict=True)
    return [(mutant, line == "found") for mutant, line in ended if line != "unknown"]


def _import_once(copy: Path, *, interpreted: bool) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy),
        "NUMBA_CACHE_DIR": str(copy.parent / "numba"), "TESTS_CACHE": str(copy.parent / "cache"),
        "TRITON_CACHE_DIR": str(copy.parent / "cache" / "triton"),
    }  # fmt: skip
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    sys.dont_write_bytecode = True
    os.chdir(copy)
    sys.path[0] = str(copy)
    import hypothesis
    import jinja2
    import pytest
    import torch
    import triton

    assert all((hypothesis, jinja2, pytest, triton))
    torch.set_num_threads(1)


def _run_all(mutants: list[Mutant], copy: Path, say: Callable[[str], object]) -> None:
    whole: dict[str, bool] = {}
    for mutant in mutants:
        if mutant.tests not in whole:
            whole[mutant.tests] = _fails(mutant.tests)
            if whole[mutant.tests]:
                print(f"these tests fail without a mutant: {mutant.tests}", flush=True)
        if whole[mutant.tests]:
            say("unknown\n")
            continue
        file = copy / mutant.file
        text = file.read_text()
        file.write_text(text.replace(mutant.old, mutant.new))
        begun = time.monotonic()
        found = _fails(mutant.tests)
        file.write_text(text)
        took = time.monotonic() - begun
        print(
            f"{'found' if found else 'SURVIVED':8} {took:5.0f} s  {mutant.file}: {mutant.new}",
            flush=True,
        )
        say("found\n" if found else "survived\n")


def _fails(tests: str) -> bool:
    """Whether one of the tests fails, or they do not end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
            code = int(pytest.main([*options, *shlex.split(tests)]))
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
