"""Kernels that one chapter needs: other ways to convolve, to scatter and to fuse."""
