"""The reader of optimized programs: known products, bytes, collectives and loops, in excerpts of
what XLA writes for GPUs and TPUs, and in small programs that it compiles for this CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    from hlo import Counts, count
    from hlo.program import ArrayType, parse, parse_types, trip_count

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


GROUPED = {"sizes": "s32[4]{0}", "x": "bf16[64,16]{1,0}", "w": "bf16[4,16,24]{2,1,0}"}


def counted(*lines: str, more: str = "", peak: float = 1e12, bandwidth: float = 1e9) -> Counts:
    """The counts of a program of these instructions; `more` are other computations."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule test\n{ADD}{more}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return count(text, peak, bandwidth)


def test_types_of_both_compilers_are_read() -> None:
    tpu = "(bf16[8,1024,768]{1,2,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[]{:S(2)}, f32[2]{0:T(256)})"
    assert parse_types(tpu) == (
        ArrayType("bf16", (8, 1024, 768), 1),
        ArrayType("u32", (), 2),
        ArrayType("f32", (2,)),
    )
    assert [array.bytes for array in parse_types(tpu)] == [8 * 1024 * 768 * 2, 4, 8]
    sizes = {"pred[3]": 3, "f8e4m3fn[4]": 4, "s4[6]{0:E(4)}": 3, "c64[2]": 16, "u8[0]{0}": 0}
    for text, size in (sizes | {"token[]": 0, "f64[]": 8}).items():
        assert sum(array.bytes for array in parse_types(text)) == size, text


def test_products_are_counted_by_dtype() -> None:
    found = counted(
        "%p = bf16[4,128,64]{2,1,0} parameter(0)",
        "%q = bf16[4,64,256]{2,1,0} parameter(1)",
        "ROOT %dot.1 = f32[4,128,256]{2,1,0} dot(%p, %q), lhs_batch_dims={0},"
        " lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1},"
        ' metadata={op_name="jit(f)/dot_general(x)"}',
    )
    assert found.products == {"bf16 x bf16 -> f32": 2 * 4 * 128 * 256 * 64}
    assert found.bytes == 4 * (128 * 64 + 64 * 256) * 2 + 4 * 128 * 256 * 4
    assert found.seconds == pytest.approx(max(found.flops / 1e12, found.bytes / 1e9))


def test_products_that_a_tpu_writes_as_convolutions_are_those_of_the_dot() -> None:
    plain = counted(
        "%p = bf16[8192,768]{1,0:T(8,128)(2,1)} parameter(0)",
        "%q = bf16[768,3072]{1,0:T(8,128)(2,1)} parameter(1)",
        "ROOT %c = f32[8192,3072]{1,0} convolution(%p, %q), dim_labels=bf_io->bf",
    )
    assert plain.flops == 2 * 8192 * 768 * 3072
    # Attention's batched product: heads as a spatial axis whose window only meets itself.
    batched = counted(
        "%p = bf16[8,12,64]{2,1,0} parameter(0)",
        "%q = bf16[8,12,32]{2,1,0} parameter(1)",
        "ROOT %c = f32[8,64,32]{2,1,0} convolution(%p, %q), window={size=8 stride=7 pad=0_0"
        " lhs_dilate=8 rhs_reversal=0}, dim_labels=0fb_0io->0bf",
    )
    assert batched.flops == 2 * 8 * 12 * 64 * 32
    padded = counted(
        "%p = f32[1,5,3]{2,1,0} parameter(0)",
        "%q = f32[3,3,2]{2,1,0} parameter(1)",
        "ROOT %c = f32[1,5,2]{2,1,0} convolution(%p, %q), window={size=3 pad=1_1},"
        " dim_labels=b0f_0io->b0f",
    )
    assert padded.flops == 2 * (3 * 5 - 2) * 3 * 2  # two of the fifteen meet padding


LOOP = """
%body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state = (s32[]{:T(128)}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%next, %y)
}

%condition (state.1: (s32[], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(12)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

%outer (state.2: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state.2 = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %inner = (s32[], f32[8,8]{1,0}) while(%state.2), condition=%condition, body=%body
}
"""


def test_loops_count_as_often_as_they_run() -> None:
    start = ("%zero = s32[] constant(0)", "%p = f32[8,8]{1,0} parameter(0)")
    pair = "%pair = (s32[], f32[8,8]{1,0}) tuple(%zero, %p)"
    loop = "(s32[], f32[8,8]{1,0}) while(%pair), condition=%condition, body="
    one = counted(*start, pair, f"ROOT %while = {loop}%body", more=LOOP)
    assert one.flops == 12 * 2 * 8**3
    assert one.bytes == 12 * (2 * 8 * 8 * 4 + 3 * 4)  # the product, and the counter's addition
    assert [(entry.name, entry.trips, entry.times) for entry in one.loops] == [("body", 12, 1)]
    stated = ', backend_config={"known_trip_count":{"n":"5"}}'
    nested = counted(*start, pair, f"ROOT %while = {loop}%outer{stated}", more=LOOP)
    assert nested.flops == 5 * 12 * 2 * 8**3
    assert {(entry.name, entry.trips, entry.times) for entry in nested.loops} == {
        ("outer", 5, 1),
        ("body", 12, 5),
    }


FUSED = """
%fused (a.1: f32[12,64,64], b.1: s32[], c.1: bf16[64,64]) -> f32[12,64,64] {
  %a.1 = f32[12,64,64]{2,1,0} parameter(0)
  %b.1 = s32[] parameter(1)
  %c.1 = bf16[64,64]{1,0} parameter(2)
  %dot.3 = f32[64,64]{1,0} dot(%c.1, %c.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %row = f32[1,64,64]{2,1,0} bitcast(%dot.3)
  %z = s32[] constant(0)
  ROOT %update = f32[12,64,64]{2,1,0} dynamic-update-slice(%a.1, %row, %b.1, %z, %z)
}
"""


def test_a_fusion_moves_what_it_touches() -> None:
    arguments = "%a = f32[12,64,64]{2,1,0} parameter(0)", "%b = s32[] parameter(1)"
    fusion = (
        "ROOT %f = f32[12,64,64]{2,1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused,"
        ' backend_config={"known":"(x)"}'
    )
    found = counted(*arguments, "%c = bf16[64,64]{1,0} parameter(2)", fusion, more=FUSED)
    assert found.products == {"bf16 x bf16 -> f32": 2 * 64**3}
    # The slice that is written, the matrix that is read, and the place; never the twelve.
    assert found.bytes == 64 * 64 * 4 + 64 * 64 * 2 + 4
    # What a TPU holds in its vector memory moves nothing.
    near = "%c = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)"
    assert counted(*arguments, near, fusion, more=FUSED).bytes == 64 * 64 * 4 + 4


def test_collectives_of_a_gpu_are_counted_by_kind_and_size() -> None:
    found = counted(
        "%p = bf16[512,1024]{1,0} parameter(0)",
        "%q = bf16[512,1024]{1,0} parameter(1)",
        "%g = ((bf16[512,1024]{1,0}, bf16[512,1024]{1,0}), (bf16[4096,1024]{1,0},"
        " bf16[4096,1024]{1,0})) all-gather-start(%p, %q), channel_id=1,"
        " replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}, dimensions={0}",
        "%gd = (bf16[4096,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-done(%g)",
        "%g0 = bf16[4096,1024]{1,0} get-tuple-element(%gd), index=0",
        "%s = ((bf16[4096,1024]{1,0}), bf16[512,1024]{1,0}) reduce-scatter-start(%g0),"
        " channel_id=2, replica_groups=[2,8]<=[16], dimensions={0}, to_apply=%add",
        "%sd = bf16[512,1024]{1,0} reduce-scatter-done(%s)",
        "%t = f32[] constant(0)",
        "%r = (f32[768]{0}, f32[]) all-reduce-start(%t, %t), channel_id=3,"
        " replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add",
        "%rd = (f32[768]{0}, f32[]) all-reduce-done(%r)",
        "%sync = bf16[512,1024]{1,0} all-reduce(%sd), channel_id=4,"
        " replica_groups={{0,1}}, to_apply=%add",
        "ROOT %o = f32[3]{0} all-reduce(%t), channel_id=5, to_apply=%add,"
        " replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
    )
    rows = {
        (entry.kind, entry.count, entry.bytes, entry.group, entry.asynchronous)
        for entry in found.collectives
    }
    whole = 4096 * 1024 * 2
    assert rows == {
        ("all-gather", 1, 2 * whole, 8, True),
        ("reduce-scatter", 1, whole, 8, True),
        ("all-reduce", 1, 768 * 4 + 4, 4, True),
        ("all-reduce", 1, whole // 8, 2, False),
        ("all-reduce", 1, 12, 4, False),
    }
    assert found.bytes == 0 and found.seconds == 0.0


TPU_FUSIONS = """
%all-reduce-scatter (input: f32[1024,768]) -> f32[1024,192] {
  %input = f32[1024,768]{0,1:T(8,128)} parameter(0)
  %all-reduce.51 = f32[1024,768]{0,1:T(8,128)} all-reduce(%input), channel_id=131,
  %zero.1 = s32[] constant(0)
  ROOT %part = f32[1024,192]{0,1:T(8,128)S(1)} dynamic-slice(%all-reduce.51, %zero.1, %zero.1)
}

%behind.1 (x.1: bf16[64,64], w.1: bf16[16,64]) -> bf16[64,64] {
  %x.1 = bf16[64,64]{1,0} parameter(0)
  %w.1 = bf16[16,64]{1,0} parameter(1)
  %gather.1 = bf16[64,64]{1,0} all-gather(%w.1), channel_id=9, replica_groups={{0,1,2,3}}
  ROOT %d.1 = bf16[64,64]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%behind.2 (x.2: bf16[64,64], w.2: bf16[16,64]) -> bf16[64,64] {
  %x.2 = bf16[64,64]{1,0} parameter(0)
  %w.2 = bf16[16,64]{1,0} parameter(1)
  %gather.2 = bf16[64,64]{1,0} all-gather(%w.2), channel_id=9, replica_groups={{0,1,2,3}}
  ROOT %d.2 = bf16[64,64]{1,0} dot(%x.2, %x.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_collectives_inside_fusions_of_a_tpu_count_once() -> None:
    scatter = TPU_FUSIONS.replace("channel_id=131,\n", "channel_id=131, to_apply=%add\n")
    found = counted(
        "%g = f32[1024,768]{0,1:T(8,128)} parameter(0)",
        "%x = bf16[64,64]{1,0} parameter(1)",
        "%w = bf16[16,64]{1,0} parameter(2)",
        "%s = f32[1024,192]{0,1:T(8,128)S(1)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter",
        "%b1 = bf16[64,64]{1,0} fusion(%x, %w), kind=kOutput, calls=%behind.1",
        "ROOT %b2 = bf16[64,64]{1,0} fusion(%b1, %w), kind=kOutput, calls=%behind.2",
        more=scatter,
    )
    rows = {(entry.kind, entry.count, entry.bytes) for entry in found.collectives}
    assert rows == {("reduce-scatter", 1, 1024 * 768 * 4), ("all-gather", 1, 64 * 64 * 2)}
    assert found.flops == 2 * 2 * 64**3


def test_kernels_are_counted_by_target_with_the_products_inside() -> None:
    attention = (
        "%o = (bf16[2,4,128,64]{3,1,2,0}, f32[2,4,128]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k),"
        ' custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type":"CAUSAL"}'
    )
    arrays = (
        "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
        "%k = bf16[2,256,2,64]{3,2,1,0} parameter(1)",
    )
    found = counted(*arrays, attention)
    assert found.custom_calls == {"__cudnn$fmhaSoftmax": 1}
    scores = 2 * 4 * 128 * 256
    assert found.kernels == 2 * 2 * scores * 64 // 2
    assert counted(*arrays, attention.replace("CAUSAL", "NO_MASK")).kernels == 4 * scores * 64
    backward = attention.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
    assert counted(*arrays, backward).kernels == 5 * scores * 64
    # A window of 100 tokens hides what is further to the left.
    square = attention.replace("%k, %k", "%s, %s").replace(
        '"CAUSAL"', '"CAUSAL","sliding_window_length": 100'
    )
    keys = (*arrays, "%s = bf16[2,128,2,64]{3,2,1,0} parameter(2)")
    seen = sum(min(token + 1, 100) for token in range(128))
    assert counted(*keys, square).kernels == 2 * 2 * 2 * 4 * seen * 64
    pallas = (
        '%o = bf16[8,8]{1,0} custom-call(%q), custom_call_target="tpu_custom_call",'
        ' backend_config={"custom_call_config":{"body":"TUz","cost_estimate":'
        '{"flops":"1234","bytes_accessed":"77"}}}'
    )
    assert counted(*arrays, pallas).kernels == 1234
    splash = (
        "%q8 = bf16[2,4,128,64]{3,2,1,0} parameter(2)",
        "%k8 = bf16[2,2,256,64]{3,2,1,0} parameter(3)",
        "%m = s8[1,2,2]{2,1,0} parameter(4)",
        "%splash_mha_dkv_no_residuals.1 = bf16[2,2,256,64]{3,2,1,0} custom-call(%m, %q8, %k8, %k8),"
        ' custom_call_target="tpu_custom_call"',
    )
    assert counted(*splash).kernels == 2 * 4 * scores * 64 // 2
    rows = [f"%{name} = {kind} parameter({n})" for n, (name, kind) in enumerate(GROUPED.items(), 2)]
    for result, name, width in (
        ("bf16[64,24]{1,0}", "grouped_product", 24),
        ("bf16[4,16,40]{2,1,0}", "grouped_outer", 40),
    ):
        triton = (
            f'%o = {result} custom-call(%sizes, %x, %w), custom_call_target="__gpu$xla.gpu.triton",'
            f' backend_config={{grid_x = 2 : i32, ir = "ML\\EFR", name = "{name}", grid_y = 1}}'
        )
        assert counted(*rows, triton).kernels == 2 * 64 * 16 * width
    unknown = '%o = f32[8]{0} custom-call(%q, %k), custom_call_target="other"'
    assert counted(*arrays, unknown).kernels == 0


def layers(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, w)[0].sum()


def test_a_program_of_this_cpu_has_the_products_that_it_was_written_with() -> None:
    x, w = jnp.ones((32, 48)), jnp.ones((7, 48, 48))
    text = jax.jit(jax.grad(layers, argnums=(0, 1))).lower(x, w).compile().as_text()
    found = count(text)
    assert found.flops == 3 * 7 * 2 * 32 * 48 * 48  # forward, and backward to both sides
    assert sorted(entry.trips for entry in found.loops) == [7, 7]
    assert found.seconds == 0.0
    assert all(trip_count(parse(text), row) == 7 for row in _loops(text))


def _loops(text: str) -> list:
    rows = [row for of in parse(text).computations.values() for row in of.instructions.values()]
    return [row for row in rows if row.opcode == "while"]
