"""Functions that a module defines where it needs them: what WGSL lacks, or leaves undefined."""

from __future__ import annotations

FUNCTIONS: dict[str, str] = {
    "settled": """\
fn settled(x: f32, zero: u32) -> f32 {  // x, which no driver sees through
  return bitcast<f32>(bitcast<u32>(x) | zero);
}""",
    "apart": """\
fn apart(x: f32, zero: u32) -> f32 {  // x, which no driver knows to be x, nor `settled`
  return bitcast<f32>(bitcast<u32>(x) ^ zero);
}""",
    "is_nan": """\
fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}""",
    "max_nan": """\
fn max_nan(a: f32, b: f32) -> f32 {
  return select(select(max(a, b), b, is_nan(b)), a, is_nan(a));
}""",
    "min_nan": """\
fn min_nan(a: f32, b: f32) -> f32 {
  return select(select(min(a, b), b, is_nan(b)), a, is_nan(a));
}""",
    "rem_i32": """\
fn rem_i32(a: i32, b: i32) -> i32 {
  return select(a - (a / b) * b, 0i, b == 0i);
}""",
    "to_i32": """\
fn to_i32(x: f32) -> i32 {
  let v = i32(clamp(x, -2147483648.0, 2147483520.0));
  return select(select(v, 2147483647i, x >= 2147483648.0), 0i, is_nan(x));
}""",
    "to_u32": """\
fn to_u32(x: f32) -> u32 {
  let v = u32(clamp(x, 0.0, 4294967040.0));
  return select(select(v, 0xffffffffu, x >= 4294967296.0), 0u, is_nan(x));
}""",
    "f16_bits": """\
fn f16_bits(x: f32) -> u32 {  // round to nearest even, subnormals kept
  let bits = bitcast<u32>(x);
  let a = bits & 0x7fffffffu;
  let r = a - 0x38000000u;
  let normal = (r + 0xfffu + ((r >> 13u) & 1u)) >> 13u;
  let s = clamp(126u - min(a >> 23u, 112u), 14u, 24u);
  let m = (a & 0x7fffffu) | 0x800000u;
  let tiny = (m + ((1u << (s - 1u)) - 1u) + ((m >> s) & 1u)) >> s;
  let small = select(0u, tiny, (a >> 23u) >= 102u);
  let finite = select(small, normal, a >= 0x38800000u);
  let capped = select(finite, 0x7c00u, a >= 0x477ff000u);
  return ((bits >> 16u) & 0x8000u) | select(capped, 0x7e00u, a > 0x7f800000u);
}""",
    "pack_f16": """\
fn pack_f16(lo: f32, hi: f32) -> u32 {
  return f16_bits(lo) | (f16_bits(hi) << 16u);
}""",
    "pack_f16_native": """\
fn pack_f16_native(lo: f32, hi: f32) -> u32 {
  return pack2x16float(vec2<f32>(lo, hi));
}""",
    "bf16_bits": """\
fn bf16_bits(x: f32) -> u32 {  // round to nearest even
  let b = bitcast<u32>(x);
  let rounded = b + 0x7fffu + ((b >> 16u) & 1u);
  return select(rounded, b | 0x400000u, (b & 0x7fffffffu) > 0x7f800000u) >> 16u;
}""",
    "pack_bf16": """\
fn pack_bf16(lo: f32, hi: f32) -> u32 {
  return bf16_bits(lo) | (bf16_bits(hi) << 16u);
}""",
}
NEEDS: dict[str, tuple[str, ...]] = {
    "max_nan": ("is_nan",), "min_nan": ("is_nan",), "to_i32": ("is_nan",), "to_u32": ("is_nan",),
    "pack_f16": ("f16_bits",), "pack_bf16": ("bf16_bits",),
}  # fmt: skip
