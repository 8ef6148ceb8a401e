"""A5: buckets of gradients, rounds of messages, a plan: cases, plain answers, bounds, the judge."""

import math
from itertools import product

import numpy as np

from ascend_lab.cluster import Schedule, Topology, execute, time_collective
from ascend_lab.cluster.schedule import Round
from ascend_lab.course.assignment import Case, Judged, draw
from ascend_lab.course.sandbox import Call
from ascend_lab.errors import AscendLabError

NAMES = ("legal", "complete", "quicker")
TWISTS = {
    "layers": {
        "says": "a rule for `buckets`, part of *legal*: gradients 2i and 2i + 1, counted from 0, "
        "are weight and bias of one layer and travel in one bucket. So every bucket but the last "
        "ends at an even number."
    }
}
"""What a term may add to the task: no argument of `buckets` says it, the hand-out does."""


def instance(rng, twist):
    """Return a student's network and the term's rules."""
    return {
        "latency_s": float(rng.choice([10e-6, 20e-6, 40e-6])),
        "rate_bytes_per_s": float(rng.choice([5e9, 8e9, 12e9])),
        "most": int(twist.get("most_buckets", 8)),
        "slow_link": float(twist.get("slow_link", 0.25)),
        "adds": twist.get("adds", ""),
    }


# -- buckets ---------------------------------------------------------------------------------------


def bucket_case(drawn, rng, n, timed=True, zeros=False):
    """Return gradients of a network: bytes, and the second each is ready, last layer first."""
    sizes = np.exp(rng.normal(13, 1.2, n))
    if zeros:
        sizes[rng.integers(0, n, n // 4)] = 0
    rate = drawn["rate_bytes_per_s"]
    most = drawn["most"]
    sizes = (sizes * (1600 * drawn["latency_s"] * rate / sizes.sum())).astype(int)
    # half the bytes could be sent while the rest is computed
    ready = np.cumsum(rng.exponential(1, n))
    ready *= sizes.sum() / rate / ready[-1] * rng.uniform(0.95, 1.05)
    gradients = [[int(s), float(t)] for s, t in zip(sizes, ready)]
    arguments = {"gradients": gradients, "latency_s": drawn["latency_s"] * 20,
                 "rate_bytes_per_s": rate, "most": most}  # fmt: skip
    known = {"layers": drawn["adds"] == "layers"}
    return Case(f"{n} gradients", Call("buckets", arguments), known, timed)


def end_of_buckets(ends, gradients, latency_s, rate_bytes_per_s):
    """Return when the last bucket has arrived: one after another, each when all of it is ready."""
    at = 0.0
    first = 0
    for end in ends:
        size = sum(size for size, _ in gradients[first:end])
        at = max(at, gradients[end - 1][1]) + latency_s + size / rate_bytes_per_s
        first = end
    return at


def least_end(gradients, latency_s, rate_bytes_per_s):
    """Return a bound: whatever the buckets, the bytes from gradient k on leave after k is ready."""
    rest = 0
    least = 0.0
    for size, ready in reversed(gradients):
        rest += size
        least = max(least, ready + latency_s + rest / rate_bytes_per_s)
    return least


def judge_buckets(given, answer, timed, layers):
    """Judge the ends of the buckets; `layers` keeps the gradients of a layer together."""
    gradients = given["gradients"]
    most = given["most"]
    if not (isinstance(answer, list) and answer and all(type(e) is int for e in answer)):
        return Judged(dict.fromkeys(NAMES, "a list of whole numbers: where each bucket ends"))
    found = dict.fromkeys(NAMES, "")
    rising = all(a < b for a, b in zip([0, *answer], answer))
    if not rising or len(answer) > most:
        found["legal"] = f"ends must rise from 1, at most {most} buckets; got {answer[:6]}..."
    parted = [end for end in answer[:-1] if end % 2]
    if layers and parted:
        found["legal"] = f"a bucket ends at {parted[0]}, between two gradients of one layer"
    if answer[-1] != len(gradients):
        found["complete"] = f"the last bucket ends at {answer[-1]} of {len(gradients)} gradients"
    if found["legal"] or found["complete"]:
        return Judged(found | {"quicker": "not timed"})
    cost_of = (given["latency_s"], given["rate_bytes_per_s"])
    cost = end_of_buckets(answer, gradients, *cost_of)
    base = end_of_buckets([len(gradients)], gradients, *cost_of)
    if cost > base or (timed and cost >= base):
        found["quicker"] = f"{cost:.6f} s, one bucket takes {base:.6f} s"
    least = least_end(gradients, *cost_of)
    return Judged(found, cost, base, 1.02 * least, least)


# -- rounds ----------------------------------------------------------------------------------------


def network(kind, count, alpha, beta, slow):
    """Return links [from, to, latency, seconds a byte]; a switch, if any, comes last."""
    pairs = {
        "star": [(i, count) for i in range(count)],
        "ring": [(i, (i + 1) % count) for i in range(count)],
        "line": [(i, i + 1) for i in range(count - 1)],
        "mesh": [(i, j) for i in range(count) for j in range(i)],
    }
    links = [[a, b, alpha, beta] for a, b in pairs["mesh" if kind == "slow mesh" else kind]]
    if kind == "slow mesh":  # one of its links is slow
        links[0][3] = beta / slow
    return links + [[b, a, *costs] for a, b, *costs in links]


def rounds_case(drawn, kind, count, latencies, timed=True):
    """Return an all-reduce over `count` devices of what a link sends in so many latencies."""
    beta = 1 / drawn["rate_bytes_per_s"]
    size_bytes = round(latencies * drawn["latency_s"] / beta / 64) * 64
    links = network(kind, count, drawn["latency_s"], beta, drawn["slow_link"])
    arguments = {"devices": count, "links": links, "size_bytes": size_bytes}
    return Case(f"{kind} of {count}, {size_bytes:,} B", Call("rounds", arguments), {}, timed)


def topology_of(given):
    """Return the package's network of a case."""
    from ascend_lab.cluster.topology import Link

    count = given["devices"]
    links = tuple(Link(a, b, alpha, beta) for a, b, alpha, beta in given["links"])
    switch = ("switch",) if max(max(a, b) for a, b, *_ in given["links"]) == count else ()
    return Topology("case", tuple(f"d{i}" for i in range(count)), switch, links)


def leader(count):
    """Return the plain all-reduce: everything to device 0, and the sum back."""
    others = range(1, count)
    return {"blocks": 1, "rounds": [[[i, 0, [0], True] for i in others],
                                    [[0, i, [0], False] for i in others]]}  # fmt: skip


def schedule_of(answer, count):
    """Return the package's schedule of an answer; raise `ValueError` where it is none."""
    blocks = answer["blocks"]
    rounds = answer["rounds"]
    if type(blocks) is not int or not 1 <= blocks <= 4096 or len(rounds) > 4096:
        raise ValueError("1 to 4096 blocks, at most 4096 rounds")
    made = []
    for messages in rounds:
        for a, b, carried, adds in messages:
            whole = all(type(x) is int for x in (a, b, *carried)) and type(adds) is bool
            if not whole or not (0 <= a < count and 0 <= b < count and a != b and carried):
                raise ValueError(
                    f"a message [from, to, [blocks], adds]; got {[a, b, carried, adds]}"
                )
            if min(carried) < 0 or max(carried) >= blocks or len(set(carried)) < len(carried):
                raise ValueError(f"blocks 0..{blocks - 1}, each once; got {carried[:6]}")
        if messages:
            flags = np.array([m[3] for m in messages])
            made.append(Round.of([m[0] for m in messages], [m[1] for m in messages],
                                 [m[2] for m in messages], flags))  # fmt: skip
    return Schedule("all_reduce", "handed in", count, blocks, tuple(made))


def judge_rounds(given, answer, rng):
    """Judge an all-reduce written as rounds of messages, on arrays that `rng` draws."""
    count = given["devices"]
    net = topology_of(given)
    try:
        made = schedule_of(answer, count)
    except (ValueError, TypeError, KeyError) as error:
        return Judged(dict.fromkeys(NAMES, f"{error}"[:200]))
    found = dict.fromkeys(NAMES, "")
    arrays = [rng.integers(0, 1000, made.blocks * 3).astype(np.int64) for _ in range(count)]
    try:
        results = execute(made, arrays)
    except AscendLabError as error:
        return Judged(found | {"legal": str(error), "complete": "not run", "quicker": "not timed"})
    wrong = [rank for rank, got in enumerate(results) if not np.array_equal(got, sum(arrays))]
    if wrong:
        return Judged(found | {"complete": f"rank {wrong[0]} does not hold the sum"})
    cost = time_collective(made, net, given["size_bytes"])
    base = time_collective(schedule_of(leader(count), count), net, given["size_bytes"]).time_s
    if cost.time_s >= base:
        found["quicker"] = f"{cost.time_s:.6f} s, by a leader {base:.6f} s"
    return Judged(found, cost.time_s, base, 1.02 * cost.lower_bound_s, cost.lower_bound_s)


# -- a plan ----------------------------------------------------------------------------------------


def plan_case(drawn, rng, timed=True):
    """Return a model and a cluster, as plain numbers."""
    model = {
        "layers": int(rng.choice([24, 32, 48])), "weight_bytes": float(rng.uniform(20e9, 50e9)),
        "flops": float(rng.uniform(0.5e16, 3e16)), "batch": int(rng.choice([128, 256, 512])),
        "layer_output_bytes": float(rng.uniform(20e6, 80e6)),
    }  # fmt: skip
    cluster = {
        "servers": int(rng.choice([2, 4, 8])), "devices": 8, "memory_bytes": 32e9, "flops": 2.4e14,
        "start_s": 0.02,
        "fast_bytes_per_s": 30e9, "slow_bytes_per_s": drawn["rate_bytes_per_s"] * 1.5,
    }  # fmt: skip
    call = Call("plan", {"model": model, "cluster": cluster})
    return Case(f"plan, {cluster['servers']} servers", call, {}, timed)


def fits_bytes(model, p):
    """Return what a device holds: weights, gradients and states (16 of 2 bytes), outputs kept."""
    share = p["tensor"] * p["pipeline"]
    kept = model["layers"] / p["pipeline"] * model["layer_output_bytes"] / p["tensor"]
    held = kept * model["batch"] / p["data"] / p["micro"] * min(p["micro"], p["pipeline"])
    return 8 * model["weight_bytes"] / share + held


def step_s(model, cluster, p):
    """Return the seconds of a training step under a plan, as the README says."""
    count = cluster["servers"] * cluster["devices"]
    compute = model["flops"] / count / cluster["flops"]
    bubble = compute * (p["pipeline"] - 1) / p["micro"]
    inside = cluster[
        "fast_bytes_per_s" if p["tensor"] <= cluster["devices"] else "slow_bytes_per_s"
    ]
    per_layer = 4 * model["layer_output_bytes"] * model["batch"] / p["data"]
    tensor = model["layers"] / p["pipeline"] * per_layer * (p["tensor"] - 1) / p["tensor"] / inside
    near = p["tensor"] * p["data"] <= cluster["devices"]
    outside = cluster["fast_bytes_per_s" if near else "slow_bytes_per_s"]
    share = model["weight_bytes"] / p["tensor"] / p["pipeline"]
    data = 2 * share * (p["data"] - 1) / p["data"] / outside
    starts = (p["micro"] + p["pipeline"] - 1) * cluster["start_s"]
    return compute + bubble + tensor + data + starts


def plans(model, cluster):
    """Return every legal plan."""
    count = cluster["servers"] * cluster["devices"]
    ways = [d for d in range(1, count + 1) if count % d == 0]
    for t, p in product(ways, ways):
        if count % (t * p) or t * p > count or p > model["layers"]:
            continue
        d = count // (t * p)
        for micro in (2**k for k in range(12)):
            if model["batch"] % (d * micro) == 0:
                yield {"data": d, "tensor": t, "pipeline": p, "micro": micro}


def judge_plan(given, answer):
    """Judge a plan against the best of all."""
    model = given["model"]
    cluster = given["cluster"]
    legal = list(plans(model, cluster))
    if answer not in legal:
        said = "a plan {data, tensor, pipeline, micro} whose product is the number of devices"
        return Judged(dict.fromkeys(NAMES, f"{said}; got {answer}"[:200]))
    found = dict.fromkeys(NAMES, "")
    fitting = [p for p in legal if fits_bytes(model, p) <= cluster["memory_bytes"]]
    if answer not in fitting:
        found["complete"] = f"needs {fits_bytes(model, answer) / 1e9:.1f} GB a device"
    cost = step_s(model, cluster, answer)
    times = sorted(step_s(model, cluster, p) for p in fitting)
    base = math.exp(sum(map(math.log, times)) / len(times))
    if cost > base:
        found["quicker"] = f"{cost:.3f} s, the mean of all plans that fit {base:.3f} s"
    return Judged(found, cost, base, 1.02 * times[0], times[0])


# -- all three -------------------------------------------------------------------------------------


def cases(drawn, rng):
    """Return the public cases."""
    return [
        bucket_case(drawn, rng, 3, timed=False), bucket_case(drawn, rng, 60),
        rounds_case(drawn, "star", 2, 0.01, timed=False), rounds_case(drawn, "star", 8, 400),
        rounds_case(drawn, "ring", 6, 200), plan_case(drawn, rng),
    ]  # fmt: skip


def judge(case, answer):
    """Judge an answer of any of the three functions."""
    given = case.call.arguments
    if case.call.function == "buckets":
        return judge_buckets(given, answer, case.timed, case.known["layers"])
    if case.call.function == "rounds":
        return judge_rounds(given, answer, draw(case, answer))
    return judge_plan(given, answer)


def chart(case, answer):
    """Draw buckets on a line of time; the others have no picture."""
    if case.call.function != "buckets":
        return ""
    given = case.call.arguments
    gradients = given["gradients"]
    at = 0.0
    first = 0
    boxes = []
    end_s = end_of_buckets(answer, gradients, given["latency_s"], given["rate_bytes_per_s"])
    x = 620 / end_s
    for end in answer:
        size = sum(size for size, _ in gradients[first:end])
        start = max(at, gradients[end - 1][1])
        at = start + given["latency_s"] + size / given["rate_bytes_per_s"]
        boxes.append(f'<rect x="{start * x:.1f}" y="30" width="{(at - start) * x:.1f}" height="24" '
                     f'fill="#4878a8" stroke="#123"/>')  # fmt: skip
        first = end
    ticks = "".join(f'<line x1="{t * x:.1f}" x2="{t * x:.1f}" y1="10" y2="22" stroke="#a33"/>'
                    for _, t in gradients)  # fmt: skip
    said = f"{len(answer)} buckets, the last arrives after {end_s * 1e3:.2f} ms"
    head = f'<svg viewBox="0 0 640 64" width="640" role="img" aria-label="{said}">'
    return f"{head}{ticks}{''.join(boxes)}</svg>"
