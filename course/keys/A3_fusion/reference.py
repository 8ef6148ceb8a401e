"""Merge the pair of neighbouring groups that saves most, until none saves; cancel, share, drop."""


class World:
    def __init__(self, graph, slots, launch):
        self.nodes = {name: (op, list(args)) for name, op, args in graph["nodes"]}
        self.order = [name for name, *_ in graph["nodes"]]
        self.outputs = set(graph["outputs"])
        self.slots = slots
        self.launch = launch
        rows, columns = next(iter(graph["inputs"].values()))
        self.size = rows * columns * 2
        self.readers = {name: set() for name in self.order}
        for name, (_, args) in self.nodes.items():
            for a in args:
                if a in self.readers:
                    self.readers[a].add(name)
        self.memo = {}

    def cost(self, group):
        if group not in self.memo:
            self.memo[group] = self._cost(group)
        return self.memo[group]

    def _cost(self, group):
        ops = [self.nodes[n][0] for n in group]
        if (len(group) > 1 and "transpose" in ops) or ops.count("matmul") > 1:
            return None
        if "matmul" in ops and "sum" in ops:
            return None
        read = set()
        written = 0
        for n in group:
            op, args = self.nodes[n]
            for a in args:
                if a not in group:
                    read.add(a)
                elif op == "matmul" or self.nodes[a][0] == "sum":
                    return None
            if n in self.outputs or self.readers[n] - group:
                written += 1
        if len(read) + len(group) > self.slots:
            return None
        reached = set()
        todo = [next(iter(group))]
        while todo:
            n = todo.pop()
            if n not in reached:
                reached.add(n)
                todo += [a for a in self.nodes[n][1] if a in group]
                todo += list(self.readers[n] & group)
        return (len(read) + written) * self.size + self.launch if reached == group else None

    def circle(self, groups):
        of = {n: i for i, group in enumerate(groups) for n in group}
        waits = [set() for _ in groups]
        for n, (_, args) in self.nodes.items():
            waits[of[n]] |= {of[a] for a in args if a in of} - {of[n]}
        done = set()
        left = set(range(len(groups)))
        while left:
            ready = {i for i in left if waits[i] <= done}
            if not ready:
                return True
            done |= ready
            left -= ready
        return False


def groups(graph, slots, launch_bytes):
    world = World(graph, slots, launch_bytes)
    found = [frozenset([n]) for n in world.order]
    while True:
        of = {n: g for g in found for n in g}
        pairs = {frozenset((of[n], of[a])) for n, (_, args) in world.nodes.items()
                 for a in args if a in of and of[a] != of[n]}  # fmt: skip
        ranked = []
        for one, other in map(tuple, pairs):
            cost = world.cost(one | other)
            if cost is not None:
                ranked.append((cost - world.cost(one) - world.cost(other), sorted(one | other)))
        for saved, names in sorted(ranked):
            both = frozenset(names)
            new = [g for g in found if not g <= both] + [both]
            if saved < 0 and not world.circle(new):
                found = new
                break
        else:
            return [sorted(group, key=world.order.index) for group in found]


def rewrite(graph):
    outputs = list(graph["outputs"])
    nodes = []
    same = {}
    known = {}
    made = {}
    for name, op, args in graph["nodes"]:
        args = [same.get(a, a) for a in args]
        undone = made.get(args[0])
        key = (op, *(sorted(args) if op in ("add", "mul") else args))
        if op == "copy":
            to = args[0]
        elif op in ("neg", "transpose") and undone and undone[0] == op:
            to = undone[1][0]
        elif op == "relu" and undone and undone[0] == "relu":
            to = args[0]
        else:
            to = known.get(key)
        if to is None or name in outputs:
            known.setdefault(key, name)
            nodes.append([name, op, args])
            made[name] = (op, args)
        else:
            same[name] = to
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if node[0] in needed:
            kept.append(node)
            needed |= set(node[2])
    return {"inputs": graph["inputs"], "nodes": kept[::-1], "outputs": outputs}
