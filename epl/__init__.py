"""epl: hybrid-parallel training from a single-device PyTorch script and a few annotation lines.

    import epl
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    model, optimizer, loader = epl.parallelize(model, optimizer, loader)

Rooms, from the bottom up; each knows only those above it in this list:

    config, errors      every setting; every error
    graph, strategy     what the user wrote: annotations become TaskGraphs           (no torch.distributed)
    plan                every decision, as plain data                                (no torch at all)
    cluster, env        what it runs on: ranks, nodes, process groups, epl.init
    parallel, data      carrying it out: gradients, buffers, clipping; loaders and files
    train               parallelize, metrics, state dicts: what the user calls in the loop
    launch, report      epl-launch; what epl tells the user
"""

from epl import data, errors, nn, parallel
from epl.config import Config
from epl.env import Env, init, setup_process_groups
from epl.graph.collections import GraphKeys
from epl.graph.unbatched import unbatched
from epl.parallel import clip_grad_norm_
from epl.parallel.split.user_rules import Sections, split_rule
from epl.parallel.split.value import whole
from epl.strategy import annotate, replicate, set_default_strategy, split, taskgraphs
from epl.train.collected import add_to_collection, get_collection
from epl.train.foresee import plan  # also the name of a room: `from epl.plan import …` still finds that one
from epl.train.forward_backward import forward_backward, forward_eval
from epl.train.metrics import gather_for_metrics, global_mean, global_sum, no_sync, num_replicas
from epl.train.parallelize import parallelize
from epl.train.state import full_state_dict, load_full_state_dict
from epl.train.tracing import record_trace

__version__ = "0.1.0"
__all__ = [
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
