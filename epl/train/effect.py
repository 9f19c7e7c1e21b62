"""Settings that change nothing under this plan: the user is told, since a setting is meant to do something."""

from __future__ import annotations

from epl.config import SETTINGS, Config
from epl.plan import Plan


def settings_without_effect(config: Config, plan: Plan) -> list[str]:
    """One sentence for each key that was changed from its default and has no effect here."""
    changed = {key: value for key, value in config.to_dict().items() if value != SETTINGS[key].default}
    alone = "there is one rank, and nothing to communicate"
    reasons: dict[str, str] = {}
    if plan.world_size == 1:
        quiet = ("communication.timeout", "communication.num_communicators")
        reasons |= {key: alone for key in changed if key.startswith("communication.") and key not in quiet}
    else:
        if not config.communication.fp16:
            reasons["communication.fp16_scale"] = "communication.fp16 is off"
        if plan.num_replicas == 1:
            reasons["communication.gradients_reduce_method"] = "there is one replica, and it reduces over replicas only"
    if not config.io.slicing:
        reasons["io.unbalanced_io_slicing"] = reasons["io.drop_last_files"] = "io.slicing is off"
    elif config.io.unbalanced_io_slicing:
        reasons["io.drop_last_files"] = "io.unbalanced_io_slicing keeps the remaining files"
    if "split" not in plan.needs():
        reasons["split.sequence_parallel"] = reasons["split.exact_dropout"] = "nothing is split over several devices"
    if len(plan.taskgraphs) == 1:
        reasons["cluster.colocate_split_and_replicate"] = "there is one TaskGraph"
    if plan.layout != "staged":
        reasons["pipeline.strategy"] = "the model is not cut into stages (epl.forward_backward would use it)"
        if not config.auto.auto_parallel:
            reasons["pipeline.num_stages"] = "auto.auto_parallel is off (epl.forward_backward would use it)"
    if plan.devices_per_replica == 1:
        reasons["cluster.device_place_prefer_intra_node"] = "a model replica is one device"
    return [f"{key} = {changed[key]!r} has no effect: {why}" for key, why in reasons.items() if key in changed]
