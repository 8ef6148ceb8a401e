"""Fused kernels: several operators in one kernel, so that what lies between them stays on chip.

Between two kernels a tensor goes out to global memory (GM) and comes back. A fused kernel keeps it
in a core's buffers, and starts once instead of twice:

    unfused        GM -> operator 1 -> GM -> operator 2 -> GM
    fused          GM -> operator 1 -> L1, UB or L0C -> operator 2 -> GM

The modules, by what they speed up (in brackets a network that gains):

- Convolutions: `tandem`, a pointwise one and the depthwise one that reads it (MobileNet); `joint`,
  two whose results are added (ResNet); `pooled`, one and the max pooling of its result
  (SqueezeNet); `gates`, squeeze and excite up to the convolution of the scaled image
  (EfficientNet); `mix`, one and what vector cores of their own do to its sums (BERT, 910B).
- Images: `first_images`, stored as the first convolution wants them; `plane_means`, the mean of
  each channel by the cube (MobileNet); `max_pool`, which shares what overlapping windows have in
  common (Inception).
- Attention: `flash_attention`, which never stores its scores (BERT); `attention_moves`, which reads
  and writes transposed tensors in place (BERT).
- Norms: `row_norm`, a layer norm whose sums the cube adds up (BERT); `channel_sums`, both sums of
  each channel behind a trained batch norm (ResNet).
- Bytes: `integer_layers`, quantised layers in whole numbers (any network in int8).
- Moves: `channels`, moves of channels as products with zeros and ones (ShuffleNet); `blocks`, joins
  of several images as views (DenseNet).

Each file registers a record of `compiler.rules`, a template of an operator, a rewriting of graphs,
or programs behind a cube kernel. Without a file, or without this folder, networks compile to plain
kernels, which are slower. Values stay the same, except where a sum that stays in fp32 on chip is
rounded to fp16 on its way through memory.

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
