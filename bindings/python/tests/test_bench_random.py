"""The random problems of bench/ and their report, on made-up times."""

import random

import pytest
import random_cases
import random_report


def drawn(kind, count=400, seed=1):
    rng = random.Random(seed)
    return [random_cases.draw(rng, kind) for _ in range(count)]


def row(kind, ours, peer):
    case = drawn(kind, 1)[0]
    return {**case, "pass": "forward", "us": {"flashtune": ours, "fa3": peer}, "config": "sm90"}


def test_a_seed_draws_the_problems_that_it_drew_before_there_were_unusual_ones():
    rng = random.Random(7)
    assert [random_cases.label(random_cases.draw(rng, kind)) for kind in random_cases.KINDS] == [
        "b4 h12 s1006 d80",
        "b2 h3 s7718 d64 causal",
        "b1 h64/4 s342 d64 causal",
        "b4 h5 s1024 k1500 d64",
        "b64 h16 s49 d72 causal",
    ]


def test_unusual_problems_have_what_the_other_kinds_lack():
    unusual = drawn("unusual")
    usual = [case for kind in random_cases.KINDS for case in drawn(kind)]
    for lacks in (
        lambda case: case["seqlen_q"] == 1,
        lambda case: case["heads"] == 1 and case["batch"] == 3,
        lambda case: case["heads_kv"] == 1 and case["heads"] in (3, 20),
        lambda case: case["seqlen_q"] < 49,
        lambda case: case["seqlen_q"] == 3001 != case["seqlen_k"],
        lambda case: case["heads"] in (5, 25) and case["seqlen_q"] == case["seqlen_k"],
        lambda case: case["head_dim"] in (56, 88, 136, 224),
    ):
        assert any(map(lacks, unusual))
        assert not any(map(lacks, usual))
    assert any(case["seqlen_k"] == 77 for case in unusual)
    assert max(case["seqlen_k"] for case in unusual) > 25000


@pytest.mark.parametrize("kind", random_cases.NAMED_KINDS)
def test_problems_of_every_kind_are_ones_that_all_peers_take(kind):
    for case in drawn(kind):
        assert case["heads"] % case["heads_kv"] == 0 and case["head_dim"] % 8 == 0
        # Peers align the causal diagonal differently where lengths differ.
        assert not case["causal"] or case["seqlen_q"] == case["seqlen_k"]
        rows = max(case["seqlen_q"], case["seqlen_k"])
        is_one = case["batch"] == 1
        assert is_one or case["batch"] * case["heads"] * rows * case["head_dim"] <= random_cases.MOST_ELEMENTS


def test_the_report_has_unusual_problems_only_where_some_ran():
    usual = [row("few", 1.0, 1.5), row("many", 1.0, 2.0)]
    assert "unusual" not in random_report.table(usual)
    assert "unusual" not in random_report.chart(usual, "NVIDIA H200")
    both = [*usual, row("unusual", 2.0, 1.5)]
    assert "| unusual | 0.75, 0.75, 1 of 1 |" in random_report.table(both)
    assert "| few | 1.50, 1.50, 0 of 1 |" in random_report.table(both)
    assert "unusual" in random_report.chart(both, "NVIDIA H200")
