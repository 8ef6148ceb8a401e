"""Buckets by an exact table, rounds by the quickest of four patterns, a plan by trying all."""

import math


def buckets(gradients, latency_s, rate_bytes_per_s, most):
    n = len(gradients)
    until = [0.0]
    for size, _ in gradients:
        until.append(until[-1] + size)
    best = [[math.inf] * (n + 1) for _ in range(most + 1)]
    came = [[0] * (n + 1) for _ in range(most + 1)]
    best[0][0] = 0.0
    for count in range(1, most + 1):
        for end in range(1, n + 1):
            ready = gradients[end - 1][1]
            for start in range(end):
                before = best[count - 1][start]
                if before == math.inf:
                    continue
                at = max(before, ready) + latency_s + (until[end] - until[start]) / rate_bytes_per_s
                if at < best[count][end]:
                    best[count][end] = at
                    came[count][end] = start
    count = min(range(1, most + 1), key=lambda c: best[c][n])
    ends = []
    end = n
    while end:
        ends.append(end)
        end = came[count][end]
        count = count - 1
    return ends[::-1]


def ring(order):
    p = len(order)
    after = {order[i]: order[(i + 1) % p] for i in range(p)}
    made = []
    for adds in (True, False):
        for step in range(p - 1):
            made.append([[r, after[r], [(i - step + (not adds)) % p], adds]
                         for i, r in enumerate(order)])  # fmt: skip
    return {"blocks": p, "rounds": made}


def direct(p):
    blocks = [[a, b, [b], True] for a in range(p) for b in range(p) if a != b]
    back = [[a, b, [a], False] for a in range(p) for b in range(p) if a != b]
    return {"blocks": p, "rounds": [blocks, back]}


def halving(p):
    if p & (p - 1):
        return None
    made = []
    held = {r: list(range(p)) for r in range(p)}
    step = p // 2
    while step:
        messages = []
        for r in range(p):
            other = r ^ step
            give = [b for b in held[r] if b & step == other & step]
            messages.append([r, other, give, True])
        held = {r: [b for b in held[r] if b & step == r & step] for r in range(p)}
        made.append(messages)
        step //= 2
    step = 1
    while step < p:
        made.append([[r, r ^ step, list(held[r]), False] for r in range(p)])
        held = {r: held[r] + held[r ^ step] for r in range(p)}
        step *= 2
    return {"blocks": p, "rounds": made}


def line(p, cuts=16):
    """Blocks flow to one end, added on the way, and back, one behind the other."""
    made = []
    for t in range(2 * (p - 1) + cuts - 1):
        messages = []
        for b in range(cuts):
            step = t - b
            if 0 <= step < p - 1:
                messages.append([step, step + 1, [b], True])
            elif p - 1 <= step < 2 * (p - 1):
                at = 2 * (p - 1) - step
                messages.append([at, at - 1, [b], False])
        made.append(messages)
    return {"blocks": cuts, "rounds": made}


def both_doubled(p):
    """Everybody sends all it has to a partner at a distance that doubles; p a power of two."""
    if p & (p - 1):
        return None
    rounds = []
    step = 1
    while step < p:
        rounds.append([[r, r ^ step, [0], True] for r in range(p)])
        step *= 2
    return {"blocks": 1, "rounds": rounds}


def rounds(devices, links, size_bytes):
    alpha = links[0][2]
    near = {(a, b): beta for a, b, _, beta in links}
    star = any(max(a, b) == devices for a, b, *_ in links)
    if devices == 2:
        return direct(2)
    slow = max(near.values()) > 1.5 * min(near.values())
    if star:
        beta = links[0][3]
        few = both_doubled(devices)
        if few and size_bytes * beta < alpha * 4:
            return few
        return halving(devices) or ring(list(range(devices)))
    if len(near) == devices * (devices - 1):  # a mesh
        if not slow:
            return direct(devices)
        bad = max(near, key=near.get)
        a, b = bad
        others = [d for d in range(devices) if d not in bad]
        return ring([a, *others[:1], b, *others[1:]])
    if len(near) == 2 * devices:
        return two_ways(devices)
    return line(devices, 32)


def two_ways(p):
    """Two rings, one each way round, each with half of the blocks."""
    one = ring(list(range(p)))
    other = ring(list(range(p))[::-1])
    made = []
    for here, there in zip(one["rounds"], other["rounds"]):
        made.append(
            here + [[a, b, [x + p for x in carried], adds] for a, b, carried, adds in there]
        )
    return {"blocks": 2 * p, "rounds": made}


def plan(model, cluster):
    count = cluster["servers"] * cluster["devices"]
    best = None
    for t in range(1, count + 1):
        for p in range(1, min(count, model["layers"]) + 1):
            if count % (t * p):
                continue
            d = count // (t * p)
            for micro in (2**k for k in range(12)):
                if model["batch"] % (d * micro):
                    continue
                one = {"data": d, "tensor": t, "pipeline": p, "micro": micro}
                if held(model, one) <= cluster["memory_bytes"]:
                    cost = seconds(model, cluster, one)
                    if best is None or cost < best[0]:
                        best = cost, one
    return best[1]


def held(model, p):
    kept = model["layers"] / p["pipeline"] * model["layer_output_bytes"] / p["tensor"]
    kept *= model["batch"] / p["data"] / p["micro"] * min(p["micro"], p["pipeline"])
    return 8 * model["weight_bytes"] / (p["tensor"] * p["pipeline"]) + kept


def seconds(model, cluster, p):
    count = cluster["servers"] * cluster["devices"]
    compute = model["flops"] / count / cluster["flops"]
    fast = cluster["fast_bytes_per_s"]
    slow = cluster["slow_bytes_per_s"]
    inside = fast if p["tensor"] <= cluster["devices"] else slow
    outside = fast if p["tensor"] * p["data"] <= cluster["devices"] else slow
    a_layer = 4 * model["layer_output_bytes"] * model["batch"] / p["data"]
    tensor = model["layers"] / p["pipeline"] * a_layer * (p["tensor"] - 1) / p["tensor"] / inside
    share = model["weight_bytes"] / p["tensor"] / p["pipeline"]
    data = 2 * share * (p["data"] - 1) / p["data"] / outside
    starts = (p["micro"] + p["pipeline"] - 1) * cluster["start_s"]
    return compute * (1 + (p["pipeline"] - 1) / p["micro"]) + tensor + data + starts
