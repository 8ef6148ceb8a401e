"""What each pass makes of a small graph, and graphs it must leave alone, both as text.

A case is the pass, the graph's inputs and outputs, its lines, and behind an arrow those of the
graph it becomes (with its inputs, where they change).
"""

from typing import NamedTuple


class Case(NamedTuple):
    """A graph before and after a pass; bodies are the text without the first and last line."""

    name: str
    inputs: str
    outputs: str
    before: str
    after: str
    inputs_after: str


def text(case: Case, body: str) -> str:
    inputs = case.inputs_after if body == case.after else case.inputs
    return f"graph g ({inputs}) -> ({case.outputs}) {{\n{body}\n}}\n"


def cases(told: str) -> list[Case]:
    """Return the cases of a text."""
    found = []
    for block in told.split("== ")[1:]:
        name, ends, body = block.strip().split("\n", 2)
        inputs, outputs = ends[1:-1].split(") -> (")
        before, _, after = body.partition("\n=>")
        given, _, lines = after.partition("\n")
        found.append(Case(name, inputs, outputs, before, lines, given.strip(" ()") or inputs))
    return found


CASES = cases("""
== DeadCodeEliminationPass
(x: fp32[2, 3]) -> (y)
w: fp32[3] = [1, 2, 3.0]
dead: fp32[2, 3] = add(x, w) dead
y: fp32[2, 3] = relu(x) y
late: fp32[2, 3] = exp(y) late
=>
y: fp32[2, 3] = relu(x) y
== CommonSubexpressionEliminationPass
(x: fp32[2, 3]) -> (y)
one: fp32[2] = [1, 2.0]
two: fp32[2] = [1, 2.0]
a: fp32[2, 3] = exp(x) a
b: fp32[2, 3] = exp(x) b
c: fp32[3, 2] = transpose(a) c
d: fp32[3, 2] = transpose(b) d
e: fp32[3, 2] = add(c, one) e
f: fp32[3, 2] = add(d, two) f
y: fp32[3, 2] = mul(e, f) y
=>
one: fp32[2] = [1, 2.0]
a: fp32[2, 3] = exp(x) a
c: fp32[3, 2] = transpose(a) c
e: fp32[3, 2] = add(c, one) e
y: fp32[3, 2] = mul(e, e) y
== ConstantFoldingPass
(x: fp32[2, 3]) -> (y)
a: fp32[3] = [1, 2, 3.0]
b: fp32[1] = [10.0]
c: fp32[3] = mul(a, b) c
d: fp32[3] = neg(c) d
y: fp32[2, 3] = add(x, d) y
=>
d_folded: fp32[3] = [-10, -20, -30.0]
y: fp32[2, 3] = add(x, d_folded) y
== ConstantFoldingPass
(x: fp32[100, 100]) -> (y)
zero: fp32[1] = fill(0.5)
all: fp32[100, 100] = expand(zero) {shape = (100, 100)} all
y: fp32[100, 100] = add(x, all) y
=>
all_folded: fp32[100, 100] = fill(0.5)
y: fp32[100, 100] = add(x, all_folded) y
== IdentityEliminationPass
(x: fp32[2, 3]) -> (y)
zero: fp32[1] = [0.0]
one: fp32[3] = fill(1.0)
a: fp32[2, 3] = reshape(x) {shape = (2, -1)} a
b: fp32[2, 3] = transpose(a) {perm = (0, 1)} b
c: fp32[2, 3] = cast(b) {dtype = 'fp32'} c
d: fp32[2, 3] = pad(c) {pads = ((0, 0), (0, 0))} d
e: fp32[2, 3] = add(zero, d) e
f: fp32[2, 3] = mul(e, one) f
g: fp32[2, 3] = concat(f) g
h: fp32[2, 3] = expand(g) {shape = (1, 3)} h
i: fp32[2, 3] = slice(h) {begin = (0, 0), end = (2, 99)} i
j: fp32[2, 3] = split(i) {sizes = 1} j
y: fp32[2, 3] = exp(j) y
=>
y: fp32[2, 3] = exp(x) y
== IdentityEliminationPass
(x: fp32[2, 3]) -> (y)
a: fp32[2, 3] = exp(x) a
y: fp32[2, 3] = muls(a) {number = 1.0} y
=>
y: fp32[2, 3] = exp(x) a
== IdentityEliminationPass
(x: fp32[2, 3], b: fp32[3]) -> (y)
wide: fp32[2, 3] = expand(b) {shape = (2, 3)} wide
y: fp32[2, 3] = sub(wide, x) y
=>
y: fp32[2, 3] = sub(b, x) y
== ScalarOperandPass
(x: fp32[2, 3], p: fp32[2, 3]) -> (y)
two: fp32[1] = [2.0]
four: fp32[3] = fill(4.0)
one: fp32[1] = [1.0]
zero: fp32[1] = [0.0]
a: fp32[2, 3] = add(two, x) a
b: fp32[2, 3] = div(a, four) b
c: fp32[2, 3] = pow(b, two) c
d: fp32[2, 3] = sub(c, four) d
e: fp32[2, 3] = div(one, p) e
f: fp32[2, 3] = mul(d, d) f
g: fp32[2, 3] = add(f, e) g
h: fp32[2, 3] = min(g, four) h
y: fp32[2, 3] = max(zero, h) y
=>
a: fp32[2, 3] = adds(x) {number = 2.0} a
b: fp32[2, 3] = muls(a) {number = 0.25} b
c: fp32[2, 3] = square(b) c
d: fp32[2, 3] = adds(c) {number = -4.0} d
e: fp32[2, 3] = rec(p) e
f: fp32[2, 3] = square(d) f
g: fp32[2, 3] = add(f, e) g
h: fp32[2, 3] = clip(g) {high = 4.0, low = -1e999} h
y: fp32[2, 3] = relu(h) y
== AlgebraicSimplificationPass
(x: fp32[2, 3], z: fp32[2, 3]) -> (y)
a: fp32[2, 3] = neg(x) a
b: fp32[2, 3] = neg(a) b
c: fp32[2, 3] = sub(b, a) c
d: fp32[2, 3] = add(a, z) d
e: fp32[2, 3] = square(a) e
f: fp32[2, 3] = relu(c) f
g: fp32[2, 3] = relu6(f) g
h: fp32[2, 3] = clip(g) {low = 1.0, high = 9.0} h
i: fp32[2, 3] = add(h, d) i
y: fp32[2, 3] = mul(i, e) y
=>
c: fp32[2, 3] = add(x, x) c
d: fp32[2, 3] = sub(z, x) d
e: fp32[2, 3] = square(x) e
h: fp32[2, 3] = clip(c) {high = 6.0, low = 1.0} h
i: fp32[2, 3] = add(h, d) i
y: fp32[2, 3] = mul(i, e) y
== ReassociationPass
(x: fp32[2, 3]) -> (y)
three: fp32[1] = [3.0]
a: fp32[2, 3] = muls(x) {number = 3.0} a
b: fp32[2, 3] = muls(a) {number = 7.0} b
c: fp32[2, 3] = adds(b) {number = 0.5} c
d: fp32[2, 3] = adds(c) {number = 0.25} d
y: fp32[2, 3] = div(d, three) y
=>
b: fp32[2, 3] = muls(x) {number = 21.0} b
d: fp32[2, 3] = adds(b) {number = 0.75} d
y: fp32[2, 3] = muls(d) {number = 0.3333333333333333} y
== PermutePass
(x: fp32[2, 3, 4]) -> (y)
a: fp32[3, 4, 2] = transpose(x) {perm = (1, 2, 0)} a
b: fp32[3, 2, 4] = transpose(a) {perm = (0, -1, 1)} b
y: fp32[3, 2, 4] = relu(b) y
=>
b: fp32[3, 2, 4] = transpose(x) {perm = (1, 0, 2)} b
y: fp32[3, 2, 4] = relu(b) y
== PermutePass
(x: fp32[3, 3, 3]) -> (y)
a: fp32[3, 3, 3] = transpose(x) {perm = (1, 2, 0)} a
b: fp32[3, 3, 3] = relu(a) b
y: fp32[3, 3, 3] = transpose(b) {perm = (1, 0, 2)} y
=>
b: fp32[3, 3, 3] = relu(x) b
y: fp32[3, 3, 3] = transpose(b) {perm = (2, 1, 0)} y
== PermutePass
(x: fp32[2, 3, 4], z: fp32[2, 3, 4]) -> (y)
t: fp32[2, 4, 3] = transpose(z) {perm = (0, 2, 1)} t
a: fp32[2, 3, 3] = batch_matmul(x, t) a
b: fp32[2, 3, 1, 3] = reshape(a) {shape = (2, 3, 1, 3)} b
y: fp32[2, 1, 3, 3] = transpose(b) {perm = (0, 2, 1, 3)} y
=>
a: fp32[2, 3, 3] = batch_matmul(x, z) {trans_b = True} a
b: fp32[2, 3, 1, 3] = reshape(a) {shape = (2, 3, 1, 3)} b
y: fp32[2, 1, 3, 3] = reshape(b) {shape = (2, 1, 3, 3)} y
== ReshapeRemovePass
(x: fp32[2, 3]) -> (y)
a: fp32[6] = reshape(x) {shape = (-1,)} a
b: fp32[3, 2] = reshape(a) {shape = (3, 2)} b
y: fp32[3, 2] = relu(b) y
=>
b: fp32[3, 2] = reshape(x) {shape = (3, 2)} b
y: fp32[3, 2] = relu(b) y
== CastRemovePass
(x: fp16[2, 3]) -> (y)
a: fp32[2, 3] = cast(x) {dtype = 'fp32'} a
b: fp16[2, 3] = cast(a) {dtype = 'fp16'} b
y: fp16[2, 3] = relu(b) y
=>
y: fp16[2, 3] = relu(x) y
== CastRemovePass
(x: fp16[2, 3]) -> (y)
a: fp32[2, 3] = cast(x) {dtype = 'fp32'} a
b: fp32[2, 3] = muls(a) {number = 0.1001} b
y: fp16[2, 3] = cast(b) {dtype = 'fp16'} y
=>
y: fp16[2, 3] = muls(x) {number = 0.1001} y
== PadConv2dFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[1, 2, 2, 2] = [1, 2, 3, 4, 5, 6, 7, 8.0]
p: fp32[1, 2, 6, 5] = pad(x) {pads = ((0, 0), (0, 0), (1, 1), (0, 1))} p
y: fp32[1, 1, 7, 6] = conv2d(p, w) {pad = 1} y
=>
w: fp32[1, 2, 2, 2] = [1, 2, 3, 4, 5, 6, 7, 8.0]
y: fp32[1, 1, 7, 6] = conv2d(x, w) {pad = ((2, 2), (1, 2))} y
== ConvBatchnormFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]

s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

c: fp32[1, 2, 4, 4] = conv2d(x, w) c
n: fp32[1, 2, 4, 4] = batch_norm(c, s, b, m, v) {epsilon = 0.0} n
y: fp32[1, 2, 4, 4] = relu(n) y
=>
w_scaled: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
c_bias: fp32[2] = [0.5, -3.0]
n: fp32[1, 2, 4, 4] = conv2d(x, w_scaled, c_bias) c
y: fp32[1, 2, 4, 4] = relu(n) y
== ConvScaleFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
b: fp32[2] = [1, 2.0]
f: fp32[2, 1, 1] = [10, 100.0]
c: fp32[1, 2, 4, 4] = conv2d(x, w, b) c
y: fp32[1, 2, 4, 4] = mul(f, c) y
=>
w_scaled: fp32[2, 2, 1, 1] = [10, 20, 300, 400.0]
c_bias: fp32[2] = [10, 200.0]
y: fp32[1, 2, 4, 4] = conv2d(x, w_scaled, c_bias) c
== AABiasaddConvFusion
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
f: fp32[1, 2, 1, 1] = [10, 100.0]
c: fp32[1, 2, 4, 4] = conv2d(x, w) c
y: fp32[1, 2, 4, 4] = add(c, f) y
=>
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
c_bias: fp32[2] = [10, 100.0]
y: fp32[1, 2, 4, 4] = conv2d(x, w, c_bias) c
== BatchnormScaleFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

f: fp32[2, 1, 1] = [2, 3.0]
g: fp32[2, 1, 1] = [5, 7.0]
n: fp32[1, 2, 4, 4] = batch_norm(x, s, b, m, v) n
p: fp32[1, 2, 4, 4] = mul(n, f) p
y: fp32[1, 2, 4, 4] = add(p, g) y
=>
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]
s_1_1: fp32[2] = [4, 1.5]
b_1_1: fp32[2] = [7, 4.0]
y: fp32[1, 2, 4, 4] = batch_norm(x, s_1_1, b_1_1, m, v) n
== ConvToFullyConnectionFusionPass
(x: fp32[3, 2, 1, 2]) -> (y)
w: fp32[1, 2, 1, 2] = [1, 2, 3, 4.0]
b: fp32[1] = [9.0]
y: fp32[3, 1, 1, 1] = conv2d(x, w, b) y
=>
b: fp32[1] = [9.0]
w_matrix: fp32[1, 4] = [1, 2, 3, 4.0]
y_rows: fp32[3, 4] = reshape(x) {shape = (3, 4)} y_rows
y_product: fp32[3, 1] = gemm(y_rows, w_matrix, b) {trans_b = True} y_product
y: fp32[3, 1, 1, 1] = reshape(y_product) {shape = (3, 1, 1, 1)} y
== AReduceMeanFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
m: fp32[1, 2] = reduce_mean(x) {axis = (-1, 2)} m
y: fp32[1, 2] = relu(m) y
=>
m_mean: fp32[1, 2, 1, 1] = global_avg_pool(x) m_mean
m: fp32[1, 2] = reshape(m_mean) {shape = (1, 2)} m
y: fp32[1, 2] = relu(m) y
== GlobalPoolingPass
(x: fp32[1, 2, 4, 4]) -> (y)
y: fp32[1, 2, 1, 1] = avg_pool2d(x) {kernel = 4} y
=>
y: fp32[1, 2, 1, 1] = global_avg_pool(x) y
== LayerNormFusionPass
(x: fp32[2, 3]) -> (y)
s: fp32[3] = [1, 2, 3.0]
b: fp32[1, 3] = [4, 5, 6.0]
m: fp32[2, 1] = reduce_mean(x) {axis = -1, keepdims = True} m
d: fp32[2, 3] = sub(x, m) d
q: fp32[2, 3] = square(d) q
v: fp32[2, 1] = reduce_mean(q) {axis = -1, keepdims = True} v
e: fp32[2, 1] = adds(v) {number = 1e-12} e
r: fp32[2, 1] = sqrt(e) r
n: fp32[2, 3] = div(d, r) n
f: fp32[2, 3] = mul(s, n) f
y: fp32[2, 3] = add(f, b) y
=>
s: fp32[3] = [1, 2, 3.0]
b_tail: fp32[3] = [4, 5, 6.0]
y: fp32[2, 3] = layer_norm(x, s, b_tail) {epsilon = 1e-12} y
== GeluFusionPass
(x: fp32[2, 3]) -> (y)
three: fp32[1] = [3.0]
c: fp32[2, 3] = pow(x, three) c
f: fp32[2, 3] = muls(c) {number = 0.044714998453855515} f
s: fp32[2, 3] = add(x, f) s
m: fp32[2, 3] = muls(s) {number = 0.7978845834732056} m
t: fp32[2, 3] = tanh(m) t
o: fp32[2, 3] = adds(t) o
h: fp32[2, 3] = muls(x) {number = 0.5} h
y: fp32[2, 3] = mul(h, o) y
=>
y: fp32[2, 3] = gelu(x) y
== ActivationFusionPass
(x: fp32[2, 3]) -> (y)
a: fp32[2, 3] = sigmoid(x) a
b: fp32[2, 3] = mul(a, x) b
c: fp32[2, 3] = adds(b) {number = 3.0} c
d: fp32[2, 3] = relu6(c) d
e: fp32[2, 3] = muls(d) {number = 0.16666667} e
y: fp32[2, 3] = mul(b, e) y
=>
b: fp32[2, 3] = silu(x) b
y: fp32[2, 3] = hard_swish(b) y
== FlashAttentionFusionPass
(q: fp32[2, 4, 8], k: fp32[2, 5, 8], v: fp32[2, 5, 6], mask: fp32[4, 5]) -> (y)
p: fp32[2, 4, 5] = batch_matmul(q, k) {trans_b = True} p
s: fp32[2, 4, 5] = muls(p) {number = 0.25} s
a: fp32[2, 4, 5] = add(mask, s) a
w: fp32[2, 4, 5] = softmax(a) w
y: fp32[2, 4, 6] = batch_matmul(w, v) y
=>
y: fp32[2, 4, 6] = flash_attention(q, k, v, mask) {scale = 0.25} y
== FlashAttentionFusionPass
(q: fp32[2, 4, 8], k: fp32[2, 8, 5], v: fp32[2, 5, 6]) -> (y)
root: fp32[1] = [3.0]
p: fp32[2, 4, 5] = batch_matmul(q, k) p
s: fp32[2, 4, 5] = div(p, root) s
w: fp32[2, 4, 5] = softmax(s) {axis = 2} w
y: fp32[2, 4, 6] = batch_matmul(w, v) y
=>
y_keys: fp32[2, 5, 8] = transpose(k) {perm = (0, 2, 1)} y_keys
y: fp32[2, 4, 6] = flash_attention(q, y_keys, v) {scale = 0.3333333333333333} y
== BatchMatMulToMatMulPass
(x: fp32[2, 3, 4], w: fp32[5, 4]) -> (y)
y: fp32[2, 3, 5] = batch_matmul(x, w) {trans_b = True} y
=>
y_rows: fp32[6, 4] = reshape(x) {shape = (6, 4)} y_rows
y_product: fp32[6, 5] = matmul(y_rows, w) {trans_b = True} y_product
y: fp32[2, 3, 5] = reshape(y_product) {shape = (2, 3, 5)} y
== MatMulBiasAddFusionPass
(x: fp32[6, 4], w: fp32[4, 5], b: fp32[5]) -> (y)
p: fp32[6, 5] = matmul(x, w) p
r: fp32[2, 3, 5] = reshape(p) {shape = (2, 3, 5)} r
y: fp32[2, 3, 5] = add(b, r) y
=>
y_product: fp32[6, 5] = gemm(x, w, b) y_product
y: fp32[2, 3, 5] = reshape(y_product) {shape = (2, 3, 5)} y
== MatMulBiasAddFusionPass
(x: fp32[6, 4], w: fp32[5, 4], b: fp32[6, 1]) -> (y)
p: fp32[6, 5] = matmul(x, w) {trans_b = True} p
y: fp32[6, 5] = add(p, b) y
=>
y: fp32[6, 5] = gemm(x, w, b) {trans_b = True} y
== GemmToMatMulPass
(x: fp32[6, 4], w: fp32[4, 5]) -> (y)
b: fp32[5] = fill(0.0)
y: fp32[6, 5] = gemm(x, w, b) y
=>
y: fp32[6, 5] = matmul(x, w) y
== RequantFusionPass
(q: int8[1, 2, 4, 4]) -> (y)
w: int8[2, 2, 1, 1] = [1, 2, 3, 4]
x: fp32[1, 2, 4, 4] = dequantise(q) {scale = 0.5, offset = 3} x
v: fp32[2, 2, 1, 1] = dequantise(w) {scale = 0.25} v
c: fp32[1, 2, 4, 4] = conv2d(x, v) c
y: int8[1, 2, 4, 4] = quantise(c) {scale = 2.0} y
=>
c_weight: int8[2, 2, 1, 1] = [1, 2, 3, 4.0]
c_bias: int32[2, 1, 1] = [-9, -21.0]
c_steps: fp32[2, 1, 1] = [0.0625, 0.0625]
c_sums: int32[1, 2, 4, 4] = conv2d(q, c_weight) c_sums
y: int8[1, 2, 4, 4] = requantise(c_sums, c_steps, c_bias) {small_bias = True} y
""")
CHANGING = cases("""
== PoolingToConvPass
(x: fp32[1, 2, 4, 4]) -> (y)
y: fp32[1, 2, 2, 2] = max_pool2d(x) {kernel = 2} y
=>
y_weight: fp32[2, 1, 2, 2] = fill(0.25)
y: fp32[1, 2, 2, 2] = conv2d(x, y_weight) {groups = 2, pad = ((0, 0), (0, 0)), stride = (2, 2)} y
== GeluErfToTanhPass
(x: fp32[2, 3]) -> (y)
a: fp32[2, 3] = muls(x) {number = 0.70710678} a
e: fp32[2, 3] = erf(a) e
o: fp32[2, 3] = adds(e) o
m: fp32[2, 3] = mul(o, x) m
y: fp32[2, 3] = muls(m) {number = 0.5} y
=>
y: fp32[2, 3] = gelu(x) y
== Fp16ConversionPass
(x: fp32[1, 2, 4, 4], i: int32[2]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 100000.0]
table: fp32[9, 4] = seeded(1, 1.0, 0.0)

s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

c: fp32[1, 2, 4, 4] = conv2d(x, w) c
n: fp32[1, 2, 4, 4] = batch_norm(c, s, b, m, v) n
e: fp32[2, 4] = embedding(table, i) e
r: fp32[2, 4, 1] = reshape(e) {shape = (2, 4, 1)} r
y: fp32[1, 2, 4, 4] = add(n, r) y
=> (x: fp16[1, 2, 4, 4], i: int32[2])
s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]
w_fp16: fp16[2, 2, 1, 1] = [1, 2, 3, 65504.0]
table_fp16: fp16[9, 4] = seeded(1, 1.0, 0.0)
c: fp16[1, 2, 4, 4] = conv2d(x, w_fp16) c
n: fp16[1, 2, 4, 4] = batch_norm(c, s, b, m, v) n
e: fp16[2, 4] = embedding(table_fp16, i) e
r: fp16[2, 4, 1] = reshape(e) {shape = (2, 4, 1)} r
y: fp16[1, 2, 4, 4] = add(n, r) y
== Bf16ConversionPass
(x: fp32[2, 3]) -> (y)
a: int32[2, 3] = cast(x) {dtype = 'int32'} a
b: fp32[2, 3] = cast(a) {dtype = 'fp32'} b
c: fp32[2, 3] = muls(b) {number = 0.1} c
y: fp32[2, 3] = exp(c) y
=> (x: bf16[2, 3])
a: int32[2, 3] = cast(x) {dtype = 'int32'} a
b: fp32[2, 3] = cast(a) {dtype = 'fp32'} b
c: fp32[2, 3] = muls(b) {number = 0.1} c
c_bf16: bf16[2, 3] = cast(c) {dtype = 'bf16'} c_bf16
y: bf16[2, 3] = exp(c_bf16) y
""")
"""Passes that compute something else."""
NOTHING = cases("""
== RequantFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4]
q: int8[1, 2, 4, 4] = quantise(x) {scale = 0.5} q
d: fp32[1, 2, 4, 4] = dequantise(q) {scale = 0.5} d
y: fp32[1, 2, 4, 4] = conv2d(d, w) y
== DeadCodeEliminationPass
(x: fp32[2, 3]) -> (y)
y: fp32[2, 3] = relu(x) y
== CommonSubexpressionEliminationPass
(x: fp32[2, 3]) -> (y, z, u, t)
a: fp32[2, 3] = adds(x) {number = 2.0} a
b: fp32[2, 3] = adds(x) {number = 3.0} b
y: fp32[2, 3] = sub(a, b) y
z: fp32[2, 3] = sub(b, a) z
u: fp32[2, 3] = exp(x) u
t: fp32[2, 3] = exp(x) t
== ConstantFoldingPass
(x: fp32[100, 100]) -> (y, flat)
row: fp32[2] = [1, 2.0]
all: fp32[5000, 2] = expand(row) {shape = (5000, 2)} all
flat: fp32[100, 100] = reshape(x) {shape = (100, 100)} flat
y: fp32[5000, 2] = mul(all, all) y
== IdentityEliminationPass
(x: fp32[2, 3]) -> (y, z)
zero: fp32[4, 2, 3] = fill(0.0)
y: fp32[2, 3] = reshape(x) {shape = (2, 3)} y
z: fp32[4, 2, 3] = add(x, zero) z
== ScalarOperandPass
(x: fp32[2, 3], i: int32[2]) -> (y, z, u)
three: fp32[1] = [3.0]
two: int32[1] = [2]
y: fp32[2, 3] = div(x, three) y
z: int32[2] = add(i, two) z
u: fp32[2, 3] = sub(three, x) u
== AlgebraicSimplificationPass
(x: fp32[2, 3]) -> (y)
a: fp32[2, 3] = neg(x) a
b: fp32[2, 3] = sub(a, x) b
c: fp32[2, 3] = tanh(b) c
y: fp32[2, 3] = relu(c) y
== ReassociationPass
(x: fp32[2, 3]) -> (y)
a: fp32[2, 3] = muls(x) {number = 3.0} a
b: fp32[2, 3] = muls(a) {number = 7.0} b
y: fp32[2, 3] = add(a, b) y
== PermutePass
(x: fp32[2, 3, 4], z: fp32[3, 4, 2]) -> (y, a)
a: fp32[2, 4, 3] = transpose(x) {perm = (0, 2, 1)} a
t: fp32[2, 4, 3] = transpose(z) {perm = (2, 1, 0)} t
u: fp32[2, 3, 4] = relu(x) u
y: fp32[2, 3, 3] = batch_matmul(u, t) y
== ReshapeRemovePass
(x: fp32[2, 3]) -> (y)
a: fp32[6] = reshape(x) {shape = (6,)} a
y: fp32[6] = relu(a) y
== CastRemovePass
(x: fp32[2, 3]) -> (y)
a: fp16[2, 3] = cast(x) {dtype = 'fp16'} a
y: fp32[2, 3] = cast(a) {dtype = 'fp32'} y
== CastRemovePass
(x: fp16[2, 3]) -> (y)
a: fp32[2, 3] = cast(x) {dtype = 'fp32'} a
b: fp32[2, 3] = adds(a) {number = 0.1001} b
c: fp16[2, 3] = cast(b) {dtype = 'fp16'} c
d: fp32[2, 3] = cast(c) {dtype = 'fp32'} d
y: fp32[2, 3] = add(b, d) y
== PadConv2dFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[1, 2, 2, 2] = seeded(1, 1.0, 0.0)
p: fp32[1, 2, 6, 4] = pad(x) {pads = ((0, 0), (0, 0), (1, 1), (0, 0)), value = 1} p
y: fp32[1, 1, 5, 3] = conv2d(p, w) y
== ConvBatchnormFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]

s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

c: fp32[1, 2, 4, 4] = conv2d(x, w) c
n: fp32[1, 2, 4, 4] = batch_norm(c, s, b, m, v) n
y: fp32[1, 2, 4, 4] = add(n, c) y
== ConvBatchnormFusionPass
(x: fp32[1, 2, 4, 4], w: fp32[2, 2, 1, 1]) -> (y)
s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

c: fp32[1, 2, 4, 4] = conv2d(x, w) c
y: fp32[1, 2, 4, 4] = batch_norm(c, s, b, m, v) y
== ConvScaleFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
f: fp32[4] = [1, 2, 3, 4.0]
c: fp32[1, 2, 4, 4] = conv2d(x, w) c
y: fp32[1, 2, 4, 4] = mul(c, f) y
== AABiasaddConvFusion
(x: fp32[1, 2, 4, 4], z: fp32[1, 2, 1, 1]) -> (y)
w: fp32[2, 2, 1, 1] = [1, 2, 3, 4.0]
c: fp32[1, 2, 4, 4] = conv2d(x, w) c
y: fp32[1, 2, 4, 4] = add(c, z) y
== BatchnormScaleFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
s: fp32[2] = [2.0, 0.5]
b: fp32[2] = [1.0, -1.0]
m: fp32[2] = [0.5, 2.0]
v: fp32[2] = [4.0, 0.25]

f: fp32[4, 1] = [1, 2, 3, 4.0]
n: fp32[1, 2, 4, 4] = batch_norm(x, s, b, m, v) n
y: fp32[1, 2, 4, 4] = mul(n, f) y
== ConvToFullyConnectionFusionPass
(x: fp32[3, 2, 2, 2]) -> (y)
w: fp32[1, 2, 2, 2] = seeded(1, 1.0, 0.0)
y: fp32[3, 1, 3, 3] = conv2d(x, w) {pad = 1} y
== AReduceMeanFusionPass
(x: fp32[1, 2, 4, 4]) -> (y)
y: fp32[1, 4, 4] = reduce_mean(x) {axis = 1} y
== GlobalPoolingPass
(x: fp32[1, 2, 4, 4]) -> (y)
y: fp32[1, 2, 2, 2] = avg_pool2d(x) {kernel = 4, pad = 1, stride = 2} y
== LayerNormFusionPass
(x: fp32[2, 3]) -> (y)
s: fp32[3] = [1, 2, 3.0]
m: fp32[2, 1] = reduce_mean(x) {axis = -1, keepdims = True} m
d: fp32[2, 3] = sub(x, m) d
q: fp32[2, 3] = square(x) q
v: fp32[2, 1] = reduce_mean(q) {axis = -1, keepdims = True} v
e: fp32[2, 1] = adds(v) {number = 1e-12} e
r: fp32[2, 1] = sqrt(e) r
n: fp32[2, 3] = div(d, r) n
f: fp32[2, 3] = mul(s, n) f
y: fp32[2, 3] = add(f, s) y
== GeluFusionPass
(x: fp32[2, 3]) -> (y)
three: fp32[1] = [3.0]
c: fp32[2, 3] = pow(x, three) c
f: fp32[2, 3] = muls(c) {number = 0.05} f
s: fp32[2, 3] = add(x, f) s
m: fp32[2, 3] = muls(s) {number = 0.7978845834732056} m
t: fp32[2, 3] = tanh(m) t
o: fp32[2, 3] = adds(t) o
h: fp32[2, 3] = muls(x) {number = 0.5} h
y: fp32[2, 3] = mul(h, o) y
== ActivationFusionPass
(x: fp32[2, 3], z: fp32[2, 3]) -> (y)
a: fp32[2, 3] = sigmoid(z) a
y: fp32[2, 3] = mul(a, x) y
== FlashAttentionFusionPass
(q: fp32[2, 4, 8], k: fp32[2, 5, 8], v: fp32[2, 5, 6]) -> (y)
p: fp32[2, 4, 5] = batch_matmul(q, k) {trans_b = True} p
w: fp32[2, 4, 5] = softmax(p) {axis = 1} w
y: fp32[2, 4, 6] = batch_matmul(w, v) y
== FlashAttentionFusionPass
(q: fp32[2, 4, 8], k: fp32[2, 5, 8], v: fp32[2, 5, 6]) -> (y, p)
p: fp32[2, 4, 5] = batch_matmul(q, k) {trans_b = True} p
w: fp32[2, 4, 5] = softmax(p) w
y: fp32[2, 4, 6] = batch_matmul(w, v) y
== FlashAttentionFusionPass
(q: fp32[1, 4, 8], k: fp32[1, 5, 8], v: fp32[2, 5, 6]) -> (y)
two: fp32[2, 1, 1] = fill(2.0)
p: fp32[1, 4, 5] = batch_matmul(q, k) {trans_b = True} p
s: fp32[2, 4, 5] = mul(p, two) s
w: fp32[2, 4, 5] = softmax(s) w
y: fp32[2, 4, 6] = batch_matmul(w, v) y
== BatchMatMulToMatMulPass
(x: fp32[2, 3, 4], w: fp32[1, 4, 5]) -> (y)
y: fp32[2, 3, 5] = batch_matmul(x, w) y
== ActivationFusionPass
(x: fp32[3]) -> (y)
three: fp32[1] = [3.0]
six: fp32[1, 1] = [6.0]
a: fp32[3] = add(x, three) a
c: fp32[3] = clip(a) {low = 0.0, high = 6.0} c
m: fp32[3] = mul(x, c) m
y: fp32[1, 3] = div(m, six) y
== ActivationFusionPass
(x: fp32[3]) -> (y)
six: fp32[2, 3] = fill(6.0)
three: fp32[1] = [3.0]
a: fp32[3] = add(x, three) a
c: fp32[3] = clip(a) {low = 0.0, high = 6.0} c
y: fp32[2, 3] = div(c, six) y
== MatMulBiasAddFusionPass
(x: fp32[1, 4], w: fp32[4, 1], b: fp32[]) -> (y)
p: fp32[1, 1] = matmul(x, w) p
r: fp32[] = reshape(p) {shape = ()} r
y: fp32[] = add(r, b) y
== MatMulBiasAddFusionPass
(x: fp32[1, 4], w: fp32[4, 5], b: fp32[3, 1]) -> (y)
p: fp32[1, 5] = matmul(x, w) p
y: fp32[3, 5] = add(p, b) y
== GemmToMatMulPass
(x: fp32[6, 4], w: fp32[4, 5]) -> (y)
b: fp32[5] = fill(0.0)
y: fp32[6, 5] = gemm(x, w, b) {alpha = 2.0} y
== PoolingToConvPass
(x: fp32[1, 2, 4, 4]) -> (y)
y: fp32[1, 2, 4, 4] = relu(x) y
== GeluErfToTanhPass
(x: fp32[2, 3]) -> (y)
y: fp32[2, 3] = tanh(x) y
== Fp16ConversionPass
(x: fp16[2, 3]) -> (y)
y: fp16[2, 3] = relu(x) y
== Bf16ConversionPass
(x: int32[4]) -> (y)
y: int32[4] = relu(x) y
== Int8ConversionPass
(x: fp32[2, 3]) -> (y)
y: fp32[2, 3] = relu(x) y
""")
