# %% [markdown]
# # Sums

# %%
def sums(values, offset):
    """Return the prefix sums behind an offset, and the steps it took."""
    raise NotImplementedError("yours")
