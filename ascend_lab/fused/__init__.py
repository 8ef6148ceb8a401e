"""Special kernels that plug into the compiler: several operators, or one done in a special way.

- `first_images`: first layers on pixels of 4 channels, and the way there from planes.
- `attention_moves`: attention with the moves around it.
- `tandem`: a pointwise convolution and the depthwise one that reads it; what lies between stays in
  L1.
- `gates`: squeeze and excite, from the means of channels to the convolution of what they scale.
- `joint`: two convolutions that are added.
- `pooled`: a convolution and the largest of windows of it.
- `channels`: moves of channels as products with zeros and ones.
- `blocks`: joins of several images as views, and the kernels that find their blocks.
- `row_norm`: layer norm of rows in fractals, whose sums the cube adds up.

Each file registers a record (`compiler.rules`). Without a file, or without this folder, networks
compile to plain kernels: slower, with the same values.

>>> from ascend_lab.compiler.rules import fusions
>>> len(fusions())
4
"""

PLUGINS = (
    "first_images",
    "attention_moves",
    "tandem",
    "gates",
    "joint",
    "pooled",
    "row_norm",
    "channels",
    "blocks",
)
"""The modules that register something, in the order in which their rules are asked."""
