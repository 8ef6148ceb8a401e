# %% [markdown]
# # A2: a schedule contest
#
# Read `README.md` first. Fill in `schedule`, then, in a terminal in this folder,
#
#     ascend-lab course check A2 start.py

# %%
PSEUDONYM = ""  # a name for the leaderboard, if you want to stand on it


# %%
def schedule(problem, chip):
    """Return the fields of a schedule for the product C (m, n) = A (m, k) B (k, n)."""
    raise NotImplementedError("your schedule")
