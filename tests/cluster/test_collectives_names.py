"""Names of operations and algorithms, and what `make` refuses."""

import pytest
from collective_cases import CASES, rows

from ascend_lab.cluster import ALGORITHMS, OPS, load_topology, make
from ascend_lab.cluster.collectives import Name, op_name, parse_name
from ascend_lab.errors import ClusterError


def test_every_operation_has_two_algorithms_or_more() -> None:
    assert set(ALGORITHMS) == set(OPS)
    assert all(len(names) >= 2 for names in ALGORITHMS.values())


@pytest.mark.parametrize("text", ["allreduce", "all-reduce", "all_reduce", "AllReduce"])
def test_spellings_of_an_operation(text: str) -> None:
    assert op_name(text) == "all_reduce"


def test_names_with_levels_and_chunks() -> None:
    assert parse_name("all_reduce", "Ring") == Name("ring")
    assert parse_name("all_reduce", "halving_doubling*2") == Name("halving-doubling", chunks=2)
    name = "hierarchical( 8: mesh, nhr ) * 4"
    assert parse_name("all_reduce", name) == Name("hierarchical", "mesh", "nhr", 4, 8)
    assert parse_name("broadcast", "binomial")[0] == "tree"
    assert parse_name("broadcast", "pipeline*8") == Name("chain", chunks=8)
    assert parse_name("all_reduce", "pipeline")[0] == "pipeline"


@pytest.mark.parametrize(("op", "name"), CASES)
def test_a_schedule_is_made_again_from_its_name(op: str, name: str) -> None:
    first = make(op, name, 8, chunks=3, groups=rows(8, 4))
    again = make(op, first.algorithm, 8, groups=rows(8, 4))
    assert again.algorithm == first.algorithm and again.blocks == first.blocks
    for one, two in zip(first.rounds, again.rounds, strict=True):
        assert (one.blocks == two.blocks).all() and (one.targets == two.targets).all()


def test_defaults_between_servers_are_as_on_the_910() -> None:
    of_four = make("all_reduce", "hierarchical", load_topology("910a-roce:32"))
    halves = make("all_reduce", "hierarchical(4)", load_topology("910a-server"))
    assert halves.algorithm == "hierarchical(4:mesh,halving-doubling)"
    of_three = make("all_reduce", "hierarchical", load_topology("910a-roce:24"))
    assert of_four.algorithm == "hierarchical(mesh,halving-doubling)"
    assert of_three.algorithm == "hierarchical(mesh,ring)"


@pytest.mark.parametrize(
    "bad",
    [
        "rings",
        "ring*",
        "ring*0",
        "ring/2",
        "ring(mesh,nhr)",
        "hierarchical/0",
        "tree(ring,ring)x",
        "",
        "star",
    ],
)
def test_unknown_algorithms(bad: str) -> None:
    with pytest.raises(ClusterError):
        make("all_reduce", bad, 4)


def test_what_make_refuses() -> None:
    for ranks, options in (
        (0, {}),
        (4, {"root": 4}),
        (4, {"root": -1}),
        (4, {"chunks": 0}),
    ):
        with pytest.raises(ClusterError):
            make("broadcast", "tree", ranks, **options)
    with pytest.raises(ClusterError, match="allreduces"):
        make("allreduces", "ring", 4)
    with pytest.raises(ClusterError, match="servers of one size"):
        make("all_reduce", "hierarchical", 5, groups=[[0, 1], [2, 3, 4]])
    with pytest.raises(ClusterError, match="servers of one size"):
        make("all_reduce", "hierarchical", 4, groups=[[0, 1], [1, 2]])
    with pytest.raises(ClusterError, match="levels"):
        make("all_reduce", "hierarchical(star,ring)", 4, groups=rows(4, 2))
    with pytest.raises(ClusterError, match="without names"):
        make("all_reduce", "pipeline(mesh,ring)", 4, groups=rows(4, 2))
