"""The public map: adding or removing a name is a decision, made here too."""

from __future__ import annotations

import importlib
import inspect
import pickle

import epl
from epl import errors


def test_public_names():
    assert sorted(epl.__all__) == [
        "Config",
        "Env",
        "GraphKeys",
        "Sections",
        "add_to_collection",
        "annotate",
        "clip_grad_norm_",
        "data",
        "errors",
        "forward_backward",
        "forward_eval",
        "full_state_dict",
        "gather_for_metrics",
        "get_collection",
        "global_mean",
        "global_sum",
        "init",
        "load_full_state_dict",
        "nn",
        "no_sync",
        "num_replicas",
        "parallel",
        "parallelize",
        "plan",
        "record_trace",
        "replicate",
        "set_default_strategy",
        "setup_process_groups",
        "split",
        "split_rule",
        "taskgraphs",
        "unbatched",
        "whole",
    ]
    for name in epl.__all__:
        assert getattr(epl, name).__doc__, f"{name} has no docstring"


def test_the_manuals_signatures():
    assert str(inspect.signature(epl.Config.__init__)).startswith("(self, param_dict")
    assert list(inspect.signature(epl.init).parameters) == ["config"]
    assert list(inspect.signature(epl.replicate).parameters) == ["device_count", "name"]
    assert list(inspect.signature(epl.split).parameters) == ["device_count", "name"]
    assert list(inspect.signature(epl.set_default_strategy).parameters) == ["strategy"]
    assert list(inspect.signature(epl.parallelize).parameters) == ["model", "optimizers_and_loaders", "loss_fn"]


def test_plan_is_a_function_and_a_room():
    """The function is bound after the room was first imported; further imports of the room do not bind the name anew."""
    from epl.plan import make_plan

    room = importlib.import_module("epl.plan")
    for name in ("auto", "schedule.simulation"):
        importlib.import_module(f"epl.plan.{name}")
    assert room.make_plan is make_plan
    assert inspect.isfunction(epl.plan)
    made = make_plan([room.TaskGraphSpec("model", "replicate")], room.ClusterShape.of(1, 2), room.PlanSettings())
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_error_tree_is_drawn_as_it_is():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.EplError)]
    drawn = errors.__doc__ or ""
    for cls in classes:
        assert cls.__name__ in drawn
        others = [b.__name__ for b in cls.__bases__ if not issubclass(b, errors.EplError)]
        line = next(line for line in drawn.splitlines() if cls.__name__ in line)
        for other in others:
            if other != "Exception":
                assert f"({other})" in line
