"""Fused kernels: several operators in one kernel, so that what lies between them stays on chip.

Between two kernels a tensor goes out to global memory (GM) and comes back. A fused kernel keeps it
in a core's buffers, and starts once instead of twice:

    plain floor    GM -> operator 1 -> GM -> operator 2 -> GM
    fused          GM -> operator 1 -> L1, UB or L0C -> operator 2 -> GM

- `first_images`: the image that enters a network, stored as the first convolution wants it.
- `attention_moves`: attention that reads and writes transposed tensors in place.
- `tandem`: a pointwise convolution and the depthwise one that reads it (MobileNet).
- `gates`: squeeze and excite, up to the convolution of the scaled image (EfficientNet).
- `joint`: two convolutions whose results are added (ResNet).
- `pooled`: a convolution and the max pooling of its result.
- `channels`: moves of channels as products with a matrix of zeros and ones (ShuffleNet).
- `blocks`: joins of several images as views (DenseNet).
- `row_norm`: layer norm whose sums the cube adds up (BERT).
- `plane_means`: the mean of each channel of an image by the cube (ResNet, MobileNet).
- `max_pool`: max pooling that shares what overlapping windows have in common (Inception).
- `channel_sums`: both sums of each channel behind a trained batch norm (ResNet).

Each file registers a record of `compiler.rules` or a template of an operator. Without a file, or
without this folder, networks compile to plain kernels, which are slower. Values stay the same,
except where a sum that stays in fp32 on chip is rounded to fp16 on its way through memory.

>>> from ascend_lab.compiler.rules import fusions
>>> len(fusions())
5
"""

PLUGINS = (
    "first_images",
    "attention_moves",
    "tandem",
    "gates",
    "joint",
    "pooled",
    "row_norm",
    "plane_means",
    "max_pool",
    "channel_sums",
    "channels",
    "blocks",
)
"""The modules with special kernels. Of two rules that claim a node the earlier one has priority."""
