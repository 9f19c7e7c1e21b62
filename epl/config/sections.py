"""Every setting of epl, declared once: this file is the only place where a key, its type, default and meaning stand.

To add a setting, add a field; its key, environment variable, checks and row in docs/config.md follow (`make docs`).
To release a capability, turn its `built=False` into `built=True`, and drop the section's `today` with the last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_type_hints

from epl.config.setting import About, Form, Setting, read_section


def _normalise_devices(text: str) -> str | None:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(re.fullmatch("[0-9]+", part) for part in parts):
        return None
    devices = [int(part) for part in parts]
    return ",".join(map(str, devices)) if len(set(devices)) == len(devices) else None


def _normalise_memory(text: str) -> str | None:
    if text == "":
        return text
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt])ib", text.strip().lower())
    if match is None or float(match[1]) == 0:
        return None
    return f"{match[1]}{match[2].upper()}iB"


DEVICES = Form(
    expected='"" or distinct device numbers separated by commas, such as "0,1"', normalise=_normalise_devices
)
MEMORY = Form(expected='"" or a size in KiB, MiB, GiB or TiB, such as "8GiB"', normalise=_normalise_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """Micro batches, and how they pass through the stages."""

    num_micro_batch: Annotated[
        int,
        About("Micro batches per optimizer step; with one stage: gradient accumulation.", at_least=1),
    ] = 1
    num_stages: Annotated[
        int | None,
        About(
            "Devices of one pipeline: for automatic stages (None: one, data parallelism), and for forward_backward "
            "without a topology of your own (None: all ranks).",
            at_least=1,
        ),
    ] = None
    strategy: Annotated[
        Literal["PreferBackward", "PreferForward", "PreferBackwardOptimizer", "Interleaved", "ZeroBubble"],
        About(
            "Order of forwards and backwards: PreferForward as in GPipe, PreferBackward as in PipeDream (1F1B).",
            our_words=("PreferBackwardOptimizer", "Interleaved", "ZeroBubble"),
        ),
    ] = "PreferBackward"
    num_chunks: Annotated[int, About("Stages per device, for the Interleaved schedule.", ours=True, at_least=1)] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCheckpointSettings:
    """Recomputing activations in the backward pass instead of keeping them."""

    today: ClassVar[str] = "activations are kept, unless the model itself uses torch.utils.checkpoint"

    type: Annotated[
        Literal["", "collection", "auto", "selective"],
        About(
            "What is recomputed: nothing, between the marked tensors, between blocks epl chooses, or cheap operations.",
            our_words=("selective",),
            built=False,
        ),
    ] = ""
    end_taskgraph: Annotated[
        int, About("Last TaskGraph that auto recomputes; -1: all of them.", at_least=-1, built=False)
    ] = -1
    check_gradients: Annotated[
        bool, About("Compare the gradients with those of a run without recomputing.", built=False)
    ] = False
    memory_limit: Annotated[
        str,
        About("Recompute only as much as this memory per device asks for.", ours=True, form=MEMORY, built=False),
    ] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """Cutting what data-parallel replicas hold alike."""

    today: ClassVar[str] = "every replica holds its whole optimizer state, gradients and parameters"

    level: Annotated[
        Literal["", "v0", "v1", "v2"],
        About(
            'What is cut over the replicas: "v0" optimizer state, "v1" also gradients, "v2" also parameters.',
            our_words=("v0", "v2"),
            built=False,
        ),
    ] = ""
    scope: Annotated[
        Literal["all", "node"],
        About("Cut over all replicas, or over those of one node.", ours=True, built=False),
    ] = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """Keeping outside the device what it does not need at the moment."""

    today: ClassVar[str] = "everything stays on the device"

    level: Annotated[
        Literal["", "v0", "optimizer", "activation", "disk"],
        About(
            'What is kept outside: "v0" all parameters and their state, or only what the word says.',
            our_words=("optimizer", "activation", "disk"),
            built=False,
        ),
    ] = ""
    dir: Annotated[str, About('Directory for "disk".', ours=True, built=False)] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AmpSettings:
    """Automatic mixed precision."""

    today: ClassVar[str] = "the model computes in its own dtype, unless the loop uses torch.autocast"

    level: Annotated[Literal["", "O1"], About("O1: compute in amp.dtype where that is safe.", built=False)] = ""
    debug_log: Annotated[bool, About("Log which operations run in which dtype.", built=False)] = False
    loss_scale: Annotated[
        float | Literal["dynamic"],
        About("Factor on the loss for float16: dynamic, or fixed.", above=0, built=False),
    ] = "dynamic"
    dtype: Annotated[Literal["float16", "bfloat16"], About("The lower precision.", ours=True, built=False)] = "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """How the optimizer's step is carried out."""

    today: ClassVar[str] = "optimizer.step() applies all gradients in one go"

    num_apply_group: Annotated[
        int,
        About("Groups of parameters updated one after another, to save memory.", at_least=1, built=False),
    ] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """What the job runs on, and which devices a TaskGraph gets."""

    device_place_prefer_intra_node: Annotated[bool, About("Place a model replica within one node.")] = True
    run_visible_devices: Annotated[
        str, About("Local devices a worker uses (on CPU: how many); empty: all.", form=DEVICES)
    ] = ""
    colocate_split_and_replicate: Annotated[bool, About("All TaskGraphs share the same devices.")] = False
    devices_per_node: Annotated[
        int, About("Devices that count as one node; 0: a node is a host, as found.", ours=True, at_least=0)
    ] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSettings:
    """How gradients are reduced over the replicas, and how long ranks wait for each other."""

    num_communicators: Annotated[int, About("Process groups that reduce gradients at the same time.", at_least=1)] = 2
    sparse_as_dense: Annotated[bool, About("Turn sparse gradients into dense ones before reducing.")] = False
    max_splits: Annotated[int, About("At most so many fused groups of gradients.", at_least=1)] = 5
    fp16: Annotated[bool, About("Send gradients in float16.")] = False
    fp16_scale: Annotated[int, About("With fp16: multiplied before sending, divided out afterwards.", above=0)] = 128
    clip_after_allreduce: Annotated[
        bool,
        About(
            "Clip the reduced gradients, as one device does; False: each replica clips its own before reducing. "
            "The one default that differs: the manual has False."
        ),
    ] = True
    gradients_reduce_method: Annotated[
        Literal["mean", "sum"], About("The replicas' gradients are averaged, or added up.")
    ] = "mean"
    sync_batch_norm: Annotated[bool, About("Batch norm over the rows of all replicas.", ours=True)] = False
    timeout: Annotated[float, About("Seconds a rank waits for the others before the job ends.", ours=True, above=0)] = (
        600.0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class IoSettings:
    """How files and rows are divided over the replicas."""

    slicing: Annotated[bool, About("Divide the list of files over the replicas.")] = False
    unbalanced_io_slicing: Annotated[bool, About("Some replicas may get one file more.")] = False
    drop_last_files: Annotated[bool, About("Leave out the files that do not divide evenly.")] = False
    uneven_tail: Annotated[
        Literal["weight", "drop"],
        About("The last, smaller global batch: weighted by its rows, or left out.", ours=True),
    ] = "weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSettings:
    """Parallelism without annotations."""

    auto_parallel: Annotated[
        bool, About("Let epl choose the TaskGraphs: pipeline.num_stages stages. Annotations win over it.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """How the parts under `epl.split` compute."""

    sequence_parallel: Annotated[
        bool, About("Cut what lies between split operators along the sequence.", ours=True)
    ] = False
    exact_dropout: Annotated[
        bool, About("Draw the dropout mask of one device, at the cost of drawing it whole.", ours=True)
    ] = False


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All settings as typed data; `Config` adds where the values come from."""

    pipeline: PipelineSettings
    gradient_checkpoint: GradientCheckpointSettings
    zero: ZeroSettings
    offload: OffloadSettings
    amp: AmpSettings
    optimizer: OptimizerSettings
    cluster: ClusterSettings
    communication: CommunicationSettings
    io: IoSettings
    auto: AutoSettings
    split: SplitSettings


SECTIONS: dict[str, type] = get_type_hints(Sections)
SETTINGS: dict[str, Setting] = {
    setting.key: setting for name, section in SECTIONS.items() for setting in read_section(name, section)
}
