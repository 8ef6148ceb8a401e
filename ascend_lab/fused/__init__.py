"""Fused kernels: several operators in one kernel, whose intermediate results stay on the chip.

Between two kernels a tensor is written to global memory (GM) and read back. A fused kernel keeps
the tensor in a core's buffers (L1, UB, L0C), and starts once instead of twice:

    unfused        GM -> operator 1 -> GM -> operator 2 -> GM
    fused          GM -> operator 1 -> L1, UB or L0C -> operator 2 -> GM

The modules, by what they speed up (in brackets a network that becomes faster):

- Convolutions: `tandem`, a pointwise convolution and the depthwise one that reads it (MobileNet);
  `joint`, two convolutions whose results are added (ResNet); `pooled`, a convolution and the max
  pooling of its result (SqueezeNet); `gates`, squeeze and excite up to the convolution of the
  scaled image (EfficientNet); `mix`, a product or convolution whose GELU, say, runs on separate
  vector cores (BERT on the 910B).
- Images: `first_images`, the input converted to the layout of the first convolution; `plane_means`,
  the mean of each channel by the cube (MobileNet); `max_pool`, which computes once what overlapping
  windows have in common (Inception).
- Attention: `flash_attention`, which never stores its scores (BERT); `attention_moves`, which reads
  and writes transposed tensors in place (BERT).
- Norms: `row_norm`, a layer norm whose sums the cube adds up (BERT); `channel_sums`, the two sums
  over each channel that a batch norm needs in training (ResNet).
- Quantisation: `integer_layers`, quantised layers in int8 and int32 (any network in int8).
- Moves: `channels`, moves of channels as products with zeros and ones (ShuffleNet); `blocks`,
  concatenations of several images as views (DenseNet).

Each file registers a record of `compiler.rules`, a template of an operator, a rewriting of graphs,
or vector programs that follow a cube kernel. Without a file, or without this folder, networks
compile to plain kernels, which are slower. Values stay the same, except that a plain kernel rounds
to fp16 in memory some sums that a fused kernel keeps in fp32 on the chip.

>>> from ascend_lab.compiler.rules import fusions
>>> len(fusions())
6
"""

PLUGINS = (
    "first_images",
    "flash_attention",
    "attention_moves",
    "tandem",
    "gates",
    "joint",
    "pooled",
    "mix",
    "row_norm",
    "plane_means",
    "max_pool",
    "channel_sums",
    "integer_layers",
    "channels",
    "blocks",
)
"""The modules with special kernels. Of two rules that claim a node the earlier one has priority."""
