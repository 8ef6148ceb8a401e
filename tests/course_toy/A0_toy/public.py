"""A toy: prefix sums, and a cost that the answer states itself."""

from ascend_lab.course.assignment import Case, Judged
from ascend_lab.course.sandbox import Call


def instance(rng, twist):
    return {"offset": int(rng.integers(1, 100)) + twist.get("more", 0)}


def case(drawn, values, timed=False):
    call = Call("sums", {"values": values, "offset": drawn["offset"]})
    return Case(f"{len(values)} values", call, {}, timed)


def cases(drawn, rng):
    return [case(drawn, [1, 2]), case(drawn, rng.integers(0, 9, 5).tolist(), timed=True)]


def judge(case, answer):
    values = case.call.arguments["values"]
    offset = case.call.arguments["offset"]
    right = []
    total = offset
    for value in values:
        total += value
        right.append(total)
    found = {"right": "" if answer["sums"] == right else f"{answer['sums']}, expected others"}
    found["whole"] = "" if all(type(s) is int for s in answer["sums"]) else "not whole"
    return Judged(found, answer["steps"], 100, 10, 10)


def chart(case, answer):
    return f"<svg><title>{len(answer['sums'])}</title></svg>"
