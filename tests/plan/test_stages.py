"""Cutting a recorded forward into stages: the rules one by one, and random programs run whole and cut."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from epl.errors import PlanError
from epl.plan.assignment import Assignment
from epl.plan.obstacles import cycles
from epl.plan.stages import cut_stages
from tests.plan.programs import Program, check


def refusal(program: Program, *home: int, **more: object) -> str:
    with pytest.raises(PlanError) as caught:
        program.cut(*home, **more)  # type: ignore[arg-type]
    return str(caught.value)


# --- order, edges, holders --------------------------------------------------------------------------------------------


def test_stages_are_taskgraphs_in_order_of_first_execution() -> None:
    p = Program()
    x = p.input()
    a = p.leaf("a", x, tg="late name")
    b = p.leaf("b", a, tg="early name")
    cut = p.cut(b, taskgraphs=["early name", "late name"])
    assert cut.order == ("late name", "early name")
    assert cut.edges == {(0, 1): (a,)}
    assert cut.holders == {"a.weight": (0,), "b.weight": (1,)}
    assert cut.nodes_of(1) == (b,)
    assert cut.tied == {}
    check(p.nodes, cut, [b])


def test_a_taskgraph_that_runs_first_and_is_fed_later_comes_after_what_feeds_it() -> None:
    """`real = D(x); fake = D(G(z))`: by first execution alone D came before G, and the one edge between them was a cycle."""
    p = Program()
    x, z = p.input(), p.input("z")
    real = p.leaf("D", x, tg="discriminator")
    made = p.leaf("G", z, tg="generator")
    fake = p.leaf("D", p.leaf("norm", made), tg="discriminator")
    cut = p.cut(real, fake)
    assert cut.order == ("generator", "discriminator")
    assert cut.edges == {(0, 1): (made,)}
    check(p.nodes, cut, [real, fake])


def test_taskgraphs_that_feed_each_other_stay_in_order_of_execution_after_what_feeds_them() -> None:
    p = Program()
    x = p.input()
    first = p.leaf("a0", x, tg="a")
    second = p.leaf("b0", first, tg="b")
    p.leaf("after", x, tg="end")
    last = p.leaf("a1", p.leaf("source", x, tg="start"), second, tg="a")
    p.leaf("end1", last, tg="end")
    message = refusal(p)
    assert message.count(" feeds ") == 1
    assert "'b' runs after 'a', but 'b0' (model.py:3) of 'b' feeds 'a1'" in message


def test_a_skip_connection_goes_directly_to_every_consumer() -> None:
    p = Program()
    x = p.input()
    a = p.leaf("a", x, tg="s0")
    b = p.leaf("b", a, tg="s1")
    c = p.leaf("c", a, b, tg="s2")
    d = p.leaf("d", a, c, tg="s3")
    cut = p.cut(d)
    assert cut.edges == {(0, 1): (a,), (0, 2): (a,), (0, 3): (a,), (1, 2): (b,), (2, 3): (c,)}
    check(p.nodes, cut, [d])


def test_what_the_last_stage_wants_travels_there() -> None:
    p = Program()
    x = p.input()
    image = p.leaf("image", x, tg="s0")
    text = p.leaf("text", p.input("ids"), tg="s1")
    pos = p.glue("arange", x)
    cut = p.cut(image, text, pos, x)
    assert cut.edges == {(0, 1): (image,)}
    assert cut.stages[pos] == (1,)
    check(p.nodes, cut, [image, text, pos, x])


def test_an_input_is_read_where_it_is_used() -> None:
    p = Program()
    x, mask = p.input(), p.input("mask")
    a = p.leaf("a", x, mask, tg="s0")
    b = p.leaf("b", a, mask, tg="s1")
    cut = p.cut(b)
    assert (cut.stages[x], cut.stages[mask]) == ((0,), (0, 1))
    assert cut.edges == {(0, 1): (a,)}


def test_tied_weights_are_held_by_every_stage_that_uses_them() -> None:
    p = Program()
    e = p.leaf("embed", p.input(), tg="s0", weights=["embed.weight"])
    b = p.leaf("body", e, tg="s1")
    h = p.leaf("head", b, tg="s2", weights=["embed.weight"])
    cut = p.cut(h)
    assert cut.holders["embed.weight"] == (0, 2)
    assert cut.tied == {"embed.weight": (0, 2)}


def test_a_head_written_as_code_after_the_last_module_ties_the_embedding() -> None:
    p = Program()
    e = p.leaf("embed", p.input(), tg="s0")
    b = p.leaf("body", e, tg="s1")
    w = p.parameter("embed.weight", "s0")
    cut = p.cut(b, w)
    assert cut.tied == {"embed.weight": (0, 1)}


def test_unused_parameters_stay_with_their_taskgraph_or_go_to_the_last_stage() -> None:
    p = Program()
    p.owners.update({"a.unused": "s0", "stray": None})
    p.leaf("b", p.leaf("a", p.input(), tg="s0"), tg="s1")
    cut = p.cut()
    assert (cut.holders["a.unused"], cut.holders["stray"]) == ((0,), (1,))


# --- what no scope covers ---------------------------------------------------------------------------------------------


def test_a_module_goes_to_its_first_consumer() -> None:
    p = Program()
    embed = p.leaf("embed", p.input())
    a = p.leaf("a", embed, tg="s0")
    norm = p.leaf("norm", a)
    b = p.leaf("b", norm, tg="s1")
    cut = p.cut(b)
    assert (cut.stages[embed], cut.stages[norm]) == ((0,), (1,))
    assert cut.edges == {(0, 1): (a,)}


def test_a_module_goes_to_its_first_consumer_through_glue_and_other_modules() -> None:
    p = Program()
    x = p.input()
    a = p.leaf("a", x, tg="s0")
    u = p.leaf("u", x)
    v = p.leaf("v", p.glue("relu", u))
    b = p.leaf("b", a, p.glue("view", v), tg="s1")
    cut = p.cut(b)
    assert [cut.stages[i] for i in (u, u + 1, v, v + 1)] == [(1,)] * 4


def test_glue_with_another_producer_is_a_consumer_with_a_stage() -> None:
    p = Program()
    x = p.input()
    u = p.leaf("u", x)
    a = p.leaf("a", x, tg="s0")
    both = p.glue("add", u, a)
    b = p.leaf("b", both, tg="s1")
    cut = p.cut(b)
    assert (cut.stages[u], cut.stages[both]) == ((0,), (0,))
    assert cut.edges == {(0, 1): (both,)}


def test_a_module_that_no_stage_consumes_goes_to_its_latest_producer() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    c = p.leaf("c", b, tg="s2")
    auxiliary = p.leaf("auxiliary", a, b)
    cut = p.cut(c, auxiliary)
    assert cut.stages[auxiliary] == (1,)
    assert cut.edges[1, 2] == (b, auxiliary)


def test_a_module_without_producer_or_consumer_goes_to_the_last_stage() -> None:
    p = Program()
    x = p.input()
    p.leaf("b", p.leaf("a", x, tg="s0"), tg="s1")
    alone = p.leaf("alone", x)
    assert p.cut().stages[alone] == (1,)


def test_a_module_never_runs_before_its_producer() -> None:
    p = Program()
    x = p.input()
    a = p.leaf("a", x, tg="s0")
    b = p.leaf("b", a, tg="s1")
    u = p.leaf("u", b)
    total = p.glue("add", u, a)  # would be at home in s0, were it not for u
    cut = p.cut(total)
    assert (cut.stages[u], cut.stages[total]) == ((1,), (1,))
    check(p.nodes, cut, [total])


def test_a_module_called_everywhere_is_computed_at_each_place() -> None:
    p = Program()
    d0 = p.leaf("dropout", p.input(), weights=(), random=True)
    a = p.leaf("a", d0, tg="s0")
    d1 = p.leaf("dropout", a, weights=(), random=True)
    b = p.leaf("b", d1, tg="s1")
    cut = p.cut(b)
    assert (cut.stages[d0], cut.stages[d1]) == ((0,), (1,))


def test_an_uncovered_module_with_weights_used_in_two_stages_is_tied() -> None:
    p = Program()
    a = p.leaf("a", p.leaf("norm", p.input()), tg="s0")
    p.leaf("b", p.leaf("norm", a), tg="s1")
    assert p.cut().tied == {"norm.weight": (0, 1)}


def test_glue_goes_to_its_latest_producer() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    total = p.glue("add", a, b)
    view = p.glue("view", a, views=(a,))
    c = p.leaf("c", total, view, tg="s2")
    cut = p.cut(c)
    assert (cut.stages[total], cut.stages[view]) == ((1,), (0,))
    assert cut.edges == {(0, 1): (a,), (0, 2): (view,), (1, 2): (total,)}


def test_glue_of_inputs_alone_is_computed_wherever_it_is_needed() -> None:
    p = Program()
    ids = p.input("ids")
    ones = p.glue("ones")
    mask = p.glue("triu", p.glue("mul", ids, ones), p.constant("bias"))
    a = p.leaf("a", ids, mask, tg="s0")
    b = p.leaf("b", a, tg="s1")
    c = p.leaf("c", b, mask, tg="s2")
    cut = p.cut(c)
    for index in (ones, mask - 1, mask):
        assert cut.stages[index] == (0, 2)
    assert cut.edges == {(0, 1): (a,), (1, 2): (b,)}
    assert cut.buffers == {"bias": (0, 2)}
    check(p.nodes, cut, [c])


def test_glue_of_inputs_that_nobody_needs_runs_nowhere_unless_it_does_something_else() -> None:
    p = Program()
    x = p.input()
    idle = p.glue("mean", x)
    p.leaf("b", p.leaf("a", x, tg="s0"), tg="s1")
    hook = p.glue("register_hook", x, kept=True)
    cut = p.cut()
    assert (cut.stages[idle], cut.stages[hook]) == ((), (0, 1))


def test_random_glue_runs_once_at_its_first_consumer_and_travels() -> None:
    p = Program()
    x = p.input()
    noise = p.glue("randn_like", x, random=True)
    scaled = p.glue("mul", noise, x)
    a = p.leaf("a", x, tg="s0")
    b = p.leaf("b", a, scaled, tg="s1")
    c = p.leaf("c", b, scaled, tg="s2")
    cut = p.cut(c)
    assert (cut.stages[noise], cut.stages[scaled]) == ((1,), (1,))
    assert cut.edges[1, 2] == (scaled, b)
    check(p.nodes, cut, [c])


def test_first_is_by_stage_not_by_time() -> None:
    """The noise is drawn for s1 first in time; drawn there it could not go back to s0."""
    p = Program()
    x = p.input()
    noise = p.glue("rand", random=True)
    shared = p.leaf("shared", x)
    p.leaf("a0", x, tg="s0")
    b = p.leaf("b", x, noise, shared, tg="s1")
    a = p.leaf("a1", x, noise, shared, tg="s0")
    cut = p.cut(a, b)
    assert (cut.stages[noise], cut.stages[shared]) == ((0,), (0,))
    check(p.nodes, cut, [a, b])


def test_a_bare_parameter_runs_with_its_own_taskgraph_or_its_first_consumer() -> None:
    for owner, expected in (("s0", 0), (None, 1)):
        p = Program()
        x = p.input()
        a = p.leaf("a", x, tg="s0")
        token = p.glue("expand", p.parameter("token", owner), x)
        b = p.leaf("b", a, token, tg="s1")
        cut = p.cut(b)
        assert cut.stages[token] == (expected,)
        assert cut.holders["token"] == (expected,)
        check(p.nodes, cut, [b])


def test_a_bare_parameter_beside_another_producer_is_held_there() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    gain = p.parameter("gain", "s1")
    scaled = p.glue("mul", a, gain)
    b = p.leaf("b", scaled, tg="s1")
    again = p.glue("mul", b, gain)
    cut = p.cut(again)
    assert (cut.stages[scaled], cut.holders["gain"]) == ((0,), (0, 1))


def test_a_taskgraph_of_bare_parameters_is_executed_by_their_glue() -> None:
    p = Program()
    x = p.input()
    prompt = p.glue("expand", p.parameter("prompt", "s0"), x)
    b = p.leaf("b", prompt, tg="s1")
    cut = p.cut(b, taskgraphs=["s1", "s0"])
    assert cut.order == ("s0", "s1")
    assert cut.edges == {(0, 1): (prompt,)}


def test_glue_in_a_scope_of_the_forward_is_there() -> None:
    p = Program()
    x = p.input()
    a = p.glue("relu", x, tg="s0")
    b = p.glue("relu", a, tg="s1")
    c = p.glue("mul", b, x, tg="s2")
    cut = p.cut(c)
    assert cut.order == ("s0", "s1", "s2")
    assert cut.edges == {(0, 1): (a,), (1, 2): (b,)}


def test_packing_is_done_beside_the_consumer_and_its_contents_travel() -> None:
    p = Program()
    mask = p.input("mask")
    a = p.leaf("a", mask, tg="s0")
    pack = p.add("packing", "Pair", a, mask)
    b = p.leaf("b", pack, tg="s1")
    again = p.add("packing", "Pair", pack, b)
    c = p.leaf("c", again, tg="s2")
    cut = p.cut(c)
    assert (cut.stages[pack], cut.stages[again]) == ((1, 2), (2,))
    assert cut.edges == {(0, 1): (a,), (0, 2): (a,), (1, 2): (b,)}
    check(p.nodes, cut, [c])


def test_glue_and_modules_see_through_packing() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    u = p.leaf("u", a)
    pack = p.add("packing", "Pair", u)
    b = p.leaf("b", pack, tg="s1")
    unpack = p.glue("loss_of", p.add("packing", "Pair", b))
    cut = p.cut(unpack)
    assert (cut.stages[u], cut.stages[pack], cut.stages[unpack]) == ((1,), (1,), (1,))
    check(p.nodes, cut, [unpack])


def test_one_taskgraph_takes_everything() -> None:
    p = Program()
    x = p.input()
    u = p.leaf("u", x)
    a = p.leaf("a", u, tg="only")
    cut = p.cut(p.glue("add", a, p.parameter("bias")))
    assert cut.edges == {}
    assert set(cut.holders.values()) == {(0,)}


# --- in place ---------------------------------------------------------------------------------------------------------


def test_a_change_of_a_fresh_value_happens_with_the_value_wherever_it_is_needed() -> None:
    p = Program()
    x = p.input()
    mask = p.glue("zeros")
    fill = p.glue("masked_fill_", mask, x, effect_on=mask)
    a = p.leaf("a", x, mask, tg="s0")
    b = p.leaf("b", a, mask, tg="s1")
    cut = p.cut(b)
    assert (cut.stages[mask], cut.stages[fill]) == ((0, 1), (0, 1))
    check(p.nodes, cut, [b])


def test_a_buffer_of_results_is_where_it_is_filled_and_goes_on_from_there() -> None:
    p = Program()
    x = p.input()
    out = p.glue("empty")
    a = p.leaf("a", x, tg="s0")
    p.glue("setitem", out, a, effect_on=out)
    b = p.leaf("b", a, tg="s1")
    last = p.glue("setitem", out, b, effect_on=out)
    c = p.leaf("c", out, tg="s1")
    cut = p.cut(c)
    assert (cut.stages[out], cut.stages[last]) == ((0,), (1,))
    assert cut.edges == {(0, 1): (out, a)}
    check(p.nodes, cut, [c])


def test_a_change_before_the_value_leaves_its_stage_is_seen_by_the_next() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    view = p.glue("view", a, views=(a,))
    p.glue("add_", view, effect_on=view)
    b = p.leaf("b", a, tg="s1")
    cut = p.cut(b)
    assert cut.edges == {(0, 1): (a,)}
    check(p.nodes, cut, [b])


def test_a_stage_may_change_what_it_received() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("relu", a, tg="s1", effect_on=a, weights=())
    c = p.leaf("c", b, tg="s2")
    cut = p.cut(c)
    assert cut.edges == {(0, 1): (a,), (1, 2): (b,)}
    check(p.nodes, cut, [c])


@pytest.mark.parametrize(("later_use", "seen"), [("before", True), ("after", False)])
def test_a_change_of_what_was_received_is_for_that_stage_alone(later_use: str, seen: bool) -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    if later_use == "before":
        c = p.leaf("c", a, b, tg="s2")
    p.leaf("relu", a, tg="s1", effect_on=a, weights=())
    if later_use == "after":
        c = p.leaf("c", a, b, tg="s2")
    if seen:
        check(p.nodes, p.cut(c), [c])
    else:
        message = refusal(p, c)
        assert "'relu' (model.py:4) in 's1' changes a value in place" in message
        assert "'c' (model.py:5) in 's2'" in message
        assert "x = x + y" in message


def test_a_value_named_anew_after_a_change_goes_on_from_where_it_was_changed() -> None:
    """As recordings write it: who uses the value after the change depends on the node that made the change."""
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    view = p.glue("view", a, views=(a,))
    p.leaf("b", a, tg="s1")
    relu = p.leaf("relu", a, tg="s1", effect_on=a, weights=())
    after = p.glue("changed", a, relu, views=(a,))
    c = p.leaf("c", after, tg="s2")
    cut = p.cut(c)
    assert cut.edges == {(0, 1): (a,), (1, 2): (after,)}
    check(p.nodes, cut, [c])
    stale = p.glue("changed", view, relu, views=(view,))  # the view has no part in the change of another copy
    assert "'changed' (model.py:8) in 's1'" in refusal(p, c, p.leaf("d", stale, tg="s2"))


def test_a_change_after_another_stage_has_used_the_value_is_refused() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    p.glue("add_", a, effect_on=a)
    assert "'b' (model.py:3) in 's1'" in refusal(p, b)


def test_a_change_through_one_of_two_received_views_is_refused() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    half = p.glue("getitem", a, views=(a,))
    p.leaf("relu", a, tg="s1", effect_on=a, weights=())
    b = p.leaf("b", half, tg="s1")
    message = refusal(p, b)
    assert "'relu' (model.py:4) in 's1' changes a value in place" in message
    assert "'b' (model.py:5) in 's1' would not see it as on one device" in message


def test_a_buffer_that_glue_changes_is_changed_on_every_rank() -> None:
    p = Program()
    x = p.input()
    count = p.constant("count")
    step = p.glue("add_", count, effect_on=count)
    p.leaf("b", p.leaf("a", x, tg="s0"), tg="s1")
    cut = p.cut()
    assert cut.stages[step] == (0, 1)
    check(p.nodes, cut)
    assert p.cut(num_devices=2) == cut
    message = refusal(p, num_devices=1)
    assert "'add_' (model.py:3) in 's0' and 's1' would change an input or a buffer once for each" in message


def test_a_buffer_changed_by_one_stage_and_read_by_another_is_refused() -> None:
    p = Program()
    x = p.input()
    mean = p.constant("mean")
    a = p.leaf("a", p.glue("sub", x, mean), tg="s0")
    b = p.leaf("b", a, mean, tg="s1")
    p.glue("lerp_", mean, b, effect_on=mean)
    p2 = Program()
    mean = p2.constant("mean")
    a = p2.leaf("a", p2.input(), mean, tg="s0")
    b = p2.leaf("b", a, tg="s1")
    p2.glue("lerp_", mean, b, effect_on=mean)
    for program in (p, p2):
        assert "'lerp_'" in refusal(program, b)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_cycle_is_refused_with_both_taskgraphs_both_modules_the_line_and_the_ways_out() -> None:
    p = Program()
    a = p.leaf("attention.0", p.input(), tg="attention")
    e = p.leaf("experts.0", a, tg="experts")
    back = p.glue("add", a, e)
    p.leaf("attention.1", back, tg="attention")
    message = refusal(p)
    assert "'experts' runs after 'attention'" in message
    assert (
        "'add' (model.py:4) after 'experts.0' of 'experts' feeds 'attention.1' (model.py:5) of 'attention'" in message
    )
    for remedy in ("Change the scopes", "into one scope", "cluster.colocate_split_and_replicate"):
        assert remedy in message


def test_all_problems_come_at_once() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    c = p.leaf("c", b, tg="s2")
    p.leaf("a2", c, b, tg="s0")
    p.owners["d.weight"] = "s3"
    message = refusal(p, taskgraphs=["s0", "s1", "s2", "s3"])
    assert message.startswith("the TaskGraphs cannot be stages of a pipeline: 3 problems")
    assert "never executes TaskGraph 's3' (it holds d.weight)" in message


def test_glue_runs_where_a_parameter_alone_in_its_taskgraph_is() -> None:
    # A head that is a bare parameter in a scope of its own: F.linear(self.body(x), self.classes).
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.glue("mul", a, p.parameter("gain", "s1"))
    cut = p.cut(b, taskgraphs=["s0", "s1"])
    assert (cut.order, cut.stages[b], cut.holders["gain"]) == (("s0", "s1"), (1,), (1,))


def test_a_parameter_alone_in_its_taskgraph_that_nothing_uses_is_refused() -> None:
    p = Program()
    p.leaf("a", p.input(), tg="s0")
    p.parameter("gain", "s1")
    assert "never executes TaskGraph 's1' (it holds gain)" in refusal(p, taskgraphs=["s0", "s1"])


def test_a_forward_without_any_taskgraph_is_refused() -> None:
    with pytest.raises(PlanError, match="executes no TaskGraph"):
        cut_stages([], taskgraphs=[], parameters={})


# --- another recording of a placed model ------------------------------------------------------------------------------


def test_another_recording_keeps_order_and_places() -> None:
    p = Program()
    x = p.input()
    a = p.leaf("a", x, tg="s0")
    head = p.leaf("head", a)
    b = p.leaf("b", head, tg="s1")
    first = p.cut(b)
    assert first.holders["head.weight"] == (1,)
    q = Program()  # the layer of s1 is dropped, and `head` is consumed by nobody
    q.owners = p.owners
    a = q.leaf("a", q.input(), tg="s0")
    head = q.leaf("head", a)
    second = q.cut(head, taskgraphs=["s0", "s1"], earlier=first)
    assert second.order == first.order
    assert second.stages[head] == (1,)
    assert second.holders == first.holders


def test_another_recording_that_leaves_out_a_consumer_keeps_modules_where_they_ran() -> None:
    p = Program()  # layer drop: `table` is tied with the head of s1, and feeds the first layer of s0
    table = p.leaf("table", p.leaf("a", p.input(), tg="s0"), weights=("tied",))
    norm = p.leaf("norm", table)
    b = p.leaf("b", p.leaf("layer", norm, tg="s0"), tg="s1")
    first = p.cut(p.leaf("head", b, tg="s1", weights=("tied",)))
    assert first.holders["tied"] == (0, 1)
    q = Program()
    q.owners = p.owners
    table = q.leaf("table", q.leaf("a", q.input(), tg="s0"), weights=("tied",))
    norm = q.leaf("norm", table)
    second = q.cut(q.leaf("head", q.leaf("b", norm, tg="s1"), tg="s1", weights=("tied",)), earlier=first)
    assert second.stages[table] == second.stages[norm] == (0,)


def test_another_recording_that_uses_a_parameter_elsewhere_is_refused() -> None:
    p = Program()
    a = p.leaf("a", p.input(), tg="s0")
    b = p.leaf("b", a, tg="s1")
    first = p.cut(b)
    q = Program()
    q.owners = p.owners
    a = q.leaf("a", q.input(), tg="s0")
    q.leaf("b", q.glue("mul", a, q.parameter("b.weight")), tg="s1")
    q.leaf("c", a, tg="s2", weights=())
    message = refusal(q, earlier=first)
    assert "uses 'b.weight' in 's0', but the first call placed it in 's1'" in message
    assert "executes TaskGraph 's2', which the first call did not" in message


# --- random programs: run whole and cut, they see the same ------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, in_place: bool) -> tuple[Program, list[int]]:
    p = Program()
    p.input("x")
    stages, reached = draw(st.integers(1, 4)), 0
    for number in range(draw(st.integers(1, 14))):
        count = len(p.nodes)
        some = tuple(draw(st.lists(st.integers(0, count - 1), min_size=0, max_size=3, unique=True)))
        kind = draw(
            st.sampled_from(["leaf", "leaf", "untagged", "glue", "glue", "parameter", "constant", "input", "packing"])
        )
        more: dict[str, object] = {"random": draw(st.booleans()) if kind in ("glue", "leaf") else False}
        if in_place and some and kind in ("leaf", "glue"):
            change = draw(st.sampled_from(["none", "none", "view", "effect"]))
            if change == "view" and kind == "glue":
                more = {"views": some[:1]}
            elif change == "effect":
                more["effect_on"] = some[0]
            if p.nodes[some[0]].kind == "packing":
                more = {}
        if kind == "leaf":  # mostly onwards, sometimes back: a cycle unless nothing depends on it
            reached = min(stages - 1, reached + draw(st.integers(0, 1)))
            stage = reached if draw(st.integers(0, 9)) else draw(st.integers(0, reached))
            p.leaf(f"leaf{number}", *some, tg=f"s{stage}", **more)
        elif kind == "untagged":
            p.leaf(f"leaf{number}", *some, **more)
        elif kind == "glue":
            p.glue(f"glue{number}", *some, **more)
        elif kind == "packing":
            p.add("packing", f"pack{number}", *some)
        elif kind == "parameter":
            p.parameter(f"parameter{number}", draw(st.sampled_from([None, f"s{reached}"])))
        elif kind == "constant":
            p.constant(f"constant{number}")
        else:
            p.input(f"x{number}")
    p.leaf("end", len(p.nodes) - 1, tg=f"s{stages - 1}")
    home = draw(st.lists(st.integers(0, len(p.nodes) - 1), max_size=3, unique=True))
    return p, home


@settings(max_examples=150)
@given(programs(in_place=False))
def test_random_programs_see_the_same_when_cut(made: tuple[Program, list[int]]) -> None:
    program, home = made
    try:
        cut = program.cut(*home)
    except PlanError as error:
        event("refused: " + ("a cycle" if "feeds" in str(error) else "something else"))
        names = dict.fromkeys(n.taskgraph for n in program.nodes if n.taskgraph is not None and n.kind != "parameter")
        for order in permutations(names) if "feeds" in str(error) else ():
            assert cycles(Assignment(program.nodes, program.owners, order, {}, frozenset(home), {})), order
        return
    check(program.nodes, cut, home)


@settings(max_examples=250)
@given(programs(in_place=True))
def test_random_programs_that_change_values_in_place_see_the_same_when_cut(made: tuple[Program, list[int]]) -> None:
    program, home = made
    try:
        cut = program.cut(*home)
    except PlanError as error:
        event("refused: " + ("in place" if "in place" in str(error) else "something else"))
        return
    event("cut into several stages" if cut.num_stages > 1 else "one stage")
    check(program.nodes, cut, home)
