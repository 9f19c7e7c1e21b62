"""Layers that know how to be divided: mixtures of experts, whole (`MoE`) or in pieces (`TopKGate`, `Experts`)."""

from epl.nn.balance import Balance, Statistics
from epl.nn.experts import Experts
from epl.nn.gate import Routes, TopKGate
from epl.nn.moe import MoE

__all__ = ["Balance", "Experts", "MoE", "Routes", "Statistics", "TopKGate"]
