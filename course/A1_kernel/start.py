# %% [markdown]
# # A1: a kernel
#
# Read `README.md` first. Fill in `kernel`, then, in a terminal in this folder,
#
#     ascend-lab course check A1 start.py
#
# The notebook and the script are the same; hand in either, with `log.md`.

# %%
PSEUDONYM = ""  # a name for the leaderboard, if you want to stand on it


# %%
def kernel(chip_file, rows, width, dtype, norm, eps):
    """Return texts of programs, one a core, that normalise every row of x (rows, width) into y.

    chip_file: path of your chip; norm: "rms" or "absmean"; eps: added to the mean.
    """
    from ascend_lab.machine.chip import load_chip
    from ascend_lab.machine.isa import KernelBuilder

    chip = load_chip(chip_file)
    k = KernelBuilder("norm", chip)
    x = k.tensor("x", dtype, rows * width)
    y = k.tensor("y", dtype, rows * width)
    raise NotImplementedError("your kernel")
    return [str(k.finish())]
