"""Checks of chapter 27: bytes of a cache, a roofline, a batch, pages, experts, a plan."""

from collections.abc import Sequence

from ascend_lab.lab.checks import core as ex


@ex.against(
    edges=[(1, 1, 1, 1), (36, 8, 128, 1), (36, 8, 128, 0)],
    layers=range(1, 81),
    kv_heads=[1, 2, 4, 8, 32],
    head_dim=[64, 128],
    tokens=range(1, 4097),
)
def check_ex_27_1(layers: int, kv_heads: int, head_dim: int, tokens: int) -> int:
    """Check `fn(layers, kv_heads, head_dim, tokens)`: bytes of a sequence's keys and values."""
    return 2 * layers * kv_heads * head_dim * tokens * 2  # keys and values, 2 bytes a number


@ex.against(
    edges=[(1.0, 0.0, 1, 1.0), (1.0, 1.0, 2, 1.0)],
    weights=ex.between(1e9, 70e9),
    sequence=ex.between(1e7, 1e9),
    batch=range(1, 257),
    rate=ex.between(1e11, 2e12),
)
def check_ex_27_2(weights: float, sequence: float, batch: int, rate: float) -> float:
    """Check `fn(weights, sequence, batch, rate)`: the roofline of a decode step in seconds."""
    return (weights + batch * sequence) / rate


@ex.against(
    edges=[
        (64.0, 16.0, 48.0, 1),
        (64.0, 16.0, 49.0, 1),
        (64.0, 64.0, 1.0, 1),
        (64.0, 65.0, 1.0, 1),
    ],
    memory=ex.between(20e9, 64e9),
    weights=ex.between(1e9, 70e9),
    sequence=ex.between(1e7, 4e9),
    tp=[1, 2, 4, 8],
)
def check_ex_27_3(memory: float, weights: float, sequence: float, tp: int) -> int:
    """Check `fn(memory, weights, sequence, tp)`: the most sequences that tp devices hold."""
    return max(0, int((memory - weights / tp) // (sequence / tp)))


@ex.against(
    edges=[([], 4), ([4], 4), ([5], 4), ([0, 5], 4), ([1, 1], 128)],
    lengths=lambda rng: rng.integers(1, 900, int(rng.integers(1, 9))).tolist(),
    page=[16, 128, 256],
)
def check_ex_27_4(lengths: Sequence[int], page: int) -> tuple[int, int]:
    """Check `fn(lengths, page)`: the pages that sequences take, and the tokens left empty."""
    pages = sum(-(-length // page) for length in lengths)
    return pages, pages * page - sum(lengths)


@ex.against(
    edges=[(128, 8, 0), (128, 8, 1), (8, 8, 3), (128, 8, 4096)],
    experts=[8, 64, 128, 256],
    chosen=range(1, 9),
    tokens=range(1, 257),
)
def check_ex_27_5(experts: int, chosen: int, tokens: int) -> float:
    """Check `fn(experts, chosen, tokens)`: how many experts some tokens reach on average."""
    # A token does not choose a given expert with probability 1 - chosen / experts.
    return experts * (1 - (1 - chosen / experts) ** tokens)


DEVICE_COUNTS = (1, 2, 4, 8)
MAX_BATCH = 1024


@ex.against(
    edges=[
        (16.0, 1.0, 8.0, 1e9, 0.0, 1.0),
        (16.0, 0.1, 64.0, 1.0, 0.0, 1.0),
        # 48 GB on eight devices fill them; 35 GB take the whole limit; all parts give as much.
        (16.0, 1.0, 6.0, 1e9, 0.0, 1.0),
        (3.0, 1.0, 100.0, 1.0, 0.0, 4.375),
        (16.0, 1.0, 2000.0, 1e9, 0.0, 1.0),
    ],
    weights=ex.between(1.0, 130.0),
    sequence=ex.between(0.05, 2.0),
    memory=[32.0, 64.0],
    rate=ex.between(500.0, 1600.0),
    link=ex.between(0.0, 4e-3),
    limit=ex.between(5e-3, 8e-2),
)
def check_ex_27_6(
    weights: float, sequence: float, memory: float, rate: float, link: float, limit: float
) -> tuple[int, int]:
    """Check `fn(weights, sequence, memory, rate, link, limit)`: the best (tp, batch)."""
    best = (0.0, 0, 0)
    for tp in DEVICE_COUNTS:
        batch = 1
        while batch <= MAX_BATCH and (weights + batch * sequence) / tp <= memory:
            step_s = (weights + batch * sequence) / tp / rate + (link if tp > 1 else 0.0)
            gain = batch / step_s / tp
            # strictly better: of equal plans the first, with fewer devices and sequences, stays
            if step_s <= limit and gain > best[0]:
                best = (gain, tp, batch)
            batch *= 2
    return best[1:]
