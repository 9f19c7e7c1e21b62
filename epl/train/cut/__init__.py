"""A model that is cut: into stages on different ranks, into micro batches, or both.

sources.py     where the stages come from: annotations, scopes in the forward, or epl itself
model.py       stands in for the model's forward: records, places once, returns lazy values
layout.py      which nodes of a recording run on which stage, and what travels between stages
placer.py      places the model: parameters of other stages lose their bytes, groups and reducers are made
part.py        this rank's part of it: whose gradients are reduced, tied, counted
carrier.py     runs the bodies of calls over the stages of the replica, as `epl.train.lazy` asks
work.py        what the stages of this device compute in one step
stream.py      what they draw random numbers from
peers.py       the ranks of one model replica, and how they agree and share values
state.py       the whole state, gathered and loaded
generation.py  what becomes of `model.generate()`
aside.py       gradients set aside while a step makes others
"""
